"""Movement over a series: the distances of whole groups, and what has to be read for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.diff.facts import LeafFacts
from holdfast.diff.movement import MeasuredBytes, PairMovement, iter_movement
from holdfast.objects.memory import MemoryStore
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.read.reader import SnapshotReader
from tests.kit.saving import new_repo
from tests.kit.thread_ranks import save_on_threads

LARGE = torch.randn(3 << 18, generator=torch.Generator().manual_seed(1)).reshape(-1, 512)  # four chunks


def measure(store: holdfast.Store, states: list[Any]) -> list[PairMovement]:
    for step, state in enumerate(states):
        store.save(f"run/{step}", state)
    records = [store.snapshot(f"run/{step}").record for step in range(len(states))]
    return [
        found for found in iter_movement(store.repository, records, by_first_key) if isinstance(found, PairMovement)
    ]


def by_first_key(name: str, facts: LeafFacts) -> str | None:
    return name.partition(".")[0] if facts.dtype.startswith(("float", "bfloat")) else None


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


def test_distances_are_those_of_whole_groups(store: holdfast.Store) -> None:
    one, two = torch.full((40, 30), 3.0), torch.full((100,), 4.0)
    pairs = measure(
        store,
        [
            {"a": {"x": one, "y": two}, "b": one, "n": torch.arange(9)},
            {"a": {"x": one + 0.5, "y": two}, "b": one, "n": torch.arange(9) + 1},
            {"a": {"x": one + 0.5, "y": two * 2}, "b": one * 2, "n": torch.arange(9)},
        ],
    )

    norm = math.sqrt(1200 * 9 + 100 * 16)
    assert pairs[0].distances == {"a": pytest.approx(math.sqrt(1200 * 0.25) / norm), "b": 0.0}
    later = math.sqrt(1200 * 3.5**2 + 100 * 16)
    assert pairs[1].distances == {"a": pytest.approx(40 / later), "b": pytest.approx(1.0)}


def test_equal_groups_are_not_read_and_equal_chunks_once(store: holdfast.Store) -> None:
    frozen = torch.randn(1 << 19, generator=torch.Generator().manual_seed(2))
    states = []
    for step in range(4):
        moving = LARGE.clone()
        moving[-1] += step
        states.append({"frozen": frozen, "moving": moving})

    pairs = measure(store, states)

    chunk = LARGE.nbytes // 4
    assert [pair.read_bytes for pair in pairs] == [3 * chunk + 2 * chunk, 2 * chunk, 2 * chunk]
    assert [pair.distances["frozen"] for pair in pairs] == [0.0, 0.0, 0.0]
    for step, pair in enumerate(pairs):
        before = states[step]["moving"].double()
        expected = (states[step + 1]["moving"].double() - before).norm() / before.norm()
        assert pair.distances["moving"] == pytest.approx(float(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_is_measured(store: holdfast.Store, dtype: torch.dtype) -> None:
    before = torch.linspace(1, 2, 1000).to(dtype)
    (pair,) = measure(store, [{"x": before}, {"x": before * 1.5}])

    assert pair.distances["x"] == pytest.approx(0.5, rel=0.01)


def test_other_layouts_and_dtypes_are_compared_item_by_item(store: holdfast.Store) -> None:
    before = torch.arange(1.0, 601.0).reshape(20, 30)
    (pair,) = measure(
        store, [{"x": before, "y": before}, {"x": (before * 2).t().contiguous().t(), "y": before.double() * 2}]
    )

    assert pair.distances == {"x": pytest.approx(1.0), "y": pytest.approx(1.0)}


def test_what_cannot_be_compared_is_unknown(store: holdfast.Store) -> None:
    x = torch.ones(10)
    pairs = measure(store, [{"x": x, "y": x, "z": x * 0}, {"x": torch.ones(11), "z": x, "new": x}])

    assert pairs[0].distances == {"x": None, "z": math.inf, "new": None}


def test_values_that_are_not_finite_on_both_sides_do_not_count(store: holdfast.Store) -> None:
    before, after = torch.ones(100), torch.full((100,), 2.0)
    before[3], after[3] = math.nan, math.inf
    (pair,) = measure(store, [{"x": before}, {"x": after}])

    assert pair.distances == {"x": 1.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_whose_values_become_or_cease_to_be_finite_has_no_distance(
    store: holdfast.Store, bad: float, dtype: torch.dtype
) -> None:
    whole, broken = torch.ones(100), torch.ones(100)
    broken[3] = bad
    pairs = measure(store, [{"x": whole}, {"x": broken.to(dtype)}, {"x": whole}])

    assert all(distance is not None and math.isnan(distance) for pair in pairs for distance in pair.distances.values())


def test_sharded_tensors_are_measured() -> None:
    repo = new_repo(MemoryStore())
    full = torch.arange(1.0, 1601.0).reshape(40, 40)
    for step in range(2):
        trees = [
            {
                "x": holdfast.shard(
                    (full * (1 + step))[:, 20 * rank : 20 * rank + 20].clone(),
                    global_shape=(40, 40),
                    offsets=(0, 20 * rank),
                )
            }
            for rank in range(2)
        ]
        save_on_threads(repo, f"run/{step}", trees)
    records = [read_snapshot(repo.store, f"run/{step}") for step in range(2)]

    *_, last = iter_movement(repo, records, by_first_key)

    assert isinstance(last, PairMovement)
    assert last.distances == {"x": pytest.approx(1.0)}


def test_closing_it_closes_every_snapshot(store: holdfast.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3):
        store.save(f"run/{step}", {"x": LARGE + step})
    records = [store.snapshot(f"run/{step}").record for step in range(3)]
    closed: list[str] = []
    actual = SnapshotReader.__exit__

    def close(reader: SnapshotReader, *error: Any) -> None:
        closed.append(reader.snapshot.name)
        actual(reader, *error)

    monkeypatch.setattr(SnapshotReader, "__exit__", close)
    found = iter_movement(store.repository, records, by_first_key)
    first = next(found)
    assert isinstance(first, MeasuredBytes)
    assert (first.pair, first.total_bytes) == (0, LARGE.nbytes)

    found.close()  # type: ignore[attr-defined]  # a generator

    assert sorted(closed) == ["run/0", "run/1"]
