"""Runs verbs in forked children that are short of memory, and judges how each ended and what it left.

Run as `python -m tests.faults.memory_scenario FOLDER HOW VERB AMOUNT...`: a child for each amount. With HOW `limit` an
amount is how many KiB of address space the child may still take. With HOW `allocation` it is the number of the one
allocation of Python that fails. Prints a line of JSON for each child.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import holdfast
from holdfast.errors import HoldfastError

# The ways out of a child, as exit codes.
RIGHT, WRONG, NO_MEMORY, REFUSED, NO_THREAD, OTHER = 0, 10, 11, 12, 13, 14
ENDS: Final = {
    RIGHT: "right",
    WRONG: "wrong",
    NO_MEMORY: "MemoryError",
    REFUSED: "HoldfastError",
    NO_THREAD: "no thread",
    OTHER: "another error",
}
HANG_S: Final = 240.0


def make_tree(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {
        f"layers.{number}.weight": torch.randn(40_000, generator=generator) for number in range(12)
    }
    tensors["large"] = torch.randn(700_000, generator=generator)
    return {"model": tensors, "step": seed, "note": "x" * 3000}


def is_same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(is_same(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


OLD: Final = make_tree(1)
NEW: Final = make_tree(2)
TARGET: Final = make_tree(3)


def save(path: Path) -> bool:
    with holdfast.open(path) as store:
        store.save("new", NEW)
    return True


def save_behind(path: Path) -> bool:
    with holdfast.open(path) as store:
        store.save_async("new", NEW).wait()
    return True


def load(path: Path) -> bool:
    with holdfast.open(path) as store:
        return is_same(store.load("old"), OLD)


def load_into(path: Path) -> bool:
    with holdfast.open(path) as store:
        store.load_into("old", TARGET)
    return is_same(TARGET["model"], OLD["model"])


def check(path: Path) -> bool:
    with holdfast.open(path) as store:
        return store.check(read=True) == []


VERBS: Final[dict[str, Callable[[Path], bool]]] = {
    "save": save,
    "save_async": save_behind,
    "load": load,
    "load_into": load_into,
    "check": check,
}


def run_short(verb: Callable[[Path], bool], path: Path, shorten: Callable[[], None]) -> int:
    """Be the child: take memory away, act, and return how that ended."""
    try:
        shorten()
        return RIGHT if verb(path) else WRONG
    except MemoryError:
        return NO_MEMORY
    except HoldfastError:
        return REFUSED
    except RuntimeError as error:
        # What torch says if its allocator gets nothing, and what Python says of a thread without a stack.
        text = str(error)
        if "start new thread" in text or "allocate lock" in text:
            return NO_THREAD
        if "memory" in text:
            return NO_MEMORY
        raise
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return NO_MEMORY
        raise


def shorten_space(amount_kib: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + amount_kib * 1024,) * 2)


def shorten_allocation(number: int) -> None:
    # Python's own tests use it; some builds leave it out.
    importlib.import_module("_testcapi").set_nomemory(number, number + 1)


SHORTEN: Final = {"limit": shorten_space, "allocation": shorten_allocation}


def fork(act: Callable[[], int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = OTHER
    try:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        code = act()
    except BaseException:  # noqa: BLE001 - shown if the test fails
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid: int) -> int | None:
    """Return a child's exit code, negative for a signal; None if it hangs."""
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def judge(path: Path, code: int | None) -> list[str]:
    """Return what is wrong with the store that a child left, looked at with all the memory there is."""
    wrong = []
    with holdfast.open(path, read_only=True) as store:
        wrong += [str(finding) for finding in store.check(read=True) if finding.severity != "note"]
        names = [snapshot.name for snapshot in store.snapshots()]
        if not is_same(store.load("old"), OLD):
            wrong.append("the old snapshot has changed")
        if "new" in names and not is_same(store.load("new"), NEW):
            wrong.append("the new snapshot is not what was saved")
    if code == RIGHT and path.name.startswith("save") and "new" not in names:
        wrong.append("a save returned, and nothing is there")
    return wrong


def run_one(folder: Path, how: str, verb: str, amount: int) -> dict[str, Any]:
    path = folder / f"{verb}-{amount}"
    with holdfast.open(path) as store:
        store.save("old", OLD)
    code = wait(fork(lambda: run_short(VERBS[verb], path, lambda: SHORTEN[how](amount))))
    end = "hang" if code is None else ENDS.get(code, f"exit code {code}")
    wrong = judge(path, code)
    return {"verb": verb, "amount": amount, "end": end, "wrong": wrong}


def main(folder: str, how: str, verb: str, *amounts: str) -> None:
    """Run a child for each amount."""
    torch.set_num_threads(1)
    gc.collect()
    for amount in map(int, amounts):
        print(json.dumps(run_one(Path(folder), how, verb, amount)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
