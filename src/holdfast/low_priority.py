"""Runs work at the lowest priority: in a child process, so that training keeps its interpreter lock, or in a thread.

The parent sends one job as JSON to the child's standard input. The child answers with lines of JSON on standard
output: its progress, and at the end a result or an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

_LOWEST_PRIORITY: Final = 19
_ANSWERS: Final = 1
"""The descriptor of the pipe to the parent."""
_REPORT_S: Final = 0.2
"""The child reports its progress this often."""
# The path of modules comes first: the parent may have changed its own.
_PROGRAM: Final = """
import importlib, json, sys
job = json.loads(sys.stdin.readline())
sys.path[:] = job["modules"]
importlib.import_module(job["module"]).serve(job)
"""


class ChildJob:
    """A job for the function `serve` of a module, in a child process; `stop` may be called from any thread."""

    def __init__(self, module: str, job: Mapping[str, Any], *, has_own_session: bool = False) -> None:
        """Nothing is started yet. A child with a session of its own does not get the Ctrl-C of the terminal."""
        self._job = {**job, "module": module, "modules": sys.path}
        self._has_own_session = has_own_session
        self._child: subprocess.Popen[bytes] | None = None
        self.is_stopped = False
        self.code: int | None = None
        """The child's exit code, once it has ended."""

    def iter_answers(self) -> Iterator[dict[str, Any]]:
        """Start the child, and yield its answers until it has ended."""
        with subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=self._has_own_session,
        ) as child:
            self._child = child
            if self.is_stopped:
                child.kill()
            assert child.stdin is not None
            assert child.stdout is not None
            # If the child has ended, writing or closing fails; its last line or its code says why.
            with suppress(BrokenPipeError), child.stdin:
                child.stdin.write(json.dumps(self._job).encode() + b"\n")
            yield from map(json.loads, child.stdout)
        self.code = child.returncode

    def stop(self) -> None:
        """End the child, also one that is started later."""
        self.is_stopped = True
        if self._child is not None:
            self._child.kill()


def answer(work: Callable[[], Mapping[str, Any]]) -> None:
    """Do the work of a child at the lowest priority, and send its result, or the text and type of its error."""
    os.nice(_LOWEST_PRIORITY)
    try:
        write_answer(work())
    except BrokenPipeError:
        return  # the parent has died
    except Exception as error:  # noqa: BLE001  # the parent raises it
        kind = type(error).__name__
        write_answer({"error": str(error) or kind, "type": kind})


def write_answer(line: Mapping[str, Any]) -> None:
    """Send a line to the parent; raises BrokenPipeError if it has died."""
    with open(_ANSWERS, "wb", closefd=False) as pipe:
        pipe.write(json.dumps(line).encode() + b"\n")


@dataclass
class ProgressAnswers:
    """Sends progress to the parent, a few times each second."""

    done_bytes: int = 0
    reported_s: float = field(default_factory=monotonic)

    def begin(self, task: str, total_bytes: int) -> None:
        """Send the name and the size of a task."""
        self.done_bytes = 0
        write_answer({"task": task, "total": total_bytes})

    def advance(self, num_bytes: int) -> None:
        """Count bytes as done."""
        self.done_bytes += num_bytes
        if monotonic() - self.reported_s >= _REPORT_S:
            self.reported_s = monotonic()
            self.end()

    def end(self) -> None:
        """Send how many bytes are done."""
        write_answer({"done": self.done_bytes})


def lower_priority() -> None:
    """Give this thread, and those that it starts, the lowest priority: the training goes first on every core."""
    # On Linux a priority belongs to a thread; elsewhere to the process, which must keep its own.
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
