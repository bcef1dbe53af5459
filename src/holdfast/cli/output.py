"""All that the command line says: lines, tables, JSON, raw bytes and progress; nothing else prints."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TextIO

from holdfast.progress import Progress, Silent
from holdfast.repo.format.record import Json
from holdfast.repo.stages import Stages

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from holdfast.diff.facts import LeafFacts

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_BAR_AFTER_S: Final = 0.5
"""Work that ends sooner shows no bar, and does not pay for loading one."""


def format_bytes(size_bytes: int) -> str:
    """Return a size with three or four digits and a binary unit."""
    size, unit = float(size_bytes), 0
    while abs(size) >= 1000 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size_bytes} B" if not unit else f"{size:.{0 if abs(size) >= 100 else 1}f} {_UNITS[unit]}"


def format_time(time_s: float) -> str:
    """Return a time on the user's clock."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (OverflowError, ValueError, OSError):
        # A record can hold any number; not every number is a date.
        return f"@{time_s:g}"


def format_utc(time_s: float) -> str | None:
    """Return a time as ISO 8601 in UTC, or None if it is no date."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
    except (OverflowError, ValueError, OSError):
        return None


def count(number: int, noun: str) -> str:
    """Return a number with its noun: 1 entry, 2 entries, 3 keys."""
    plural = noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"
    return f"{number} {noun if number == 1 else plural}"


def clean(text: str) -> str:
    """Return `text` with whatever could command a terminal, or break a line, shown as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def describe_facts(facts: LeafFacts) -> dict[str, Json]:
    """Return what a leaf is, for JSON."""
    return {
        "kind": facts.kind,
        "dtype": facts.dtype or None,
        "shape": None if facts.shape is None else list(facts.shape),
        "bytes": facts.size_bytes,
        "text": facts.text or None,
    }


class Output:
    """Standard output and standard error of one run."""

    def __init__(self) -> None:
        """Use the streams as they are now; what they cannot encode is shown as an escape, what is closed is dropped."""
        self.stages = Stages()
        """Where the time of this run goes."""
        # Python has None for a stream that is closed; to print to None is to print to the other one.
        sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")

    def line(self, text: str = "") -> None:
        """Print one line of the answer."""
        print(clean(text))

    def note(self, text: str) -> None:
        """Tell on standard error what is not part of the answer."""
        print(f"holdfast: {clean(text)}", file=sys.stderr)

    def trace(self, error: BaseException) -> None:
        """Tell on standard error where an error came from."""
        sys.__excepthook__(type(error), error, error.__traceback__)

    def json(self, value: Json) -> None:
        """Print the answer as JSON; ASCII only, so that no name in it can command a terminal."""
        print(json.dumps(value, indent=2))

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> None:
        """Print rows below headers, columns aligned; those whose headers are words of `right` to the right."""
        self._align([list(headers), *rows], [header in right.split() for header in headers])

    def columns(self, rows: Sequence[Sequence[str]]) -> None:
        """Print rows without headers, columns aligned."""
        if rows:
            self._align(rows, [False] * len(rows[0]))

    def _align(self, rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> None:
        cells = [[clean(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            padded = zip(row, widths, numeric, strict=True)
            print("  ".join(cell.rjust(w) if to_right else cell.ljust(w) for cell, w, to_right in padded).rstrip())

    def profile(self, seconds: float) -> None:
        """Tell on standard error where the time of a run went."""
        stages = self.stages.read()
        if not stages:
            self.note(f"{seconds:.2f} s in all; no chunks were read or written")
            return
        self.note(f"{seconds:.2f} s in all; by stage, on all threads together:")
        for name, stage in stages.items():
            speed = stage.size_bytes / max(stage.seconds, 1e-9) / 1e9
            size = f"{format_bytes(stage.size_bytes)} at {speed:.2f} GB/s a thread"
            self.note(f"  {name:8} {stage.seconds:7.2f} s  {size if stage.size_bytes else ''}".rstrip())

    def raw(self, data: memoryview) -> None:
        """Write bytes of the answer as they are."""
        sys.stdout.flush()
        while data:
            # Under PYTHONUNBUFFERED this is a plain write(), which may take only some of it.
            data = data[sys.stdout.buffer.write(data) :]

    def progress(self) -> Progress:
        """Return what shows progress: a bar on a terminal, nothing elsewhere."""
        return _Bar() if sys.stderr.isatty() else Silent()

    def flush(self) -> None:
        """Make sure that all was taken; a closed pipe or a full disk shows here at the latest."""
        sys.stdout.flush()

    def abandon(self) -> None:
        """Drop what standard output did not take, lest the interpreter try again when it ends."""
        _redirect_to_nowhere(sys.stdout)


def _redirect_to_nowhere(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


class _Bar:
    """A `Progress` that shows itself on a terminal once work proves to be long."""

    def __init__(self) -> None:
        self._task = ""
        self._total = 0
        self._done = 0
        self._started = 0.0
        self._rich: RichProgress | None = None

    def begin(self, task: str, total_bytes: int) -> None:
        """Remember the task."""
        self.end()
        self._task, self._total, self._done, self._started = clean(task), total_bytes, 0, time.monotonic()

    def advance(self, num_bytes: int) -> None:
        """Count, and show the bar if it is time."""
        self._done += num_bytes
        if self._rich is None and time.monotonic() - self._started > _BAR_AFTER_S:
            self._rich = _start_bar(self._task, self._total)
        if self._rich:
            self._rich.update(self._rich.task_ids[0], completed=self._done)

    def end(self) -> None:
        """Take the bar away."""
        if self._rich:
            self._rich.stop()
            self._rich = None


def _start_bar(task: str, total_bytes: int) -> RichProgress:
    # Loading rich costs as much as all the rest together: only who waits anyway pays for it.
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    # Lines printed meanwhile go above the bar, unless they go elsewhere than to the terminal.
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
