"""Delay signals during steps that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType


@contextmanager
def holding_signals() -> Iterator[None]:
    """Delay Python's signal handlers until the end of the `with` block.

    Python runs handlers in the main thread only, so other threads need nothing. Signals that Python does not handle are
    not delayed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    stack = ExitStack()
    try:
        # Restored in reverse order, SIGINT's last: an interrupt during the loop cannot stop the others from being
        # restored.
        numbers = sorted(signal.valid_signals(), key=lambda number: number != signal.SIGINT)
        for number in numbers:
            if callable(signal.getsignal(number)):
                stack.callback(signal.signal, number, signal.signal(number, note))
        yield
    finally:
        stack.close()
        for each in dict.fromkeys(arrived):
            signal.raise_signal(each)
