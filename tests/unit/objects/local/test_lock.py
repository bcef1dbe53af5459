"""The lock of a store: bounded waits that say whom they waited for, explicit release, and children of fork."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LockWait, StoreLock
from tests.kit.scripted_files import open_descriptors


class Waiting:
    """A clock that moves only by sleeping; `meanwhile` is called at each sleep."""

    def __init__(self, meanwhile: Callable[[], None] | None = None) -> None:
        self.now_s = 0.0
        self.sleeps = 0
        self._meanwhile = meanwhile

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.sleeps += 1
        if self._meanwhile:
            self._meanwhile()

    def make_lock(self, tmp_path: Path, *, limit_s: float = 10.0) -> StoreLock:
        wait = LockWait(limit_s, clock=lambda: self.now_s, sleep=self.sleep)
        return StoreLock(PosixFiles(), str(tmp_path / ".lock"), wait)


class Keeping(PosixFiles):
    """Keeps a copy of each handle of a lock, as a child does that was made by a fork outside of Python."""

    def __init__(self) -> None:
        self.copies: list[int] = []

    def lock(self, path: str, *, exclusive: bool) -> int | None:
        handle = super().lock(path, exclusive=exclusive)
        if handle is not None:
            self.copies.append(os.dup(handle))
        return handle


def can_be_alone(tmp_path: Path) -> bool:
    with Waiting().make_lock(tmp_path).hold(exclusive=True) as is_alone:
        return is_alone


def test_a_writer_waits_for_the_exclusive_holder_up_to_the_limit_and_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting, before = Waiting(), open_descriptors()
    with Waiting().make_lock(tmp_path).hold(exclusive=True), waiting.make_lock(tmp_path).hold(exclusive=False) as held:
        assert not held
    assert open_descriptors() == before
    assert 10.0 <= waiting.now_s < 11.0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"pid {os.getpid()} on {os.uname().nodename} since 20" in record.getMessage()
    assert str(tmp_path) in record.getMessage()


def test_a_writer_that_waits_gets_the_lock_once_it_is_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone = Waiting().make_lock(tmp_path).hold(exclusive=True)
    alone.__enter__()

    def end() -> None:
        if waiting.sleeps == 3:
            alone.__exit__(None, None, None)

    waiting = Waiting(end)
    with waiting.make_lock(tmp_path).hold(exclusive=False) as held:
        assert held
        assert not can_be_alone(tmp_path)
    assert waiting.sleeps == 3
    assert not caplog.records
    assert can_be_alone(tmp_path)


def test_the_same_holder_is_waited_for_once_and_another_one_again(tmp_path: Path) -> None:
    waiting = Waiting()
    lock = waiting.make_lock(tmp_path)
    with Waiting().make_lock(tmp_path).hold(exclusive=True):
        for _ in range(3):
            with lock.hold(exclusive=False) as held:
                assert not held
        once = waiting.sleeps
        assert once > 1
    with Waiting().make_lock(tmp_path).hold(exclusive=True), lock.hold(exclusive=False) as held:
        assert not held
    assert waiting.sleeps == 2 * once


def test_a_writer_that_was_stopped_while_it_waited_waits_for_the_next_holder_from_the_start(tmp_path: Path) -> None:
    """A collector that has just taken the lock relies on it that no writer goes on without it for some seconds."""
    first = Waiting().make_lock(tmp_path).hold(exclusive=True)
    second = Waiting().make_lock(tmp_path).hold(exclusive=True)
    first.__enter__()

    def pass_on() -> None:
        if waiting.sleeps == 1:
            waiting.now_s += 3600.0
            first.__exit__(None, None, None)
            assert second.__enter__()
        if waiting.sleeps == 3:
            second.__exit__(None, None, None)

    waiting = Waiting(pass_on)
    with waiting.make_lock(tmp_path).hold(exclusive=False) as held:
        assert held
    assert waiting.sleeps == 3


def test_holders_that_nothing_is_known_about_are_each_waited_for(tmp_path: Path) -> None:
    waiting = Waiting()
    lock = waiting.make_lock(tmp_path)
    handle = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    for count in (1, 2):
        with lock.hold(exclusive=False) as held:
            assert not held
        assert waiting.now_s >= 10.0 * count
    os.close(handle)


def test_a_holder_that_nothing_is_known_about_is_waited_for_no_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handle = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with Waiting().make_lock(tmp_path).hold(exclusive=False) as held:
        assert not held
    os.close(handle)
    assert "an unknown process" in caplog.text


def test_an_unlocked_lock_file_is_empty(tmp_path: Path) -> None:
    with Waiting().make_lock(tmp_path).hold(exclusive=True):
        assert f"pid {os.getpid()}" in (tmp_path / ".lock").read_text()
    assert (tmp_path / ".lock").read_bytes() == b""


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_lock_leaves_no_file_open(tmp_path: Path, exclusive: bool) -> None:
    before = open_descriptors()
    with Waiting().make_lock(tmp_path).hold(exclusive=exclusive):
        with Waiting().make_lock(tmp_path).hold(exclusive=True) as alone:
            assert not alone
    assert open_descriptors() == before


def test_a_refused_exclusive_lock_does_not_wait(tmp_path: Path) -> None:
    waiting = Waiting()
    with Waiting().make_lock(tmp_path).hold(exclusive=False), waiting.make_lock(tmp_path).hold(exclusive=True) as alone:
        assert not alone
    assert not waiting.sleeps


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_lock_ends_with_its_hold_though_a_copy_of_its_handle_is_open(tmp_path: Path, exclusive: bool) -> None:
    files = Keeping()
    with StoreLock(files, str(tmp_path / ".lock"), LockWait()).hold(exclusive=exclusive):
        assert not can_be_alone(tmp_path)
    assert can_be_alone(tmp_path)
    (copy,) = files.copies
    os.close(copy)


def start_child(act: Callable[[], object]) -> int:
    """Fork, and do something in the child, which then ends."""
    child = os.fork()
    if child:
        return child
    try:
        act()
    finally:
        os._exit(0)


def test_a_lock_ends_with_its_process_though_a_child_of_fork_lives(tmp_path: Path) -> None:
    told, tell = os.pipe()

    def tell_and_pause() -> None:
        os.write(tell, str(os.getpid()).encode())
        signal.pause()

    def hold_and_fork() -> None:
        hold = Waiting().make_lock(tmp_path).hold(exclusive=True)
        hold.__enter__()
        start_child(tell_and_pause)
        signal.pause()

    holder = start_child(hold_and_fork)
    grandchild = int(os.read(told, 100))
    try:
        assert not can_be_alone(tmp_path)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        assert can_be_alone(tmp_path)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(told)
        os.close(tell)


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_child_of_fork_that_leaves_the_hold_does_not_end_that_of_its_parent(tmp_path: Path, exclusive: bool) -> None:
    hold = Waiting().make_lock(tmp_path).hold(exclusive=exclusive)
    with hold:
        child = start_child(lambda: hold.__exit__(None, None, None))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not can_be_alone(tmp_path)
    assert can_be_alone(tmp_path)


def test_a_child_of_fork_closes_nothing_that_has_got_the_number_of_an_inherited_lock(tmp_path: Path) -> None:
    told, tell = os.pipe()
    hold = Waiting().make_lock(tmp_path).hold(exclusive=False)

    def reuse_number() -> None:
        # The inherited handle is closed, so its own lock most likely gets the same number.
        with Waiting().make_lock(tmp_path).hold(exclusive=False):
            hold.__exit__(None, None, None)
            os.write(tell, b"1" if not can_be_alone(tmp_path) else b"0")

    with hold:
        child = start_child(reuse_number)
        os.waitpid(child, 0)
    assert os.read(told, 1) == b"1"
    os.close(told)
    os.close(tell)
