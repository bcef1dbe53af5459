"""Measures the cost of verifying reused chunks when an unchanged state is saved again through one open store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import count
from pathlib import Path
from typing import Final
from unittest import mock

import torch

import holdfast
from bench.kit.measure import Contestant, Goal, Result, Sizes, Timings, WrongResult, race
from holdfast.repo.handle import repository as proven
from holdfast.repo.write.writer import SaveResult

_TRUST: Final = "trust everything"
_NEVER: Final = 1 << 62
_MOST: Final = 1.3
_ROUNDS: Final = 5
_TENSORS: Final = 16


def _trusting() -> AbstractContextManager[object]:
    return mock.patch.object(proven.VerifiedChunks, "covers", return_value=True)


def _without_sample() -> AbstractContextManager[object]:
    return mock.patch.object(proven, "SAMPLE_SHARE", _NEVER)


def _reading_all() -> AbstractContextManager[object]:
    return mock.patch.object(proven, "TRUST_S", -1.0)


_RULES: Final[dict[str, Callable[[], AbstractContextManager[object]]]] = {
    _TRUST: _trusting,
    "compare versions": _without_sample,
    "compare versions, read 1 in 64": nullcontext,
    "read everything": _reading_all,
}
_SHIPPED: Final = "compare versions, read 1 in 64"


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure each rule, with and without change hints, by CPU time against trusting everything."""
    return [row for hints in (False, True) for row in _measure(sizes, work, hints=hints)]


def _measure(sizes: Sizes, work: Path, *, hints: bool) -> list[Result]:
    torch.manual_seed(0)
    num_items = sizes.save_bytes // 2 // _TENSORS // 4
    state = {f"w{number}": torch.randn(num_items) for number in range(_TENSORS)}
    numbers = count()
    with ExitStack() as stack:
        store = stack.enter_context(holdfast.open(work / f"hints-{hints}", change_hints=hints))
        store.save("first", state)
        contestants = {name: _saving(store, state, rule, numbers) for name, rule in _RULES.items()}
        timings = race(contestants, rounds=max(sizes.rounds, _ROUNDS))
    return [_make_row(name, timings, hints=hints) for name in _RULES if name != _TRUST]


def _saving(
    store: holdfast.Store,
    state: dict[str, torch.Tensor],
    rule: Callable[[], AbstractContextManager[object]],
    numbers: count[int],
) -> Contestant:
    def save() -> SaveResult:
        with rule():
            return store.save(f"again-{next(numbers)}", state)

    def verify(result: object) -> None:
        if not isinstance(result, SaveResult) or result.new_bytes:
            raise WrongResult(f"a save of an unchanged state returned {result}")

    return Contestant(save, verify=verify)


def _make_row(name: str, timings: dict[str, Timings], *, hints: bool) -> Result:
    own, trusting = min(timings[name].cpu_seconds), min(timings[_TRUST].cpu_seconds)
    goal = Goal("ratio", "<=", _MOST) if name == _SHIPPED else None
    note = f"CPU seconds; best wall {timings[name].best:.3f} s, trusting {timings[_TRUST].best:.3f} s"
    workload = f"save again, {name}{', change hints' if hints else ''}"
    samples = {each: timings[each].cpu_seconds for each in (name, _TRUST)}
    return Result(workload, own, "s", _TRUST, trusting, goal, note, samples)
