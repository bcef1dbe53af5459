"""A snapshot saved by any number of ranks, in any placement, is loaded by any other number in any other placement."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import holdfast
from tests.distributed.conftest import World
from tests.distributed.placing import LAYOUTS, Meshes, find_differences, list_cases, make_full, make_tree

WORLDS = [1, 2, 3, 4]
PAIRS = [(saved_by, size) for saved_by in WORLDS for size in WORLDS]
QUICK = (3, 2)
"""The pair that is tried whenever tests run."""

Saved = Callable[[int], Path]


def save_all(rank: int, path: Path) -> tuple[str, ...]:
    tree = make_tree(Meshes())
    with holdfast.open(path) as store:
        return store.save("all", tree).divergent


def load_all(rank: int, path: Path, shift: int) -> list[str]:
    meshes = Meshes()
    tree = make_tree(meshes, shift=shift, zero=True)
    with holdfast.open(path) as store:
        store.load_into("all", tree)
    return find_differences(tree, make_tree(meshes, shift=shift))


@pytest.fixture(scope="module")
def saved(world: World, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return what gives a store with every case as a world of that size has saved it."""
    folder = tmp_path_factory.mktemp("reshard")

    @cache
    def save(size: int) -> Path:
        assert world(size)(save_all, folder / str(size)) == [()] * size
        return folder / str(size)

    return save


@pytest.mark.parametrize(
    ("saved_by", "size"), [pair if pair == QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]
)
def test_every_world_loads_what_every_other_has_saved(world: World, saved: Saved, saved_by: int, size: int) -> None:
    # Another shift for each pair, so that over all pairs each placement is loaded into each.
    shift = PAIRS.index((saved_by, size)) % len(LAYOUTS)

    assert world(size)(load_all, saved(saved_by), shift) == [[]] * size


@pytest.mark.parametrize(
    "saved_by", [size if size == QUICK[0] else pytest.param(size, marks=pytest.mark.slow) for size in WORLDS]
)
def test_one_process_loads_all_of_what_many_have_saved_and_finds_it_sound(saved: Saved, saved_by: int) -> None:
    full = make_full()

    with holdfast.open(saved(saved_by), read_only=True) as store:
        tree = store.load("all")
        findings = store.check(read=True)

    assert find_differences(tree, {case: full[name] for case, (name, _) in list_cases().items()}) == []
    assert findings == []
