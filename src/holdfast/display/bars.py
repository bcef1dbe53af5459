"""Progress bars of library calls: tqdm's where it is installed, otherwise rich's, otherwise none.

Only `progress=True` leads here: without it, the library writes to no terminal and no notebook.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from holdfast.progress import CallbackProgress, Progress, ProgressChoice, Silent

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars


def make_progress(choice: ProgressChoice) -> Progress | None:
    """Return what receives the progress of a call; None if nothing does."""
    if choice is None or choice is False:
        return None
    if choice is True:
        return make_bar()
    return choice if isinstance(choice, Progress) else CallbackProgress(choice)


def make_bar() -> Progress:
    """Return a progress bar for a terminal or a notebook; one that shows nothing if neither tqdm nor rich is there."""
    try:
        return TqdmBar()
    except ImportError:
        pass
    try:
        return RichBar()
    except ImportError:
        return Silent()


class TqdmBar:
    """A bar of tqdm, which draws a widget in a notebook and text elsewhere."""

    def __init__(self) -> None:
        """Find tqdm; raises ImportError if it is not installed."""
        with warnings.catch_warnings():
            # In a notebook without ipywidgets, tqdm warns and draws text: that is what is wanted there.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm

        self._make: Any = tqdm
        self._bar: Any = None

    def begin(self, task: str, total_bytes: int) -> None:
        """Show a new bar."""
        self.end()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._bar = self._make(desc=task, total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024)

    def advance(self, num_bytes: int) -> None:
        """Draw the bar further."""
        if self._bar is not None:
            self._bar.update(min(num_bytes, self._bar.total - self._bar.n))

    def end(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class RichBar:
    """A bar of rich."""

    def __init__(self) -> None:
        """Find rich; raises ImportError if it is not installed."""
        from rich import progress

        self._columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
        )
        self._make = progress.Progress
        self._bars: RichBars | None = None

    def begin(self, task: str, total_bytes: int) -> None:
        """Show a new bar."""
        self.end()
        self._bars = self._make(*self._columns)
        self._bars.add_task(task, total=total_bytes)
        self._bars.start()

    def advance(self, num_bytes: int) -> None:
        """Draw the bar further."""
        if self._bars is not None:
            self._bars.advance(self._bars.task_ids[0], num_bytes)

    def end(self) -> None:
        """Leave the bar as it is."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
