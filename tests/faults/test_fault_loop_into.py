"""Loads into a target that fail at the n-th read, or at the n-th line, for every n: the error says what changed."""

from __future__ import annotations

import errno
import linecache
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

import pytest

from holdfast.errors import StoreError
from holdfast.objects.memory import MemoryStore
from holdfast.store import OpenOptions, Store
from tests.faults.into_scenario import OLD, Facts, Settings, find_facts, find_lies, make_store, make_tree

Raise = Callable[[], BaseException]

ERRORS: dict[str, Raise] = {
    "EIO": lambda: StoreError("the disk failed", code=errno.EIO),
    "interrupt": KeyboardInterrupt,
    "memory": lambda: MemoryError("none left"),
}


class FailingStore(MemoryStore):
    """Reads fail from the n-th on, after a part of the buffer has been written."""

    def __init__(self, inner: MemoryStore, make_error: Raise, at: int) -> None:
        super().__init__()
        self._inner = inner
        self._make_error = make_error
        self._at = at
        self._lock = threading.Lock()
        self.reads = 0

    def _count(self) -> bool:
        with self._lock:
            self.reads += 1
            return self.reads >= self._at

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        return self._inner.read(key, limit_bytes=limit_bytes)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        if self._count():
            buffer[: len(buffer) // 2] = b"\xaa" * (len(buffer) // 2)
            raise self._make_error()
        self._inner.read_into(key, start, buffer)

    def list(self, prefix: str, **options: Any) -> list[Any]:
        return self._inner.list(prefix, **options)

    def stat(self, key: str) -> Any:
        return self._inner.stat(key)


@pytest.fixture(scope="module")
def saved() -> MemoryStore:
    return make_store()


def load(
    store: MemoryStore, tree: dict[str, Any], *, is_atomic: bool, since: str | None = None
) -> BaseException | None:
    """Load into the tree, and return what that raised."""
    try:
        with Store(store, OpenOptions(types=[Settings])) as opened:
            opened.load_into("x", tree, atomic=is_atomic, since=since)
    except BaseException as error:  # noqa: BLE001 - for the test to look at
        return error
    return None


def find_new(saved: MemoryStore, *, is_used: bool) -> Facts:
    tree = make_tree(OLD, is_used=is_used)
    assert load(saved, tree, is_atomic=False) is None
    return find_facts(tree)


@pytest.mark.parametrize("is_used", [True, False], ids=["used", "fresh"])
@pytest.mark.parametrize("kind", ERRORS)
def test_after_any_failing_read_the_error_lists_what_was_overwritten(
    saved: MemoryStore, kind: str, is_used: bool
) -> None:
    old, new = find_facts(make_tree(OLD, is_used=is_used)), find_new(saved, is_used=is_used)
    mixed = 0
    tree = make_tree(OLD, is_used=is_used)
    for at in count(1):
        tree = make_tree(OLD, is_used=is_used)
        store = FailingStore(saved, ERRORS[kind], at)
        error = load(store, tree, is_atomic=False)
        if error is None:
            break
        assert type(error) is type(ERRORS[kind]())
        assert find_lies(error, find_facts(tree), old, new) == [], (at, error)
        mixed += find_facts(tree) != old
    assert find_facts(tree) == new
    assert at > 3
    assert mixed, "no run has changed the target, so nothing was tested"


@pytest.mark.parametrize("since", [None, "believed"], ids=["atomic", "since"])
@pytest.mark.parametrize("is_used", [True, False], ids=["used", "fresh"])
@pytest.mark.parametrize("kind", ERRORS)
def test_after_any_failing_read_a_load_all_or_nothing_has_changed_nothing(
    saved: MemoryStore, kind: str, is_used: bool, since: str | None
) -> None:
    old, new = find_facts(make_tree(OLD, is_used=is_used)), find_new(saved, is_used=is_used)
    tree = make_tree(OLD, is_used=is_used)
    for at in count(1):
        tree = make_tree(OLD, is_used=is_used)
        error = load(FailingStore(saved, ERRORS[kind], at), tree, is_atomic=since is None, since=since)
        if error is None:
            break
        assert find_facts(tree) == old, (at, error)
        assert getattr(error, "overwritten", ()) == ()
    assert find_facts(tree) == new
    assert at > 3


class Interrupter:
    """Sends SIGINT to this process when the n-th line of the traced modules is reached."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.lines = 0
        self.where = ""
        self._entered: list[tuple[FrameType, int]] = []

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line" and not self._is_exit(frame):
            self.lines += 1
            if self.lines == self._at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self.trace

    def _is_exit(self, frame: FrameType) -> bool:
        """Tell whether a line is a `with` that is being left: Python runs no handler before its exit is called."""
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if not line.startswith("with "):
            return False
        is_seen = (frame, frame.f_lineno) in self._entered
        self._entered.append((frame, frame.f_lineno))
        return is_seen

    def run(self, act: Callable[[], BaseException | None]) -> BaseException | None:
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            return act()
        finally:
            sys.settrace(before)


TRACED = (
    *(
        f"snapshot/into/{name}.py"
        for name in ("load_into", "apply_plan", "changes", "swap", "undo", "restore", "journal")
    ),
    "repo/engine.py",
    "into_scenario.py",
)


def interrupt_at(saved: MemoryStore, at: int, *, mode: str, old: Facts, new: Facts) -> bool:
    """Interrupt a load at its n-th line and check the result; return whether it has so many lines."""
    tree = make_tree(OLD)
    interrupter = Interrupter(at)
    is_atomic, since = mode == "atomic", "believed" if mode == "since" else None
    error = interrupter.run(lambda: load(saved, tree, is_atomic=is_atomic, since=since))
    if interrupter.lines < at:
        assert error is None
        return False
    found = find_facts(tree)
    assert isinstance(error, KeyboardInterrupt), (interrupter.where, error)
    assert find_lies(error, found, old, new) == [], interrupter.where
    if mode != "direct":
        assert found in (old, new), interrupter.where
        assert (found == new) == bool(getattr(error, "overwritten", ())), interrupter.where
    return True


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")
@pytest.mark.parametrize("mode", ["direct", "atomic", "since"])
def test_an_interrupt_at_any_line_is_told_truthfully(saved: MemoryStore, mode: str) -> None:
    old, new = find_facts(make_tree(OLD)), find_new(saved, is_used=True)

    # Some lines; the slow test takes all.
    assert sum(interrupt_at(saved, at, mode=mode, old=old, new=new) for at in range(1, 3000, 149)) >= 3


# An interrupt between opening a file and the `with` leaves the file to the garbage collector, which warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")
@pytest.mark.parametrize("mode", ["direct", "atomic", "since"])
def test_an_interrupt_at_every_line_or_every_few_is_told_truthfully(saved: MemoryStore, mode: str) -> None:
    old, new = find_facts(make_tree(OLD)), find_new(saved, is_used=True)

    # An atomic load has many more lines: for each of the many blocks of memory that it exchanges.
    for at in count(1, 1 if mode == "direct" else 17):
        if not interrupt_at(saved, at, mode=mode, old=old, new=new):
            break
    assert at > 500


@pytest.fixture(autouse=True)
def quiet_interrupts() -> Any:
    """Let no interrupt that a test has sent reach another test."""
    yield
    with suppress(KeyboardInterrupt):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
