"""Runs verbs in forked children that are short of memory, and judges how each ended and what it left.

Run as `python -m tests.faults.memory_scenario FOLDER HOW VERB AMOUNT...`: a child for each amount. With HOW `limit` an
amount is how many KiB of address space the child may still take. With HOW `allocation` it is the number of the one
allocation of Python that fails. Prints a line of JSON for each child.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import holdfast
from holdfast.errors import CommitUnknown

HANG_S: Final = 240.0


@dataclass(frozen=True, slots=True)
class Foreign:
    """What CPython or torch raises instead of MemoryError if it gets no memory."""

    kind: type[Exception]
    text: str
    """A pattern that the whole text matches."""
    why: str


FOREIGN: Final = (
    Foreign(
        RuntimeError,
        r"(?s)increment_version expect a Iterable\[Tensor\] as input.*",
        "torch: a failed allocation is taken for a wrong argument",
    ),
    Foreign(
        TypeError,
        r"expected str, bytes or os\.PathLike object, not PosixPath",
        "CPython: os.fspath(path) takes a failed allocation for a missing __fspath__",
    ),
    Foreign(RuntimeError, "can't start new thread", "CPython: no memory for the stack of a thread, or for its state"),
    Foreign(RuntimeError, "can't allocate lock", "CPython: threading.Lock()"),
    Foreign(RuntimeError, "can't allocate read lock", "CPython: an open file, which has a lock"),
    Foreign(
        RuntimeError, r"Failed to allocate a torch\..* object", "torch: no memory for the Python object of a storage"
    ),
    Foreign(RuntimeError, r"(?s).*DefaultCPUAllocator: .*memory.*", "torch: no memory for a tensor's data"),
    Foreign(
        SystemError, r"<.*torch.*> returned a result with an exception set", "torch: a failed allocation is ignored"
    ),
)


def make_tree(seed: int) -> dict[str, Any]:
    """Return a tree whose tensors have no dimension above 256.

    For a larger number `tensor.shape` needs memory, and torch does not look whether it has got some: `tuple(x.shape)`
    is then a segmentation fault, in plain torch as well.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {
        f"layers.{number}.weight": torch.randn(200, 200, generator=generator) for number in range(12)
    }
    tensors["large"] = torch.randn(250, 28, 100, generator=generator)
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
HAS_RETURNED: Final = [False]
"""Whether the save or load has returned, in a child: what comes after it may still fail."""


def save(path: Path) -> bool:
    with holdfast.open(path) as store:
        store.save("new", NEW)
        HAS_RETURNED[0] = True
    return True


def save_behind(path: Path) -> bool:
    with holdfast.open(path) as store:
        store.save_async("new", NEW).wait()
        HAS_RETURNED[0] = True
    return True


def save_in_pieces(path: Path) -> bool:
    with holdfast.open(path) as store:
        store.save_async("new", NEW, staging="budget").wait()
        HAS_RETURNED[0] = True
    return True


def load(path: Path) -> bool:
    with holdfast.open(path) as store:
        return is_same(store.load("old"), OLD)


def load_into(path: Path) -> bool:
    with holdfast.open(path) as store:
        store.load_into("old", TARGET)
        HAS_RETURNED[0] = True
    return is_same(TARGET["model"], OLD["model"])


def load_atomic(path: Path) -> bool:
    with holdfast.open(path) as store:
        store.load_into("old", TARGET, atomic=True)
        HAS_RETURNED[0] = True
    return is_same(TARGET["model"], OLD["model"])


def check(path: Path) -> bool:
    with holdfast.open(path) as store:
        return store.check(read=True) == []


VERBS: Final[dict[str, Callable[[Path], bool]]] = {
    "save": save,
    "save_async": save_behind,
    "save_async budget": save_in_pieces,
    "load": load,
    "load_into": load_into,
    "load_into atomic": load_atomic,
    "check": check,
}


def name_end(error: BaseException) -> str:
    """Return the kind of an error: one that reports the lack of memory, or "another error"."""
    if isinstance(error, CommitUnknown):
        return "CommitUnknown"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "MemoryError"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "ENOMEM"
    for foreign in FOREIGN:
        if type(error) is foreign.kind and re.fullmatch(foreign.text, str(error)):
            return "foreign"
    return "another error"


def find_unsaid(error: BaseException) -> list[str]:
    """Return the tensors of the target that were overwritten though the error does not say so."""
    said = getattr(error, "overwritten", ())
    model = TARGET["model"]
    return [
        f"{name} was overwritten, and the error does not say so"
        for name, before in make_tree(3)["model"].items()
        if not torch.equal(model[name], before) and f"model.{name}" not in said
    ]


def run_short(verb: Callable[[Path], bool], path: Path, how: str, amount: int) -> dict[str, Any]:
    """Be the child: take memory away, act, give it back, and return how that ended."""
    try:
        SHORTEN[how](amount)
        is_right = verb(path)
    except BaseException as error:  # noqa: BLE001 - judged by the parent
        RESTORE[how]()
        shown = "".join(traceback.format_exception(error))
        wrong = [] if HAS_RETURNED[0] else find_unsaid(error)
        return {"end": name_end(error), "wrong": wrong, "error": shown, "saved": HAS_RETURNED[0]}
    RESTORE[how]()
    return {
        "end": "right",
        "wrong": [] if is_right else ["it returned, and the result is wrong"],
        "error": "",
        "saved": True,
    }


def shorten_space(amount_kib: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + amount_kib * 1024, resource.RLIM_INFINITY))


def restore_space() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)


def shorten_allocation(number: int) -> None:
    # Python's own tests use it; some builds leave it out.
    importlib.import_module("_testcapi").set_nomemory(number, number + 1)


def restore_allocation() -> None:
    sys.modules["_testcapi"].remove_mem_hooks()


SHORTEN: Final = {"limit": shorten_space, "allocation": shorten_allocation}
RESTORE: Final = {"limit": restore_space, "allocation": restore_allocation}


def fork(act: Callable[[], dict[str, Any]], report: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        report.write_text(json.dumps(act()))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - shown if the test fails
        traceback.print_exc()
        os._exit(1)


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


def judge(path: Path, verb: str, found: dict[str, Any]) -> list[str]:
    """Return what is wrong with the store that a child left, looked at with all the memory there is."""
    wrong = list(found["wrong"])
    with holdfast.open(path, read_only=True) as store:
        wrong += [str(finding) for finding in store.check(read=True) if finding.severity != "note"]
        names = [snapshot.name for snapshot in store.snapshots()]
        if not is_same(store.load("old"), OLD):
            wrong.append("the old snapshot has changed")
        if "new" in names and not is_same(store.load("new"), NEW):
            wrong.append("the new snapshot is not what was saved")
    if verb.startswith("save") and found["saved"] and "new" not in names:
        wrong.append("a save returned, and nothing is there")
    if found["end"] in ("MemoryError", "ENOMEM") and not found["saved"] and "new" in names:
        wrong.append("a save raised something else than CommitUnknown, and its snapshot is there")
    return wrong


def run_one(folder: Path, how: str, verb: str, amount: int) -> dict[str, Any]:
    path, report = folder / f"{verb}-{amount}", folder / f"{verb}-{amount}.json"
    with holdfast.open(path) as store:
        store.save("old", OLD)
    code = wait(fork(lambda: run_short(VERBS[verb], path, how, amount), report))
    found = {"end": "hang" if code is None else f"exit code {code}", "wrong": [], "error": "", "saved": False}
    if code == 0:
        found = json.loads(report.read_text())
    wrong = judge(path, verb, found)
    shutil.rmtree(path)
    return {"verb": verb, "amount": amount, "end": found["end"], "wrong": wrong, "error": found["error"]}


def warm_up(folder: Path, verb: str) -> None:
    """Run a verb with all the memory there is: its imports are not what the children are about."""
    path = folder / "warm"
    with holdfast.open(path) as store:
        store.save("old", OLD)
    VERBS[verb](path)
    for name, before in make_tree(3)["model"].items():
        TARGET["model"][name].copy_(before)
    HAS_RETURNED[0] = False


def main(folder: str, how: str, verb: str, *amounts: str) -> None:
    """Run a child for each amount."""
    faulthandler.enable()
    torch.set_num_threads(1)
    warm_up(Path(folder), verb)
    gc.collect()
    for amount in map(int, amounts):
        print(json.dumps(run_one(Path(folder), how, verb, amount)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
