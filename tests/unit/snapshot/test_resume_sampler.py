"""Batches continue where the training loop was, whatever was prefetched and for any number of ranks."""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from holdfast.errors import HoldfastError, Mismatch
from holdfast.snapshot.resume import ResumableSampler, RngState


def run_epoch(sampler: ResumableSampler) -> list[list[int]]:
    """Return the batches of the rest of an epoch, each reported as done."""
    batches = []
    for batch in sampler:
        batches.append(batch)
        sampler.advance()
    return batches


def test_an_epoch_has_every_sample_once() -> None:
    batches = run_epoch(ResumableSampler(10, batch_size=4))

    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(chain.from_iterable(batches)) == list(range(10))


def test_without_shuffling_samples_come_in_order() -> None:
    assert run_epoch(ResumableSampler(5, batch_size=2, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_what_does_not_fill_a_batch_can_be_dropped() -> None:
    sampler = ResumableSampler(5, batch_size=2, shuffle=False, drop_last=True)

    assert len(sampler) == 2
    assert run_epoch(sampler) == [[0, 1], [2, 3]]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = []
    for seed in (0, 1):
        sampler = ResumableSampler(50, batch_size=50, seed=seed)
        orders += [tuple(run_epoch(sampler)[0]) for _ in range(3)]

    assert len(set(orders)) == 6


def test_an_order_is_the_same_in_every_version() -> None:
    sampler = ResumableSampler(8, batch_size=8, seed=7)
    sampler.set_epoch(3)

    assert list(sampler) == [GOLDEN_ORDER]


GOLDEN_ORDER: Final = [0, 5, 4, 2, 6, 3, 7, 1]


def test_shuffling_touches_no_global_generator() -> None:
    before = RngState().state_dict()

    run_epoch(ResumableSampler(10))

    assert RngState().state_dict() == before


def test_after_the_last_batch_the_next_epoch_begins() -> None:
    sampler = ResumableSampler(4, batch_size=2)

    run_epoch(sampler)

    assert (sampler.epoch, sampler.position) == (1, 0)


def test_a_fresh_sampler_goes_on_with_the_next_batch() -> None:
    whole = run_epoch(ResumableSampler(10, batch_size=3))
    stopped = ResumableSampler(10, batch_size=3)
    stopped.advance()
    stopped.advance()

    resumed = ResumableSampler(10, batch_size=3)
    resumed.load_state_dict(stopped.state_dict())

    assert (resumed.epoch, resumed.position) == (0, 2)
    assert run_epoch(resumed) == whole[2:]


def test_setting_the_epoch_under_way_keeps_the_place_in_it() -> None:
    sampler = ResumableSampler(10)
    sampler.advance()

    sampler.set_epoch(0)
    assert sampler.position == 1

    sampler.set_epoch(2)
    assert (sampler.epoch, sampler.position) == (2, 0)


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_split_a_batch_of_all(drop_last: bool) -> None:
    alone = run_epoch(ResumableSampler(22, batch_size=6, drop_last=drop_last))
    ranks = [
        run_epoch(ResumableSampler(22, batch_size=2, drop_last=drop_last, rank=rank, world_size=3)) for rank in range(3)
    ]

    assert len({len(batches) for batches in ranks}) == 1
    for number, batch in enumerate(alone):
        assert {sample for batches in ranks for sample in batches[number]} >= set(batch)


def test_ranks_get_equally_many_samples() -> None:
    shares = [[*chain.from_iterable(run_epoch(ResumableSampler(3, rank=rank, world_size=8)))] for rank in range(8)]

    assert [len(share) for share in shares] == [1] * 8
    assert {share[0] for share in shares} == {0, 1, 2}


def test_a_run_goes_on_with_another_number_of_ranks() -> None:
    alone = run_epoch(ResumableSampler(24, batch_size=4))
    before = ResumableSampler(24, batch_size=4, rank=1, world_size=2)
    before.advance()

    after = ResumableSampler(24, batch_size=4)
    after.load_state_dict(before.state_dict())

    assert run_epoch(after) == alone[2:]


def test_a_rest_that_is_dropped_with_larger_batches_ends_the_epoch() -> None:
    before = ResumableSampler(10, batch_size=2, drop_last=True)
    for _ in range(4):
        before.advance()

    after = ResumableSampler(10, batch_size=4, drop_last=True)
    after.load_state_dict(before.state_dict())

    assert (after.epoch, after.position) == (1, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"length": 11}, "length is 10, the state has 11"),
        ({"seed": 5}, "seed is 0, the state has 5"),
        ({"shuffle": False}, "shuffle is True, the state has False"),
        ({"batch_size": 3}, "3 samples were seen, which is not a multiple of 2"),
        ({"position": -1}, "epoch 0, batch -1 is not a position"),
    ],
)
def test_a_state_of_other_batches_is_refused(change: dict[str, object], reason: str) -> None:
    sampler = ResumableSampler(10, batch_size=2)
    state = {**sampler.state_dict(), "position": 1, **change}

    with pytest.raises(Mismatch, match=reason) as caught:
        sampler.load_state_dict(state)

    assert str(caught.value).endswith("Create it with the saved arguments, or leave its state out and call set_epoch")
    assert (sampler.epoch, sampler.position) == (0, 0)


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(Mismatch, match=r"not the state of a ResumableSampler: KeyError\('epoch'\)"):
        ResumableSampler(1).load_state_dict({"step": 1})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"length": 0}, "0 samples give no batch of 1 on 1 rank"),
        ({"length": 3, "batch_size": 4, "drop_last": True}, "3 samples give no batch of 4"),
        ({"length": 3, "rank": 2, "world_size": 2}, "rank=2"),
        ({"length": 3, "batch_size": 0}, "batch_size=0"),
        ({"length": 3, "seed": -1}, "seed=-1"),
    ],
)
def test_arguments_that_give_no_batches_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ResumableSampler(**arguments)


def test_a_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="epochs count from 0, not -1"):
        ResumableSampler(1).set_epoch(-1)


def test_a_loop_that_never_advances_is_told() -> None:
    sampler = ResumableSampler(4)
    list(sampler)

    with pytest.raises(HoldfastError, match=r"epoch 0 were yielded .* call sampler\.advance\(\) after each step"):
        iter(sampler)

    sampler.set_epoch(0)
    assert len(list(sampler)) == 4


# With a loader


def make_loader(sampler: ResumableSampler, *, num_workers: int = 0) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(24))
    return DataLoader(data, batch_sampler=sampler, num_workers=num_workers, generator=torch.Generator())


def test_prefetched_batches_are_neither_lost_nor_repeated() -> None:
    whole = [batch[0].tolist() for batch in make_loader(ResumableSampler(24, batch_size=2))]
    sampler = ResumableSampler(24, batch_size=2)
    seen = []
    for batch in make_loader(sampler, num_workers=2):
        seen.append(batch[0].tolist())
        sampler.advance()
        if len(seen) == 5:
            break
    state = sampler.state_dict()

    resumed = ResumableSampler(24, batch_size=2)
    resumed.load_state_dict(state)
    seen += [batch[0].tolist() for batch in make_loader(resumed, num_workers=2)]

    assert state["position"] == 5
    assert seen == whole


def test_a_loader_with_a_generator_of_its_own_draws_nothing_from_the_global_one() -> None:
    before = RngState().state_dict()

    iter(make_loader(ResumableSampler(24)))

    assert RngState().state_dict() == before
