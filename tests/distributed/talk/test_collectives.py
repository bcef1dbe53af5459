"""Collective calls with one, two and three ranks: the values received, and no key is left in the store."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.distributed.talk.collectives import Collectives, find_store
from holdfast.errors import RankError
from tests.distributed.conftest import World
from tests.kit.capabilities import find_in_torch

SIZES = [1, 2, 3]
BIG = (8 << 20) + 1
"""More than a TCPStore takes at once."""


def count_keys() -> int:
    group = dist.group.WORLD
    assert group is not None
    return int(find_store(group).num_keys())


def call_each(rank: int, coordinator: int) -> dict[str, Any]:
    with Collectives(coordinator=coordinator) as ranks:
        size = ranks.world_size
        mine = ("from", rank, {"raw": b"\0\xff"})
        return {
            "place": (ranks.rank, ranks.world_size, ranks.coordinator, ranks.is_coordinator),
            "broadcast_object": ranks.broadcast_object(mine, step="1"),
            "gather_object": ranks.gather_object(mine, step="2"),
            "all_gather_object": ranks.all_gather_object(mine, step="3"),
            "scatter_object": ranks.scatter_object(
                [("part", n) for n in range(size)] if ranks.is_coordinator else None, step="4"
            ),
            "all_to_all_object": ranks.all_to_all_object([(rank, to) for to in range(size)], step="5"),
            "reduce_scatter": ranks.reduce_scatter("6", lambda: rank, lambda got: [(n, got) for n in range(size)]),
            "all_reduce": ranks.all_reduce("7", lambda: rank + 1, sum),
            "all_gather": ranks.all_gather("8", lambda: [rank]),
            "broadcast": ranks.broadcast("9", lambda: f"of {rank}"),
            "all_gather_keys": ranks.all_gather_keys(iter([f"z{rank}", "shared", "\ud800"]), step="10"),
        }


@pytest.mark.parametrize("size", SIZES)
def test_every_collective_gives_each_rank_what_its_name_says(world: World, size: int) -> None:
    coordinator = size - 1

    results = world(size)(call_each, coordinator)

    values = [("from", rank, {"raw": b"\0\xff"}) for rank in range(size)]
    for rank, result in enumerate(results):
        assert result == {
            "place": (rank, size, coordinator, rank == coordinator),
            "broadcast_object": values[coordinator],
            "gather_object": values if rank == coordinator else None,
            "all_gather_object": values,
            "scatter_object": ("part", rank),
            "all_to_all_object": [(source, rank) for source in range(size)],
            "reduce_scatter": (rank, list(range(size))),
            "all_reduce": size * (size + 1) // 2,
            "all_gather": [[source] for source in range(size)],
            "broadcast": f"of {coordinator}",
            "all_gather_keys": sorted([*(f"z{source}" for source in range(size)), "shared", "\ud800"]),
        }


def test_without_a_group_there_is_a_world_of_one() -> None:
    result = call_each(0, 0)

    assert result["place"] == (0, 1, 0, True)
    assert result["all_to_all_object"] == [(0, 0)]
    assert result["all_gather_keys"] == ["shared", "z0", "\ud800"]


def place_ranks(rank: int) -> dict[str, Any]:
    group = dist.new_group([1, 2])
    with Collectives(use_dist=False) as alone:
        outcome: dict[str, Any] = {"alone": (alone.rank, alone.world_size, alone.is_coordinator)}
        outcome["alone globally"] = (alone.global_ranks, alone.global_coordinator_rank)
        outcome["alone gather"] = alone.all_gather("one", lambda: rank)
    with Collectives(coordinator=2) as ranks:
        outcome["whole"] = (ranks.global_ranks, ranks.global_coordinator_rank)
    if rank in (1, 2):
        with Collectives(group, coordinator=1) as ranks:
            outcome["part"] = (ranks.rank, ranks.global_ranks, ranks.global_coordinator_rank)
            outcome["shown"] = repr(ranks)
    return outcome


def test_ranks_of_a_group_know_their_places_in_the_whole_job(world: World) -> None:
    results = world(3)(place_ranks)

    for rank, outcome in enumerate(results):
        assert outcome["alone"] == (0, 1, True)
        assert outcome["alone globally"] == ([0], 0)
        assert outcome["alone gather"] == [rank]
        assert outcome["whole"] == ([0, 1, 2], 2)
    assert [outcome["part"] for outcome in results[1:]] == [(0, [1, 2], 2), (1, [1, 2], 2)]
    assert results[1]["shown"] == "<Collectives rank 0 of 2, coordinator 1 (rank 2 of the job)>"


def pass_barrier(rank: int, path: str) -> list[str]:
    with Collectives() as ranks:
        ranks.barrier("write", lambda: Path(path, str(rank)).touch())
        seen = sorted(os.listdir(path))
        ranks.barrier()
    return seen


def test_nobody_passes_a_barrier_before_all_have_come(world: World, tmp_path: Path) -> None:
    assert world(3)(pass_barrier, str(tmp_path)) == [["0", "1", "2"]] * 3


def fail_at_barrier(rank: int) -> tuple[str, list[int]]:
    with Collectives() as ranks:
        try:
            ranks.barrier("divide", lambda: 1 / (rank - 1))
        except RankError as error:
            return error.step, sorted(error.failures)
    return "passed", []


def test_who_fails_before_a_barrier_is_named_on_all_ranks(world: World) -> None:
    assert world(3)(fail_at_barrier) == [("divide", [1])] * 3


def exchange_shapes(rank: int) -> list[Any]:
    with Collectives() as ranks:
        return ranks.all_gather("shapes", lambda: OrderedDict(b=torch.Size([rank, 2]), a=1))


def test_shapes_and_ordered_dicts_travel_as_what_they_are(world: World) -> None:
    for received in (*world(2)(exchange_shapes), exchange_shapes(0)):
        for rank, value in enumerate(received):
            assert (type(value), list(value)) == (OrderedDict, ["b", "a"])
            assert (type(value["b"]), tuple(value["b"])) == (torch.Size, (rank, 2))


def test_values_come_back_as_copies() -> None:
    value = [1, [2]]

    with Collectives() as ranks:
        received = ranks.broadcast_object(value, step="copy")

    assert received == value
    assert received is not value


def send_much(rank: int) -> list[Any]:
    big = bytes([rank]) * BIG if rank == 1 else b"small"
    with Collectives() as ranks:
        gathered = ranks.all_gather_object(big, step="gather")
        sent = ranks.all_to_all_object([big, b"", b""], step="send")
    return [(one[:1], len(one)) for one in (*gathered, *sent)]


def test_a_value_may_be_larger_than_what_a_key_of_the_store_holds(world: World) -> None:
    results = world(3)(send_much)

    every = [(b"s", 5), (b"\1", BIG), (b"s", 5)]
    nothing = [(b"", 0)] * 3
    assert results == [every + every, every + nothing, every + nothing]


def count_after_many(rank: int) -> list[int]:
    counts = []
    for _ in range(2):
        with Collectives() as ranks:
            for number in range(50):
                ranks.all_gather_object(number, step=f"step {number}")
                ranks.all_to_all_object([b"x"] * ranks.world_size, step="send")
            ranks.scatter_object([1, 2], step="last")
        dist.barrier()
        counts.append(count_keys())
        dist.barrier()
    return counts


def test_the_store_does_not_grow_with_the_number_of_collectives(world: World) -> None:
    before = world(2)(count_at_once)[0]

    results = world(2)(count_after_many)

    # One key for each rank and name stays: how often it has joined. Without clones, a prefix stays as well.
    kept = before + (2 if find_in_torch("distributed.Store.clone") else 3)
    assert results == [[kept, kept]] * 2


def count_at_once(rank: int) -> int:
    dist.barrier()
    return count_keys()


def talk_in_a_subgroup(rank: int) -> list[Any] | None:
    group = dist.new_group([2, 0])
    if rank == 1:
        with pytest.raises(ValueError, match="not a rank of the group"):
            Collectives(group)
        return None
    with Collectives(group) as ranks:
        return [(ranks.rank, ranks.world_size), ranks.all_gather_object(rank, step="sub")]


def test_a_subgroup_talks_by_itself_with_ranks_of_its_own(world: World) -> None:
    results = world(3)(talk_in_a_subgroup)

    members = [result for result in results if result is not None]
    assert results[1] is None
    assert sorted(place for place, _ in members) == [(0, 2), (1, 2)]
    assert all(sorted(gathered) == [0, 2] for _, gathered in members)


def talk_in_two_threads(rank: int) -> dict[str, list[list[Any]]]:
    received: dict[str, list[list[Any]]] = {"one": [], "two": []}

    def talk(name: str) -> None:
        with Collectives(name=name) as ranks:
            for number in range(30):
                received[name].append(ranks.all_gather_object((name, rank, number), step=f"{number}"))

    # The ranks start them in another order.
    names = ["one", "two"] if rank == 0 else ["two", "one"]
    threads = [threading.Thread(target=talk, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return received


def test_two_threads_talk_at_once_under_two_names_and_do_not_mix(world: World) -> None:
    results = world(2)(talk_in_two_threads)

    for received in results:
        for name in ("one", "two"):
            assert received[name] == [[(name, rank, number) for rank in range(2)] for number in range(30)]


def talk_over_a_file(rank: int, path: str) -> list[Any]:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    with Collectives() as ranks:
        gathered = ranks.all_gather_object(rank, step="file")
    dist.barrier()
    return gathered


def test_a_group_whose_store_is_a_file_works_too(world: World, tmp_path: Any) -> None:
    assert world(2)(talk_over_a_file, str(tmp_path / "store"), backend=None) == [[0, 1], [0, 1]]


def measure_latency(rank: int) -> float:
    with Collectives() as ranks:
        ranks.all_gather_object(rank, step="warm")
        began = time.perf_counter()
        for _ in range(50):
            ranks.all_gather_object(rank, step="measure")
        return (time.perf_counter() - began) / 50


def test_latency_is_shown(world: World, record_property: Any, capsys: pytest.CaptureFixture[str]) -> None:
    latency_s = max(world(3)(measure_latency))

    record_property("all_gather_latency_s", latency_s)
    with capsys.disabled():
        sys.stdout.write(f"\nall_gather_object with 3 ranks: {latency_s * 1e3:.2f} ms\n")
