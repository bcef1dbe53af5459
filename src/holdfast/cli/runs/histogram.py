"""A histogram for a terminal: a line for each bin, one bar for each tensor."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_WIDTH: Final = 40


def format_histogram(low: float, high: float, sides: Sequence[Sequence[int]], *, width: int = _WIDTH) -> list[str]:
    """Return a line for each bin: its lower edge, then a bar and a count for each side; all bars have one scale."""
    bins = max((len(side) for side in sides), default=0)
    most = max((count for side in sides for count in side), default=0)
    edges = [f"{low + (high / bins - low / bins) * at:.4g}" for at in range(bins)]
    # A bin ends where the next one begins, so one number per line is enough.
    wide = max(map(len, edges), default=0)
    digits = len(str(most))
    each = width // max(1, len(sides))
    lines = []
    for at, edge in enumerate(edges):
        cells = [f"{_draw(side[at], most, each)} {side[at]:>{digits}}" for side in sides]
        lines.append(f"{edge.rjust(wide)} | " + "  | ".join(cells))
    return lines


def _draw(count: int, most: int, width: int) -> str:
    eighths = round(8 * width * count / most) if most else 0
    if count and not eighths:
        eighths = 1
    if not _can_draw_blocks():
        return ("#" * ((eighths + 7) // 8)).ljust(width)
    return (_EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(width)


def _can_draw_blocks() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
