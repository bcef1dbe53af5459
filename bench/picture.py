"""Draws a result: bars for each workload and curves for growing sizes, for light and dark pages."""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from typing import Any, Final

# `python bench/picture.py` puts bench/ itself on the path, and `import bench` needs what is above it.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.kit.panels import (
    SUMMARY,
    Chart,
    Panel,
    Row,
    find_state,
    plan_charts,
    plan_compile_panels,
    plan_panels,
    read_result,
)

_WIDTH_IN: Final = 10.0
_DPI: Final = 166
"""Twice the width of a README, for high-resolution screens."""
_GAP: Final = 0.45
_COLOURS: Final = 64
_COMPILE_CAPTION: Final = (
    "CPU seconds from the start of a process to the end of its first training step; shorter is better"
)


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours for one background that are distinct also for colour-blind readers."""

    name: str
    background: str
    text: str
    faint: str
    own: str
    other: str
    curves: tuple[str, str, str]


LIGHT: Final = Theme("light", "#ffffff", "#1f2328", "#818b98", "#0072b2", "#b4bcc6", ("#0072b2", "#d55e00", "#009e73"))
DARK: Final = Theme("dark", "#0d1117", "#e6edf3", "#7d8590", "#56b4e9", "#484f58", ("#56b4e9", "#e69f00", "#2fbf95"))


def digest_result(path: Path) -> str:
    """Return the metadata of a picture that identifies its result."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def draw_all(path: Path, folder: Path, *, prefix: str | None = None) -> list[Path]:
    """Draw a result for light and dark pages; return the files, or none if matplotlib is not installed."""
    if util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed (pip install 'holdfast[peers]')", file=sys.stderr)
        return []
    result = read_result(path)
    panels, charts = plan_panels(result["results"]), plan_charts(result["results"])
    compiled = plan_compile_panels(result["results"])
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    for theme in (LIGHT, DARK):
        caption = _caption(result["results"])
        figures = {"speed": _draw_bars(panels, theme, caption)} if panels else {}
        if summary := [panel for panel in panels if panel.title in SUMMARY]:
            figures["summary"] = _draw_bars(summary, theme, caption)
        if charts:
            figures["growth"] = _draw_curves(charts, theme)
        if compiled:
            figures["compile"] = _draw_bars(compiled, theme, _COMPILE_CAPTION)
        for name, figure in figures.items():
            file = folder / f"{path.stem + '-' if prefix is None else prefix}{name}-{theme.name}.png"
            _write_png(figure, file, source=digest_result(path))
            drawn.append(file)
    return drawn


def _write_png(figure: Any, file: Path, *, source: str) -> None:
    """Write a figure with a reduced palette: a quarter of the bytes, without a visible difference."""
    image, info = import_module("PIL.Image"), import_module("PIL.PngImagePlugin").PngInfo()
    info.add_text("Source", source)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=_DPI, facecolor=figure.get_facecolor())
    image.open(drawn).convert("RGB").quantize(_COLOURS, dither=image.Dither.NONE).save(
        file, optimize=True, pnginfo=info
    )


def _new_figure(height_in: float, theme: Theme) -> Any:
    # Not pyplot: it keeps references to figures, and searches for a display.
    figure = import_module("matplotlib.figure").Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.03)
    figure.patch.set_facecolor(theme.background)
    return figure


def _caption(rows: Sequence[Row]) -> str:
    state = find_state(rows, "x .*").replace("x", "tensors of")
    return f"{state}, unless stated; longer is better; dashed: the bare work, in the same run on the same machine"


def _draw_bars(panels: Sequence[Panel], theme: Theme, caption: str) -> Any:
    """Draw two panels in a row; the height of a row fits its bars."""
    pairs = [panels[start : start + 2] for start in range(0, len(panels), 2)]
    heights = [max(len(panel.bars) for panel in pair) + 2.2 for pair in pairs]
    figure = _new_figure(0.235 * sum(heights) + 0.3, theme)
    figure.supxlabel(caption, fontsize=10, color=theme.faint)
    grid = figure.subplots(len(pairs), 2, squeeze=False, height_ratios=heights)
    for axes_pair, pair, height in zip(grid, pairs, heights, strict=True):
        for axes in axes_pair[len(pair) :]:
            axes.set_axis_off()
        for axes, panel in zip(axes_pair, pair, strict=False):
            _draw_panel(axes, panel, theme, slots=height - 2.2)
    return figure


def _draw_panel(axes: Any, panel: Panel, theme: Theme, *, slots: float) -> None:
    colours = {"own": theme.own, "other": theme.other, "limit": "none"}
    position = 0.0
    positions = []
    for before, bar in zip((None, *panel.bars), panel.bars, strict=False):
        position += 0 if before is None else 1 if before.kind == bar.kind else 1 + _GAP / 2
        positions.append(position)
        edge = theme.faint if bar.kind == "limit" else "none"
        axes.barh(position, bar.value, 0.74, color=colours[bar.kind], edgecolor=edge, linestyle=(0, (3, 2)))
        weight = "bold" if bar.kind == "own" else "normal"
        label = f" {_format_number(bar.value)}"
        axes.text(bar.value, position, label, va="center", color=theme.text, fontsize=10, fontweight=weight)
    axes.set_title(f"{panel.title}", loc="left", color=theme.text, fontsize=11.5, fontweight="bold")
    axes.set_title(panel.unit, loc="right", color=theme.faint, fontsize=9.5)
    axes.set_yticks(positions, [bar.name for bar in panel.bars], fontsize=10, color=theme.text)
    for tick, bar in zip(axes.get_yticklabels(), panel.bars, strict=True):
        tick.set_fontweight("bold" if bar.kind == "own" else "normal")
        tick.set_color(theme.faint if bar.kind == "limit" else theme.text)
    # Bars have the same thickness in panels with fewer of them.
    axes.set_ylim(slots - 0.5 + _GAP, -0.6)
    axes.set_xlim(0, 1.16 * max(bar.value for bar in panel.bars))
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_facecolor(theme.background)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "left")
        spine.set_color(theme.faint)
        spine.set_bounds(-0.5, positions[-1] + 0.5)


def _draw_curves(charts: Sequence[Chart], theme: Theme) -> Any:
    figure = _new_figure(3.5, theme)
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        _draw_chart(axes, chart, theme)
    return figure


def _draw_chart(axes: Any, chart: Chart, theme: Theme) -> None:
    colours, markers = iter(theme.curves), iter("osD")
    limits = iter(((0, (4, 2)), (0, (1, 1.5))))
    for curve in chart.curves:
        sizes, figures = zip(*curve.points, strict=True)
        if curve.is_limit:
            axes.plot(sizes, figures, color=theme.faint, linestyle=next(limits), linewidth=1.4, label=curve.name)
        else:
            axes.plot(sizes, figures, color=next(colours), marker=next(markers), linewidth=2, label=curve.name)
    highest = max(figure for curve in chart.curves for _, figure in curve.points)
    lowest = min(figure for curve in chart.curves for _, figure in curve.points)
    axes.set_xscale("log")
    if highest > 20 * lowest:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 2, highest * 8)
        axes.yaxis.set_major_formatter(import_module("matplotlib.ticker").StrMethodFormatter("{x:g}"))
    else:
        axes.set_ylim(0, 1.5 * highest)
        axes.locator_params(axis="y", nbins=5)
    axes.set_title(chart.title, loc="left", color=theme.text, fontsize=11.5, fontweight="bold")
    axes.set_ylabel(chart.unit, color=theme.text, fontsize=10)
    axes.set_xlabel(chart.axis, color=theme.text, fontsize=10)
    _tick_sizes(axes, chart, theme)
    legend = axes.legend(loc="upper left", ncols=2, fontsize=9, columnspacing=0.8, handlelength=1.5)
    legend.get_frame().set(facecolor=theme.background, edgecolor="none", alpha=1)
    for text in legend.get_texts():
        text.set_color(theme.text)


def _tick_sizes(axes: Any, chart: Chart, theme: Theme) -> None:
    """Label the measured sizes, and leave out labels that would overlap."""
    sizes = sorted({size for curve in chart.curves for size, _ in curve.points})
    is_bytes = sizes[0] >= 1 << 19
    shown = [size for number, size in enumerate(reversed(sizes)) if number == 0 or number % 2 == 0 or len(sizes) < 5]
    axes.set_xticks(shown, [_format_bytes(size) if is_bytes else _format_count(size) for size in shown])
    axes.minorticks_off()
    axes.tick_params(colors=theme.text, labelsize=9.5)
    axes.grid(axis="y", color=theme.faint, alpha=0.25, linewidth=0.7)
    axes.set_facecolor(theme.background)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.faint)


def _format_bytes(size: float) -> str:
    return f"{size / (1 << 30):g} GiB" if size >= 1 << 30 else f"{size / (1 << 20):g} MiB"


def _format_count(count: float) -> str:
    return f"{count / 1000:g}k" if count >= 1000 else f"{count:g}"


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw one result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, metavar="RESULT.json", help="what a run has written")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write to this folder, without the result's name as prefix (default: beside the result)",
    )
    options = parser.parse_args(arguments)
    drawn = draw_all(options.result, options.out or options.result.parent, prefix="" if options.out else None)
    print("\n".join(map(str, drawn)))
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
