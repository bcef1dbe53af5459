"""How ranks exit: no thread of ours is inside of C++ when Python is finalized, which would abort the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.kit.patience import RUN_S

pytestmark = pytest.mark.slow

_LATE: Final = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
from holdfast.distributed.talk import sending
from holdfast.distributed.talk.store_rounds import StoreThread

class Late:
    '''Keeps Python in its finalization until all threads with a name of ours have ended.'''

    def __init__(self):
        self.names, self.sleep, self.end_s = list_names, time.sleep, time.monotonic() + 5
        self.clock = time.monotonic

    def __del__(self):
        while self.names() and self.clock() < self.end_s:
            self.sleep(0.01)

def list_names(listdir=os.listdir, open=open):
    names = [open(f"/proc/self/task/{each}/comm").read() for each in listdir("/proc/self/task")]
    return [name for name in names if name.startswith("holdfast")]

late = Late()
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)

def wait(store):
    # Inside of C++ for a second, in which the main thread ends.
    store.wait(["missing"], timedelta(seconds=1))
"""


@pytest.mark.parametrize(
    "begin",
    [
        "thread = StoreThread(store, name='holdfast-x', timeout_s=60)\nthread.post(wait)\nthread.close()",
        "thread = StoreThread(store, name='holdfast-x', timeout_s=60)\nthread.post(wait)",
        "StoreThread(store, name='holdfast-x', timeout_s=60).post(wait)\nsys.exit(0)",
    ],
    ids=["closed", "not closed", "not referred to"],
)
def test_a_call_that_returns_late_does_not_abort_the_process(begin: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _LATE + begin], capture_output=True, text=True, timeout=RUN_S, check=False
    )

    assert ran.returncode == 0, ran.stderr
    assert "terminate called" not in ran.stderr


_RANKS: Final = """
import gc, os, sys, time
import torch
import torch.distributed as dist
import holdfast
import holdfast.distributed.checkpoint.checkpoint

folder, runs = sys.argv[1], int(sys.argv[2])
if os.fork() == 0:
    holdfast.open(folder + "/store").save("x", {"w": torch.arange(200_000.0), "step": 7})
    os._exit(0)
assert os.wait()[1] == 0
gc.freeze()

def connect(rank, path):
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
        with open(path + "~", "w") as file:
            file.write(str(store.port))
        os.rename(path + "~", path)
        return store
    while not os.path.exists(path):
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(open(path).read()), 3, False, wait_for_workers=False)

is_rank, statuses = False, []
for run in range(runs):
    for rank in range(3):
        is_rank = os.fork() == 0
        if is_rank:
            break
    if is_rank:
        break
    statuses += [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3)]
else:
    print(statuses, flush=True)
    os._exit(0)

# The ranks end as a script does, right after the load: its threads may still close connections.
torch.set_num_threads(1)
dist.init_process_group("gloo", store=connect(rank, f"{folder}/{run}"), rank=rank, world_size=3)
state = {"w": torch.zeros(200_000), "step": 0}
holdfast.open(folder + "/store").load_into("x", state, replicas="broadcast")
assert state["step"] == 7 and state["w"][-1] == 199_999

class Late:
    '''Makes the finalization of Python longer.'''

    def __init__(self):
        self.sleep = time.sleep

    def __del__(self):
        self.sleep(0.2)

late = Late()
"""


def test_ranks_that_end_right_after_a_collective_are_not_aborted(tmp_path: Path) -> None:
    runs = 12
    words = [sys.executable, "-c", _RANKS, str(tmp_path), str(runs)]

    ran = subprocess.run(words, capture_output=True, text=True, timeout=RUN_S, check=True)

    assert ran.stdout.strip() == str([0] * 3 * runs), ran.stderr
