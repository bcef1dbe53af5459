"""What a process reports when it ends while work in the background fails: a table of failures and of ways to end.

One process with torch loaded is forked for each cell, and each fork ends as a script does.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from holdfast.store import open as open_store
from tests.kit.patience import RUN_S

pytestmark = pytest.mark.slow

_WARM: Final = """
import gc, json, os, resource, shutil, signal, sys, threading
import torch
import holdfast
from holdfast.content import batch as batch_writer
from holdfast.content_store import ContentStoreWriter
from holdfast.formats import background
from holdfast.snapshot import staging

root, work, ends = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
found = {}
# The forks share these objects, and need not examine them when they end.
gc.freeze()
for number, end in enumerate(ends):
    folder = f"{root}/{number}"
    os.mkdir(folder)
    pid = os.fork()
    if pid == 0:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found[end] = status, open(folder + "/stderr").read()
else:
    print(json.dumps(found), flush=True)
    os._exit(0)

os.dup2(os.open(folder + "/stderr", os.O_WRONLY | os.O_CREAT), 2)
os.dup2(os.open(folder + "/stdout", os.O_WRONLY | os.O_CREAT), 1)
tree = {"weights": torch.arange(300_000)}
store = holdfast.open(folder + "/store")
real_save = staging.save
is_exiting = threading.Event()

def save_at_exit(*arguments, **options):
    assert is_exiting.wait(300)
    change()
    return real_save(*arguments, **options)

def change():
    pass

def fail(*arguments, **options):
    raise OSError(28, "No space left on device")

class Odd(Exception):
    def __str__(self):
        raise ValueError("no text")

def fail_oddly(*arguments, **options):
    raise Odd

exec(work)
# The newest callback is called first: what waits for it happens while the interpreter waits for the save.
threading._register_atexit(is_exiting.set)
exec(end)
"""

_FAILURES: Final = {
    "the disk is full": (
        "def change(): resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "staging.save = save_at_exit\nstore.save_async('x', tree)",
        "StoreFull|File too large",
    ),
    "the store was deleted": (
        "store.save('before', tree)\ndef change(): shutil.rmtree(folder + '/store')\n"
        "staging.save = save_at_exit\nstore.save_async('x', tree)",
        "StoreGone",
    ),
    "the error has no text": ("staging.save = fail_oddly\nstore.save_async('x', tree)", "Odd"),
    "the save has failed long before": (
        "staging.save = fail\nstore.save_async('x', tree)\nstore._saver._current._join()\ndel store\ngc.collect()",
        "No space left",
    ),
    "the save needs no thread": (
        "store.save('x', tree)\nstaging.save = fail\nstore.save_async('x', tree, staging='budget')",
        "No space left",
    ),
    "the second of two stores": (
        "def choose(repo, request, **options):\n"
        "    return (save_at_exit if request.name == 'x' else fail)(repo, request, **options)\n"
        "staging.save = choose\nstore.save_async('x', tree)\n"
        "other = holdfast.open(folder + '/other')\nother.save_async('y', tree)",
        "No space left",
    ),
    "the save of a manager": (
        "staging.save = fail\nmanager = store.manager('run/', every=1)\nmanager.step(1, tree)",
        "No space left",
    ),
    "the clean-up of a manager": (
        "import holdfast.checkpointing as checkpointing\ncheckpointing.read_prune_plan = fail\n"
        "manager = store.manager('run/', every=1, keep_last=1)\nmanager.step(1, tree)",
        "No space left",
    ),
    "an export": (
        "store.save('x', tree)\nbackground.export_apart = background.export = fail\n"
        "store.export_async('x', folder + '/out', format='safetensors')",
        "No space left",
    ),
    "a writer of a content store": (
        "staging.save = save_at_exit\nstore.save_async('x', tree)\n"
        "writer = ContentStoreWriter(folder + '/content')\nwriter.write_tensor('t', torch.arange(3))\n"
        "batch_writer.save = fail",
        "No space left",
    ),
}
_OWN_STATUS: Final = {
    "pass": 0,
    "sys.exit(0)": 0,
    "sys.exit(3)": 3,
    "sys.exit('a text')": 1,
    "raise ValueError('mine')": 1,
    "signal.raise_signal(signal.SIGINT)": -signal.SIGINT,
    "os._exit(5)": 5,
}
"""Ways to end, and the status of a process in which nothing fails."""
_UNCHANGED: Final = {"signal.raise_signal(signal.SIGINT)", "os._exit(5)"}
"""Ends whose status says already that not everything was done."""


class Ended(NamedTuple):
    """How a process has ended."""

    status: int
    stderr: str


def end_processes(root: Path, work: str, ends: Sequence[str] = tuple(_OWN_STATUS)) -> dict[str, Ended]:
    """Run `work` and each of the ends in a process of its own; return how it ended, by end."""
    words = [sys.executable, "-c", _WARM, str(root), work, json.dumps(list(ends))]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=RUN_S, check=True)
    return {end: Ended(*found) for end, found in json.loads(ran.stdout).items()}


@pytest.mark.parametrize("failure", _FAILURES)
def test_a_failure_that_nobody_saw_is_shown_and_changes_the_exit_status(tmp_path: Path, failure: str) -> None:
    work, text = _FAILURES[failure]
    # How a process ends does not depend on what has failed: all ends with one failure, two with each of the others.
    ends = tuple(_OWN_STATUS) if failure == "the store was deleted" else ("pass", "sys.exit(3)")

    for end, ended in end_processes(tmp_path, work, ends).items():
        assert ended.status == (_OWN_STATUS[end] if end in _UNCHANGED else 120), (end, ended)
        is_shown = any(part in ended.stderr for part in text.split("|"))
        assert is_shown == (end != "os._exit(5)"), (end, ended)
        assert "mine" in ended.stderr or "ValueError" not in end, (end, ended)


@pytest.mark.parametrize(
    "work",
    [
        "staging.save = save_at_exit\nstore.save_async('x', tree)",
        "staging.save = fail\nhandle = store.save_async('x', tree)\ntry: handle.wait()\nexcept OSError: pass",
        "staging.save = fail\nhandle = store.save_async('x', tree)\ntry: store.close()\nexcept OSError: pass",
        "staging.save = fail\nmanager = store.manager('run/', every=1, stop_signals=())\nmanager.step(1, tree)\n"
        "try: manager.wait()\nexcept OSError: pass",
    ],
    ids=["nothing fails", "seen by wait", "seen by close", "seen by the wait of a manager"],
)
def test_a_process_keeps_its_status_if_nothing_fails_unseen(tmp_path: Path, work: str) -> None:
    for end, ended in end_processes(tmp_path, work).items():
        assert ended.status == _OWN_STATUS[end], (end, ended)
        assert "No space left" not in ended.stderr, (end, ended)


@pytest.mark.parametrize("failure", ["the second of two stores", "a writer of a content store"])
def test_a_failure_does_not_stop_the_save_of_another_store(tmp_path: Path, failure: str) -> None:
    ended = end_processes(tmp_path, _FAILURES[failure][0], ["pass", "raise ValueError('mine')"])

    for number, end in enumerate(ended):
        saved = [snapshot.name for snapshot in open_store(tmp_path / str(number) / "store").snapshots()]
        assert saved == ["x"], (end, ended[end])
