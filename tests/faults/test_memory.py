"""Short of memory: every run ends, in the right result or in an error that says so, and the store is sound."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from holdfast.errors import CommitUnknown, Corrupt, OutOfMemory, StoreError
from tests.faults import memory_scenario
from tests.faults.memory_scenario import VERBS

ROOT: Final = Path(__file__).parents[2]
CLEAN: Final = {"right", "MemoryError", "CommitUnknown", "ENOMEM", "foreign"}
"""Foreign is an error of CPython or torch that stands for MemoryError; `memory_scenario.FOREIGN` lists them."""
ENOUGH_KIB: Final = 400_000


def run(folder: Path, how: str, verb: str, amounts: Iterable[int]) -> list[dict[str, Any]]:
    words = [sys.executable, "-m", memory_scenario.__name__, str(folder), how, verb, *map(str, amounts)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    sys.stderr.write(ended.stderr)  # shown by pytest if something is bad
    return [json.loads(line) for line in ended.stdout.splitlines()]


def find_bad(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in found if each["end"] not in CLEAN or each["wrong"]]


@pytest.mark.slow  # a process that loads torch, and a store for each amount
@pytest.mark.parametrize("verb", VERBS)
def test_whatever_address_space_is_left_no_run_is_wrong_or_hangs(verb: str, tmp_path: Path) -> None:
    """Nothing left, then a little more each time, to beyond what it takes.

    With nothing left a load may do: it finds memory that the process has used before, and does without threads.
    """
    amounts = [0, 64, 128, 256, 512, 768, *range(1024, 24_000, 700), 32_000, 64_000, ENOUGH_KIB]

    found = run(tmp_path, "limit", verb, amounts)

    assert find_bad(found) == []
    ends = Counter(each["end"] for each in found)
    # The sweep has met both sides of the edge.
    assert found[-1]["end"] == "right"
    assert 0 < ends["right"] < ends.total()
    assert len(found) == len(amounts) == ends.total()


@pytest.mark.slow  # a process that loads torch, and a store for each number
@pytest.mark.parametrize("verb", VERBS)
def test_whichever_allocation_fails_no_run_is_wrong_or_hangs(verb: str, tmp_path: Path) -> None:
    """One allocation of Python fails; a step that shares no factor with loops of the code meets all kinds of them."""
    pytest.importorskip("_testcapi", reason="this build of Python cannot make allocations fail")
    numbers = [*range(1, 40, 3), *range(41, 30_000, 499)]

    found = run(tmp_path, "allocation", verb, numbers)

    assert find_bad(found) == []
    assert "MemoryError" in {each["end"] for each in found}


def test_what_is_bad_is_told() -> None:
    good = {"end": "MemoryError", "wrong": []}
    bad = [{"end": "hang", "wrong": []}, {"end": "right", "wrong": ["x"]}, {"end": "exit code -11", "wrong": []}]
    bad.append({"end": "another error", "wrong": []})
    assert find_bad([good, *bad]) == bad


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (MemoryError(), "MemoryError"),
        (OutOfMemory("x"), "MemoryError"),
        (StoreError("cannot read x", code=errno.ENOMEM), "ENOMEM"),
        (CommitUnknown("x"), "CommitUnknown"),
        (RuntimeError("can't start new thread"), "foreign"),
        (TypeError("expected str, bytes or os.PathLike object, not PosixPath"), "foreign"),
        (TypeError("expected str, bytes or os.PathLike object, not int"), "another error"),
        (RuntimeError("increment_version expect a Iterable[Tensor] as input\nBefore this error, ..."), "foreign"),
        (RuntimeError("Failed to allocate a torch.storage.UntypedStorage object"), "foreign"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."), "foreign"),
        (RuntimeError("dictionary changed size during iteration"), "another error"),
        (SystemError("<method 'stride' of 'torch._C.TensorBase'> returned a result with an exception set"), "foreign"),
        (SystemError("<function f> returned a result with an exception set"), "another error"),
        (StoreError("the save is under way in another process"), "another error"),
        (Corrupt("x"), "another error"),
        (AttributeError("x"), "another error"),
    ],
    ids=repr,
)
def test_an_error_that_does_not_tell_of_the_shortage_is_bad(error: Exception, end: str) -> None:
    assert memory_scenario.name_end(error) == end
