"""Gathering the ranks of a run: shards are assembled, partial values added, replicas taken once."""

from __future__ import annotations

from holdfast.capture.compare.compare import DiffOptions, diff_runs
from holdfast.capture.stored.unshard import gather_run
from tests.kit.made_runs import WEIGHT, Observation, hash_elsewhere, make_tensor_run, sharded_rank
from tests.kit.runs_in_memory import make_run


def test_a_sharded_run_is_compared_with_a_full_one() -> None:
    full = make_tensor_run([("lin.weight", "parameter", WEIGHT)], name="full")
    parts = make_tensor_run(sharded_rank(0), sharded_rank(1), name="sharded")
    wrong = WEIGHT.clone()
    wrong[3, 1] += 1e-6

    assert diff_runs(full, parts).is_equal
    found = diff_runs(full, make_tensor_run(sharded_rank(0), sharded_rank(1, wrong))).origin
    assert found is not None
    assert (found.fqn, found.measure and found.measure.at) == ("lin.weight", (3, 1))


def test_what_is_partial_is_added_up_and_replicas_are_taken_once() -> None:
    place = {"placement": "Partial(sum)", "global_shape": (4, 3)}
    average = {"placement": "Partial(avg)", "global_shape": (4, 3)}
    same = {"placement": "Replicate()", "global_shape": (4, 3), "offsets": (0, 0)}
    ranks: list[list[Observation]] = [
        [("a", "output", WEIGHT, place), ("b", "output", WEIGHT, same), ("c", "output", WEIGHT, average)]
        for _ in range(2)
    ]
    full = make_tensor_run([("a", "output", 2 * WEIGHT), ("b", "output", WEIGHT), ("c", "output", WEIGHT)])

    assert diff_runs(full, make_tensor_run(*ranks)).is_equal


def test_dims_say_how_plain_tensors_are_combined() -> None:
    halves: list[list[Observation]] = [[("lin", "output", half)] for half in WEIGHT.chunk(2)]
    full = make_tensor_run([("lin", "output", WEIGHT)])

    assert diff_runs(full, make_tensor_run(*halves), options=DiffOptions(dims={"lin": 0})).is_equal
    unknown = diff_runs(full, make_tensor_run(*halves, name="split"))
    assert unknown.origin is None
    assert any("name them in dims" in note for note in unknown.notes)
    assert unknown.counts["missing"] == 1


def test_shards_that_do_not_cover_the_whole_are_left_out_with_a_note() -> None:
    run, gathering = gather_run(make_tensor_run(sharded_rank(0), []))

    assert run.events(0) == ()
    assert "their shards do not cover the whole tensor" in gathering.notes[0]


def test_replicas_whose_digests_are_of_different_kinds_are_left_out_with_a_note() -> None:
    ranks: list[list[Observation]] = [[("a", "output", WEIGHT)] for _ in range(2)]
    run = make_tensor_run(*ranks)
    mixed = make_run(run.facts, [hash_elsewhere(event) if event.rank else event for event in run.events(0)])

    whole, gathering = gather_run(mixed)

    assert whole.events(0) == ()
    assert "their digests are of different kinds; record them with hashes='both'" in gathering.notes[0]
