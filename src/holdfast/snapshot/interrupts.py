"""Holds signals back while something is done that must not be cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType


@contextmanager
def holding_signals() -> Iterator[None]:
    """Run the `with` block without handlers of signals in between; what arrived meanwhile is handled at its end.

    Python runs handlers in the main thread only, so in other threads nothing need be done. Signals that Python does
    not handle are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    stack = ExitStack()
    try:
        # First in, last out: an interrupt that comes while the others are given back cannot keep them from it.
        numbers = sorted(signal.valid_signals(), key=lambda number: number != signal.SIGINT)
        for number in numbers:
            if callable(signal.getsignal(number)):
                stack.callback(signal.signal, number, signal.signal(number, note))
        yield
    finally:
        stack.close()
        for each in dict.fromkeys(arrived):
            signal.raise_signal(each)
