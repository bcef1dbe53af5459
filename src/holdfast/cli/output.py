"""All output of the command line: lines, tables, JSON, raw bytes and progress. No other module prints."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, TextIO

from holdfast.json_text import Json
from holdfast.objects.disk_cache import DiskCache
from holdfast.progress import Progress, Silent
from holdfast.repo.engine import Stages
from holdfast.texts import count as count  # noqa: PLC0414 - the verbs import it from here
from holdfast.texts import format_bytes as format_bytes  # noqa: PLC0414 - the verbs import it from here
from holdfast.texts import format_utc as format_utc  # noqa: PLC0414 - the verbs import it from here
from holdfast.texts import mask_urls

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from holdfast.repo.write.writer import SaveResult

ColorChoice = Literal["auto", "always", "never"]
Style = Literal["", "heading", "good", "bad", "warning", "faint"]
_CODES: Final[dict[Style, str]] = {"heading": "1", "good": "32", "bad": "31", "warning": "33", "faint": "2"}
"""The number of the escape sequence of each style; colours of the terminal's own palette."""
SEVERITY_STYLES: Final[dict[str, Style]] = {"error": "bad", "warning": "warning", "note": "faint", "ok": "good"}
_BAR_AFTER_S: Final = 0.5
"""Shorter work shows no progress bar, and need not import one."""


def format_time(time_s: float) -> str:
    """Return a time in the local time zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (OverflowError, ValueError, OSError):
        # A record can contain any number; not every number is a date.
        return f"@{time_s:g}"


def clean(text: str) -> str:
    """Return `text` with control characters, which could control a terminal or break a line, as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def describe_saved(result: SaveResult) -> dict[str, Json]:
    """Return what a save or copy did as JSON."""
    return {
        "name": result.name,
        "digest": result.digest.hex(),
        "generation": result.generation,
        "logical_bytes": result.logical_bytes,
        "new_bytes": result.new_bytes,
        "reused_bytes": result.reused_bytes,
        "stored_bytes": result.stored_bytes,
        "seconds": result.seconds,
        "existed": result.existed,
    }


class Output:
    """Standard output and standard error of one run."""

    def __init__(self) -> None:
        """Use the current streams. Characters that they cannot encode are escaped; output to a closed one is lost."""
        self._is_colored = False
        self.stages = Stages()
        """The time of each stage of this run."""
        self.cache: DiskCache | None = None
        """Where what is read from buckets is kept, if the user has chosen a directory for that."""
        # A closed stream is None in Python, and `print(file=None)` would print to standard output.
        sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")

    def choose_color(self, choice: ColorChoice, *, is_refused: bool) -> None:
        """Use colours if `choice` says so; "auto" does on a terminal, unless the user refuses colours in general."""
        self._is_colored = choice == "always" or (choice == "auto" and not is_refused and sys.stdout.isatty())

    def _paint(self, text: str, style: Style) -> str:
        """Return a clean text in a style; as it is without colours."""
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if self._is_colored and style else text

    def line(self, text: str = "", *, style: Style = "") -> None:
        """Print one line to standard output."""
        print(self._paint(clean(text), style))

    def note(self, text: str) -> None:
        """Print a message to standard error, without secrets in URLs."""
        print(f"holdfast: {mask_urls(clean(text))}", file=sys.stderr)

    def point(self, text: str, position: int) -> None:
        """Print a text to standard error, with a caret below the character at `position`."""
        print(f"  {clean(text)}\n  {' ' * len(clean(text[:position]))}^", file=sys.stderr)

    def trace(self, error: BaseException) -> None:
        """Print the traceback of an error to standard error."""
        sys.__excepthook__(type(error), error, error.__traceback__)

    def json(self, value: Json) -> None:
        """Print a value as JSON; ASCII only, so that no name in it can control a terminal."""
        print(json.dumps(value, indent=2))

    def json_line(self, value: Json) -> None:
        """Print a value as one line of JSON, at once: one of a stream, which may go on for ever."""
        print(json.dumps(value), flush=True)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> None:
        """Print aligned rows below headers; `right` names the columns that are aligned to the right."""
        plain: list[Style] = [""] * len(rows)
        self._align([list(headers), *rows], [header in right.split() for header in headers], ["heading", *plain])

    def cut(self, left_out: int) -> None:
        """Print how many lines were left out, if any were, and the option that shows them."""
        if left_out > 0:
            self.line(f"... and {left_out} more; --all shows them")

    def columns(self, rows: Sequence[Sequence[str]], *, styles: Sequence[Style] = ()) -> None:
        """Print aligned rows without headers; `styles` has one for each row, or is empty."""
        if rows:
            self._align(rows, [False] * len(rows[0]), styles or [""] * len(rows))

    def _align(self, rows: Sequence[Sequence[str]], numeric: Sequence[bool], styles: Sequence[Style]) -> None:
        cells = [[clean(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row, style in zip(cells, styles, strict=True):
            padded = zip(row, widths, numeric, strict=True)
            text = "  ".join(cell.rjust(w) if to_right else cell.ljust(w) for cell, w, to_right in padded)
            print(self._paint(text.rstrip(), style))

    def profile(self, seconds: float) -> None:
        """Print the time of each stage to standard error."""
        stages = self.stages.read()
        if not stages:
            self.note(f"{seconds:.2f} s in total; no chunks were read or written")
            return
        self.note(f"{seconds:.2f} s in total; by stage, summed over all threads:")
        for name, stage in stages.items():
            speed = stage.size_bytes / max(stage.seconds, 1e-9) / 1e9
            size = f"{format_bytes(stage.size_bytes)} at {speed:.2f} GB/s per thread"
            self.note(f"  {name:8} {stage.seconds:7.2f} s  {size if stage.size_bytes else ''}".rstrip())

    def raw(self, data: memoryview) -> None:
        """Write raw bytes to standard output."""
        sys.stdout.flush()
        while data:
            # Under PYTHONUNBUFFERED this is a plain write(), which may write only some of the bytes.
            data = data[sys.stdout.buffer.write(data) :]

    def progress(self) -> Progress:
        """Return a progress bar if standard error is a terminal, else a silent `Progress`."""
        return _Bar() if sys.stderr.isatty() else Silent()

    def flush(self) -> None:
        """Flush standard output; raises OSError for a closed pipe or a full disk."""
        sys.stdout.flush()

    def abandon(self) -> None:
        """Drop unwritten output, so that the interpreter does not try to write it again at exit."""
        _redirect_to_devnull(sys.stdout)


def _redirect_to_devnull(stream: TextIO) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, stream.fileno())
    finally:
        os.close(devnull)


class _Bar:
    """A progress bar that appears on the terminal if the work takes longer than `_BAR_AFTER_S`."""

    def __init__(self) -> None:
        self._task = ""
        self._total = 0
        self._done = 0
        self._started = 0.0
        self._rich: RichProgress | None = None

    def begin(self, task: str, total_bytes: int) -> None:
        """Start a task; the bar is not shown yet."""
        self.end()
        self._task, self._total, self._done, self._started = clean(task), total_bytes, 0, time.monotonic()

    def advance(self, num_bytes: int) -> None:
        """Count bytes, and show the bar if the work takes long."""
        self._done += num_bytes
        if self._rich is None and time.monotonic() - self._started > _BAR_AFTER_S:
            self._rich = _start_bar(self._task, self._total)
        if self._rich:
            self._rich.update(self._rich.task_ids[0], completed=self._done)

    def end(self) -> None:
        """Remove the bar."""
        if self._rich:
            self._rich.stop()
            self._rich = None


def _start_bar(task: str, total_bytes: int) -> RichProgress:
    # Importing rich takes as long as all other imports together, so only long work does it.
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    # Lines printed in the meantime appear above the bar, unless standard output is not the terminal.
    bar = progress.Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=True,
    )
    bar.add_task(task, total=total_bytes)
    bar.start()
    return bar
