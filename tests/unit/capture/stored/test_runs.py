"""Reading runs: a run in a store reads like the same run in memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run, RunFacts, iter_runs, read_run
from holdfast.capture.stored.segments import (
    NO_ROOT,
    Segment,
    advance_root,
    format_leaf,
    write_segment,
)
from holdfast.errors import NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository, open_repository
from tests.kit.runs_in_memory import FULL_EVENT, as_observed, make_output, make_run


@pytest.fixture
def repo() -> Repository:
    return open_repository(MemoryStore(), create=True)


def write_run(
    repo: Repository,
    parts: Sequence[Sequence[Event]],
    *,
    name: str = "run",
    rank: int = 0,
    world: int = 1,
    is_last: bool = True,
    notes: tuple[str, ...] = (),
) -> None:
    roots: dict[int, bytes] = {}
    for number, events in enumerate(parts):
        for event in events:
            ((_, _, facts, *_),) = as_observed([event])
            roots[event.site.step] = advance_root(
                roots.get(event.site.step, NO_ROOT), event.site.step, facts.text, event.digest
            )
        own_roots = {step: roots[step] for step in {event.site.step for event in events}}
        ends = is_last and number == len(parts) - 1
        segment = Segment(name, rank, number, world, 1.5, {"torch": "2"}, notes, own_roots, ends)
        write_segment(repo, segment, as_observed(events), {})


def list_seqs(run: Run, step: int, rank: int | None = None) -> list[int]:
    return [event.seq for event in run.events(step, rank)]


def test_a_run_in_memory_gives_its_events_step_by_step() -> None:
    run = make_run(RunFacts("run"), [make_output(2, step=1), make_output(1), make_output(0)])

    assert run.steps == (0, 1)
    assert list_seqs(run, 0) == [0, 1]
    assert list_seqs(run, 1) == [2]
    assert list_seqs(run, 7) == []


def test_a_run_reads_the_same_from_a_store_as_from_memory(repo: Repository) -> None:
    events = [make_output(0), make_output(1), make_output(2, step=1), FULL_EVENT._replace(leaf="")]
    write_run(repo, [events[:1], events[1:3], events[3:]])

    stored, in_memory = read_run(repo, "run"), make_run(RunFacts("run"), events)

    assert stored.steps == in_memory.steps == (0, 1, 3)
    for step in in_memory.steps:
        assert list(stored.events(step)) == list(in_memory.events(step))
        assert stored.root(step) == in_memory.root(step)
        assert stored.root(step, 0) == in_memory.root(step, 0)


def test_the_root_of_a_step_does_not_depend_on_where_segments_end(repo: Repository) -> None:
    events = [make_output(seq) for seq in range(4)]
    write_run(repo, [events], name="one")
    write_run(repo, [[event] for event in events], name="four")

    assert read_run(repo, "one").root(0) == read_run(repo, "four").root(0)


def test_events_of_all_ranks_come_in_the_order_of_observation(repo: Repository) -> None:
    for rank in (0, 1):
        write_run(repo, [[make_output(0, rank=rank), make_output(1, rank=rank)]], rank=rank, world=2)

    run = read_run(repo, "run")

    assert [(event.seq, event.rank) for event in run.events(0)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert list_seqs(run, 0, 1) == [0, 1]
    assert run.ranks == (0, 1)
    assert run.root(0, 0) == run.root(0, 1) != run.root(0)


def test_what_was_committed_twice_counts_once(repo: Repository) -> None:
    write_run(repo, [[make_output(0), make_output(1)], [make_output(1), make_output(2)]])

    assert list_seqs(read_run(repo, "run"), 0) == [0, 1, 2]


def test_a_run_without_its_last_segment_is_unfinished(repo: Repository) -> None:
    write_run(repo, [[make_output(0)]], name="cut", is_last=False, notes=("the disk is full",))
    write_run(repo, [[make_output(0)]], name="alone", world=2)
    write_run(repo, [[make_output(0)]], name="done")

    facts = {found.name: found for found in iter_runs(repo)}

    assert {name: found.status for name, found in facts.items()} == {
        "alone": "unfinished",
        "cut": "unfinished",
        "done": "complete",
    }
    assert facts["cut"].notes == ("the disk is full",)
    assert facts["done"].environment == {"torch": "2"}


def test_a_run_whose_name_begins_like_another_s_is_not_part_of_it(repo: Repository) -> None:
    write_run(repo, [[make_output(0)]], name="a")
    write_run(repo, [[make_output(1, step=5)]], name="a/b")

    assert read_run(repo, "a").steps == (0,)
    assert [facts.name for facts in iter_runs(repo)] == ["a", "a/b"]


def test_a_missing_run_is_named_with_a_similar_one(repo: Repository) -> None:
    write_run(repo, [[make_output(0)]], name="baseline")

    with pytest.raises(NotFound, match=r"no run 'baselnie' .* did you mean 'baseline'"):
        read_run(repo, "baselnie")


def test_tensors_are_read_from_the_segment_that_keeps_them(repo: Repository) -> None:
    tensor = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3)
    event = make_output(0)._replace(leaf=format_leaf(0, 4))
    segment = Segment("run", 0, 0, 1, 0.0, {}, (), {0: b"root"}, is_last=True)
    write_segment(repo, segment, as_observed([event]), {4: tensor})

    found = read_run(repo, "run").read_tensor(event)

    assert found.dtype == torch.bfloat16
    assert torch.equal(found, tensor)


def test_a_tensor_of_which_only_the_digest_is_kept_says_how_to_record_it() -> None:
    run = make_run(RunFacts("run"), [make_output(0)])

    with pytest.raises(NotFound, match=r"recorded at level digest; record again with level=\{'layers.0': 'full'"):
        run.read_tensor(run.events(0)[0])


def test_a_tensor_whose_segment_is_gone_is_named(repo: Repository) -> None:
    write_run(repo, [[make_output(0)]])

    with pytest.raises(
        NotFound, match=r"segment 9 of rank 0, which contains the output of 'layers\.0', no longer exists"
    ):
        read_run(repo, "run").read_tensor(make_output(0)._replace(leaf=format_leaf(9, 0)))
