"""Calls on one topic belong together, whatever other topics are in use; joined collectives are no longer listed."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]  # there, and not declared as exported

from holdfast.distributed.talk import call_ids
from holdfast.distributed.talk.call_ids import CallId, join_collective, read_mismatches, withdraw_mismatched

BASE = "holdfast/x/"


def join(store: HashStore, topic: str, rank: int, *, size: int = 2, is_main: bool = True) -> CallId:
    call_id = join_collective(store, BASE, topic, rank=rank, size=size, is_main=is_main)
    store.set(f"{call_id.prefix}life/{rank}", "1 step")
    return call_id


@given(size=st.integers(1, 4), topics=st.lists(st.sampled_from("abc"), max_size=8), seed=st.integers(0, 1000))
def test_the_nth_call_of_a_topic_is_the_nth_of_all_in_whatever_order_ranks_make_them(
    size: int, topics: list[str], seed: int
) -> None:
    store = HashStore()
    chance = random.Random(seed)
    calls = [(rank, topic) for rank in range(size) for topic in topics]
    chance.shuffle(calls)
    found: dict[tuple[str, int], list[int]] = {}

    for rank, topic in calls:
        found.setdefault((topic, rank), []).append(join(store, topic, rank, size=size).number)

    for topic in set(topics):
        assert len({tuple(found[topic, rank]) for rank in range(size)}) == 1
        assert len(set(found[topic, 0])) == len(found[topic, 0])
    assert call_ids._read_list(store, BASE) in ("", "[]")


def test_threads_that_join_at_the_same_time_get_different_numbers() -> None:
    store = HashStore()
    numbers: dict[int, list[int]] = {0: [], 1: []}

    def work(rank: int) -> None:
        for _ in range(50):
            numbers[rank].append(join(store, "same", rank).number)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(numbers[0]) == sorted(numbers[1])
    assert len(set(numbers[0])) == 100
    assert call_ids._read_list(store, BASE) == "[]"


def test_long_topics_with_the_same_beginning_are_different() -> None:
    store = HashStore()

    first, second = join(store, "x" * 500 + "1", 0), join(store, "x" * 500 + "2", 1)

    assert first.number != second.number


def test_main_threads_in_different_collectives_are_a_mismatch() -> None:
    store = HashStore()
    mine = join(store, "a", 0, size=3)
    join(store, "b", 1, size=3)

    # Rank 2 may still join either.
    assert read_mismatches(store, mine, [1, 2], rank=0) == []
    join(store, "b", 2, size=3)
    found = read_mismatches(store, mine, [1, 2], rank=0)

    assert [(failure.rank, failure.type_name) for failure in found] == [(1, "StepMismatch"), (2, "StepMismatch")]
    assert found[0].message == "is in 'b' while rank 0 is in 'a'; all ranks must pass the same name"


def test_after_a_mismatch_the_next_calls_of_all_ranks_meet() -> None:
    store = HashStore()
    mine, other = join(store, "a", 0), join(store, "b", 1)

    assert withdraw_mismatched(store, mine, [1], rank=0) == {1: CallId(BASE, other.number, "b")}

    assert join(store, "a", 1).number == join(store, "a", 0).number
    assert join(store, "b", 0).number == join(store, "b", 1).number


@pytest.mark.parametrize("how", ["thread", "other thread", "left", "joined"])
def test_a_rank_that_may_still_join_is_no_mismatch(how: str) -> None:
    store = HashStore()
    mine = join(store, "a", 0, size=3, is_main=how != "thread")
    other = join(store, "b", 1, size=3, is_main=how != "other thread")
    if how == "left":
        store.set(f"{other.prefix}life/1", "closed")
    if how == "joined":  # by another thread of this rank
        join(store, "b", 0, size=3, is_main=False)

    assert read_mismatches(store, mine, [1], rank=0) == []
