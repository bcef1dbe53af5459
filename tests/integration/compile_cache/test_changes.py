"""No graph of a program before a change is used after it: optimizers, whole training steps, autograd functions."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch

from holdfast.compile_cache.backend import make_compiler
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import open_repository
from tests.integration.compile_cache.changes import Change, Outcome, SimulatedCache, StoreCache, judge, search
from tests.integration.compile_cache.function_changes import FUNCTION_CHANGES
from tests.integration.compile_cache.optimizer_changes import OPTIMIZER_CHANGES
from tests.integration.compile_cache.setting_changes import SETTING_CHANGES
from tests.integration.compile_cache.step_changes import STEP_CHANGES
from tests.kit.thinning import keep

ALL: Final = (*OPTIMIZER_CHANGES, *STEP_CHANGES, *SETTING_CHANGES, *FUNCTION_CHANGES)
# All of them take about ten minutes: each traces three programs, which for optimizers takes a second.
QUICK: Final = frozenset(
    {
        "tensor: lr of SGD",
        "attention: sums in bfloat16",
        "forward: a helper's helper",
        "backward: a closure",
        "setup_context: an attribute",
        "ctx: needs_input_grad of a detached input",
        "definition: by exec",
    }
)

# Compiled by inductor and stored: a minute each.
# Not "ctx: inside a nested region": inductor of torch 2.13 gives another gradient than eager for it.
STORED: Final = (
    "AdamW: lr",
    "SGD: nesterov",
    "tensor: lr",
    "group: lr of the second",
    "hook: before a step",
    "clip: another norm",
    "loss: another function",
    "attention: sums in bfloat16",
    "schedule: another factor",
    "backward: a closure",
    "setup_context: an attribute",
    "ctx: needs_input_grad of a detached input",
    "ctx: a view as output",
)

pytestmark = [
    # Torch imports code of its own that it has deprecated, and calls a function in a way that it warns of.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize(
    "change",
    [each if each.name in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in ALL],
    ids=lambda change: change.name,
)
def test_nothing_is_used_after_a_change_that_makes_it_wrong(change: Change) -> None:
    assert search(change, SimulatedCache()) == []


def test_the_search_is_wide_enough() -> None:
    names = {change.name for change in ALL}

    assert len(names) == len(ALL) >= 240
    assert names >= QUICK


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STORED)
def test_nothing_is_loaded_from_a_store_after_a_change_that_makes_it_wrong(name: str, tmp_path: Path) -> None:
    repo = open_repository(open_store(str(tmp_path / "store")), create=True)

    assert search(_find(name), StoreCache(make_compiler(repo))) == []


@pytest.mark.parametrize("name", keep(["SGD: lr", "clip: another norm", "backward: a closure"], "backward: a closure"))
def test_a_cache_whose_keys_leave_out_the_graph_is_reported(name: str) -> None:
    blind = SimulatedCache(identify=lambda key: f"{key.digests['inputs']} {len(key.parts['graph'])}")

    assert any(text.startswith("after: ") for text in search(_find(name), blind))


def _find(name: str) -> Change:
    return next(each for each in ALL if each.name == name)


def _make_outcome(number: float, *, hits: int = 0, misses: int = 0, eager: float | None = None) -> Outcome:
    right = [torch.tensor(number if eager is None else eager)]
    return Outcome(right, right, [torch.tensor(number)], hits, misses)


def test_wrong_results_lost_hits_and_changes_without_effect_are_reported() -> None:
    change = Change("a number", lambda compile_: [], lambda compile_: [])
    before, after, again = (
        _make_outcome(2.0, misses=1),
        _make_outcome(5.0, misses=1),
        _make_outcome(2.0, hits=1),
    )

    assert judge(change, before, after, again) == []
    assert judge(change, before, _make_outcome(2.0, hits=1, eager=5.0), again) == ["after: [[2.0]] for [[5.0]]"]
    assert judge(change, before, after, _make_outcome(2.0, misses=1)) == ["misses and hits: 1 and 0, again 1 and 0"]
    assert judge(change, before, before, again) == ["eager results are equal"]
    assert judge(change, _make_outcome(2.0), after, _make_outcome(2.0)) == ["misses and hits: 0 and 0, again 0 and 0"]
