"""Replicas that differ between ranks are found; shards are not replicas."""

from __future__ import annotations

import json

import torch

from holdfast.capture.compare.compare import diff_runs
from holdfast.capture.compare.rank_diffs import diff_ranks
from tests.kit.made_runs import WEIGHT, Observation, hash_elsewhere, make_tensor_run, sharded_rank
from tests.kit.runs_in_memory import make_run


def one_rank(seed: int = 0, *, weight: torch.Tensor = WEIGHT) -> list[Observation]:
    """Return what a rank of a data-parallel run shows."""
    batch = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
    return [
        ("lin.weight", "parameter", weight),
        ("lin", "input", batch),
        ("lin", "output", batch @ weight.T),
        ("lin.weight", "param_grad", torch.ones(4, 3), {"phase": "backward"}),
        ("lin.weight", "parameter", weight + 1, {"phase": "optimizer"}),
    ]


def test_replicas_that_are_equal_have_no_origin() -> None:
    found = diff_ranks(make_tensor_run(one_rank(1), one_rank(2), one_rank(3)))

    assert found.origin is None
    assert found.checked == 3
    assert found.headline == "run: all 3 replicas of 3 ranks are equal"


def test_a_rank_with_other_parameters_is_named() -> None:
    found = diff_ranks(make_tensor_run(one_rank(1), one_rank(2), one_rank(3, weight=WEIGHT * 2)))

    assert found.origin is not None
    assert (found.origin.fqn, found.origin.site.step, found.origin.site.phase) == ("lin.weight", 0, "forward")
    assert found.origin.groups == ((0, 1), (2,))
    assert found.origin.odd == (2,)
    assert found.headline.startswith("step 0, forward, parameter of lin.weight: rank 2 differs from ranks 0, 1")
    assert found.origin.measure is not None
    assert found.origin.measure.max_abs == 11.0
    json.dumps(found.to_json(), allow_nan=False)


def test_a_gradient_that_was_not_reduced_is_named() -> None:
    other = one_rank(2)
    other[3] = ("lin.weight", "param_grad", torch.zeros(4, 3), {"phase": "backward"})

    found = diff_ranks(make_tensor_run(one_rank(1), other))

    assert found.origin is not None
    assert (found.origin.site.kind, found.origin.site.phase) == ("param_grad", "backward")


def test_results_of_other_batches_may_differ_and_those_of_the_same_may_not() -> None:
    same, odd = one_rank(1), one_rank(1)
    odd[2] = ("lin", "output", torch.zeros(2, 4))

    assert diff_ranks(make_tensor_run(one_rank(1), one_rank(2))).origin is None
    found = diff_ranks(make_tensor_run(same, odd)).origin
    assert found is not None
    assert (found.fqn, found.why) == ("lin", "an output of equal inputs and parameters")


def test_other_random_states_are_noted() -> None:
    ranks: list[list[Observation]] = [[("cpu", "rng", torch.tensor([rank]))] for rank in range(2)]

    found = diff_ranks(make_tensor_run(*ranks))

    assert found.origin is None
    assert found.notes == ("RNG states differ between ranks from step 0 on; that may be intended",)


def test_parts_of_a_sharded_tensor_are_no_replicas_but_the_same_part_twice_is() -> None:
    assert diff_ranks(make_tensor_run(sharded_rank(0), sharded_rank(1))).checked == 0

    found = diff_ranks(make_tensor_run(sharded_rank(0), sharded_rank(1), sharded_rank(1, WEIGHT + 1)))

    assert found.origin is not None
    assert found.origin.groups == ((1,), (2,))


def test_a_rank_with_another_seed_is_named_with_its_rank() -> None:
    def ranks(seed: int) -> list[list[Observation]]:
        random: list[Observation] = [("cpu", "rng", torch.tensor([0])), ("cpu", "rng", torch.tensor([seed]))]
        return [[random[rank], *one_rank(rank if rank == 0 else seed)] for rank in range(2)]

    found = diff_runs(make_tensor_run(*ranks(1), name="good"), make_tensor_run(*ranks(7), name="bad")).origin

    assert found is not None
    assert (found.rank, found.step, found.phase, found.fqn, found.kind) == (1, 0, "forward", "cpu", "rng")
    assert str(found).startswith("step 0, rank 1, forward, cpu: random state differs by itself")


def test_what_ranks_reduce_together_is_passed_on_from_the_rank_that_differs() -> None:
    def ranks(batch: float, grad: float) -> list[list[Observation]]:
        return [
            [
                ("lin", "input", torch.full((2,), batch if rank else 0.0)),
                ("lin", "output", torch.full((2,), batch if rank else 0.0)),
                ("lin", "grad", torch.ones(2), {"phase": "backward"}),
                ("lin.weight", "param_grad", torch.full((2,), grad), {"phase": "backward"}),
            ]
            for rank in range(2)
        ]

    result = diff_runs(make_tensor_run(*ranks(1.0, 1.0)), make_tensor_run(*ranks(2.0, 3.0)))

    assert [(origin.rank, origin.fqn, origin.kind) for origin in result.origins] == [(1, "lin", "input")]


def test_ranks_whose_digests_are_of_different_kinds_are_not_said_to_differ() -> None:
    run = make_tensor_run(one_rank(1), one_rank(2, weight=WEIGHT * 2), one_rank(3))
    mixed = make_run(run.facts, [hash_elsewhere(event) if event.rank == 2 else event for event in run.events(0)])

    found = diff_ranks(mixed)

    assert (found.origin, found.checked) == (None, 0)
    assert found.notes[-1].startswith("3 tensors were not compared: their digests are of different kinds")


def test_ranks_that_all_hash_on_their_devices_are_compared_by_these_digests() -> None:
    run = make_tensor_run(one_rank(1), one_rank(2, weight=WEIGHT * 2))

    found = diff_ranks(make_run(run.facts, map(hash_elsewhere, run.events(0))))

    assert found.origin is not None
    assert found.origin.fqn == "lin.weight"
