"""Saves in the background and the life of processes: exits, forks, spawned workers, interrupts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import StoreError
from holdfast.store import Store
from holdfast.store import open as open_store
from tests.kit.patience import PATIENCE_S

_PRELUDE = """
import os, signal, sys, threading, time
import torch
import holdfast
from holdfast.snapshot import staging
store = holdfast.open(sys.argv[1])
tree = {str(number): torch.full((50_000,), float(number)) for number in range(20)}
real_save = staging.save

def slow_save(*arguments, **options):
    time.sleep(0.3)
    return real_save(*arguments, **options)

def failing_save(*arguments, **options):
    raise OSError("the disk is tired")
"""


def run(script: str, root: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-W", "error", "-c", _PRELUDE + script, str(root)]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def read_names(root: Path) -> list[str]:
    store = open_store(root)
    assert store.check(read=True) == []
    return [snap.name for snap in store.snapshots()]


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("staging", ["full", "budget"])
@pytest.mark.parametrize(
    "end",
    ["", "sys.exit(0)", "raise SystemExit", "del store", "threading.Thread(target=time.sleep, args=(0,)).start()"],
)
def test_a_script_that_ends_right_after_has_saved(tmp_path: Path, staging: str, end: str) -> None:
    # The save begins when the main thread has ended: it must still be able to start threads.
    ran = run(f"staging.save = slow_save\nstore.save_async('x', tree, staging={staging!r})\n{end}\n", tmp_path / "s")

    assert (ran.returncode, ran.stderr) == (0, "")
    assert read_names(tmp_path / "s") == ["x"]


def test_a_script_that_fails_has_saved(tmp_path: Path) -> None:
    ran = run("staging.save = slow_save\nstore.save_async('x', tree)\nraise ValueError('mine')\n", tmp_path / "s")

    assert ran.returncode == 1
    assert "ValueError: mine" in ran.stderr
    assert read_names(tmp_path / "s") == ["x"]


def test_an_error_that_nobody_was_told_is_shown_at_the_end(tmp_path: Path) -> None:
    ran = run("staging.save = failing_save\nstore.save_async('x', tree)\n", tmp_path / "s")

    assert ran.returncode == 120
    assert ran.stderr.rstrip().endswith("OSError: the disk is tired")
    assert ran.stderr.count("Traceback") == 1


def test_an_error_that_somebody_was_told_is_not_shown_again(tmp_path: Path) -> None:
    script = """
staging.save = failing_save
handle = store.save_async('x', tree)
try:
    handle.wait()
except OSError:
    print("told")
"""
    ran = run(script, tmp_path / "s")

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "told\n", "")


def test_a_save_that_ends_when_the_interpreter_exits_is_uploaded_to_the_mirror(tmp_path: Path) -> None:
    # The worker of the mirror is waited for after the saves, although it was started before the second one.
    script = """
mirrored = holdfast.open(sys.argv[1], mirror=sys.argv[1] + "-mirror")
mirrored.save_async("first", tree).wait()
mirrored.mirror.wait()
staging.save = slow_save
mirrored.save_async("second", tree)
"""
    ran = run(script, tmp_path / "s")

    assert (ran.returncode, ran.stderr) == (0, "")
    assert read_names(tmp_path / "s-mirror") == ["first", "second"]


def test_an_upload_that_fails_at_exit_is_a_warning_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "s-mirror").write_text("not a store")
    script = """
mirrored = holdfast.open(sys.argv[1], mirror=sys.argv[1] + "-mirror")
mirrored.save_async("x", tree)
"""
    ran = run(script, tmp_path / "s")

    assert ran.returncode == 0
    assert "1 snapshots were not uploaded" in ran.stderr
    assert read_names(tmp_path / "s") == ["x"]


def test_an_interrupt_leaves_a_sound_store(tmp_path: Path) -> None:
    script = """
store.save("before", tree)
staging.save = slow_save
handle = store.save_async("x", {**tree, "more": torch.arange(1_000_000)})
signal.raise_signal(signal.SIGINT)
"""
    ran = run(script, tmp_path / "s")

    # Interrupted, and still what was under way is there when the process has ended.
    assert ran.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in ran.stderr
    assert read_names(tmp_path / "s") == ["before", "x"]


_FORK = """
staging.save = slow_save
store.save("before", tree)
snap = store.snapshot("before")
lazy = snap["3"]
lazy.read()
handle = store.save_async("parent", tree)
pid = os.fork()
if pid == 0:
    staging.save = real_save
    store.save("child", {"t": torch.arange(5)})
    store.save_async("child async", tree).wait()
    assert store.load("child")["t"].tolist() == [0, 1, 2, 3, 4]
    assert snap["4"].read()[0] == 4
    assert lazy[:3].tolist() == [3, 3, 3]
    assert store.load("before")["7"][:3].tolist() == [7, 7, 7]
    try:
        handle.wait()
    except holdfast.StoreError as error:
        assert "was started by another process" in str(error), error
    else:
        raise AssertionError
    store.close()
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
handle.wait()
"""


def test_a_forked_child_saves_and_loads_and_waits_for_none_of_its_parent(tmp_path: Path) -> None:
    ran = run(_FORK, tmp_path / "s")

    assert (ran.returncode, ran.stderr) == (0, "")
    assert read_names(tmp_path / "s") == ["before", "child", "child async", "parent"]


def test_a_forked_child_cannot_use_a_store_in_memory(tmp_path: Path) -> None:
    script = """
memory = holdfast.open("memory://")
memory.save("x", tree)
pid = os.fork()
if pid == 0:
    try:
        memory.load("x")
    except holdfast.StoreError as error:
        assert "belongs to the process that opened it; use a path to share a store" in str(error), error
        os._exit(0)
    os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
"""
    ran = run(script, tmp_path / "s")

    assert (ran.returncode, ran.stderr) == (0, "")


def work(store: Store, name: str) -> None:
    """Save and load in another process, ending right after a save in the background."""
    assert store.load("start")["t"].tolist() == [0, 1, 2]
    store.save(name, {"t": torch.arange(4), "pid": os.getpid()})
    store.save_async(name + " async", {"t": torch.arange(5)})


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_store_is_handed_to_worker_processes(tmp_path: Path, method: Any) -> None:
    store = open_store(tmp_path / "s")
    store.save("start", {"t": torch.arange(3)})
    worker = multiprocessing.get_context(method).Process(target=work, args=(store, "worker"))

    worker.start()
    worker.join(PATIENCE_S)

    assert worker.exitcode == 0
    assert read_names(tmp_path / "s") == ["start", "worker", "worker async"]
    assert store.load("worker")["pid"] == worker.pid


def test_a_store_in_memory_is_not_handed_on() -> None:
    with pytest.raises(StoreError, match=r"memory://.* belongs to the process that opened it; use a path"):
        open_store("memory://").__reduce__()
