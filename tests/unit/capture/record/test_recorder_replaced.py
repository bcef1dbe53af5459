"""Two recordings under one name: the older one notices that it was replaced and stops, and no run has steps of both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch

from holdfast.capture.record.observer import RecordingWarning
from holdfast.capture.record.options import make_options
from holdfast.capture.record.recorder import Recorder, record
from holdfast.capture.stored.events import ObservedEvents
from holdfast.capture.stored.observed import observe
from holdfast.capture.stored.runs import iter_runs, read_run
from holdfast.capture.stored.segments import Segment, write_segment
from holdfast.errors import NameInUse, NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import delete_snapshot
from tests.faults.hooked_store import HookedStore
from tests.faults.thinning import THINNED, find_first
from tests.kit.recorded_training import new_repo, pick, record_steps

ACTIONS = ("begin", "seal", "seal", "end")


class Process:
    """A process that records: it logs its number in each step, and commits after every step."""

    def __init__(self, number: int, store: ObjectStore, *, overwrite: bool = True) -> None:
        self.number = number
        self.logged = 0
        self.is_refused = False
        self._store, self._overwrite = store, overwrite
        self.done = 0
        self.recorder: Recorder | None = None

    def act(self) -> None:
        """Do the next thing, if there is one: begin, record a step and commit it, or end."""
        if not self.is_active:
            return
        action = ACTIONS[self.done]
        self.done += 1
        if action == "begin":
            repo = open_repository(self._store, create=True)
            self.recorder = record(repo, "run", torch.nn.Linear(1, 1), options=make_options(overwrite=self._overwrite))
            try:
                self.recorder.__enter__()
            except NameInUse:
                self.is_refused = True
        elif self.is_refused:
            return
        elif action == "seal":
            assert self.recorder is not None
            self.recorder.log("number", float(self.number))
            self.recorder.step()
            self.recorder.flush()
            self.logged += 1
        else:
            assert self.recorder is not None
            self.recorder.__exit__(None, None, None)

    @property
    def is_active(self) -> bool:
        """Whether an action is left."""
        return self.done < len(ACTIONS)

    @property
    def notes(self) -> tuple[str, ...]:
        assert self.recorder is not None
        return self.recorder.notes


def find_shown(store: ObjectStore) -> list[int]:
    """Return which process logged each step of the run that a reader sees."""
    try:
        run = read_run(open_repository(store, create=True), "run")
    except NotFound:
        return []
    events = [event for step in run.steps for event in pick(run.events(step), "log")]
    numbers = {observe(torch.tensor(number, dtype=torch.float64)).digest(): number for number in (1, 2)}
    return [numbers[event.digest] for event in events]


def iter_schedules() -> Iterator[tuple[int, ...]]:
    """Yield every order of the actions of two processes of which the first begins first."""
    for places in combinations(range(2 * len(ACTIONS)), len(ACTIONS)):
        if 0 in places:
            yield tuple(0 if index in places else 1 for index in range(2 * len(ACTIONS)))


def can_notice(schedule: tuple[int, ...]) -> bool:
    """Return whether the older recording commits anything after the newer one has deleted or written segments."""
    begins, first_commit, *_ = (index for index, number in enumerate(schedule) if number == 1)
    has_segments = schedule[:begins].count(0) > 1
    return 0 in schedule[begins if has_segments else first_commit :]


@pytest.mark.parametrize("older_overwrites", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", list(iter_schedules()), ids=lambda each: "".join(map(str, each)))
def test_in_every_order_of_two_recordings_the_newer_one_has_the_name(
    schedule: tuple[int, ...], older_overwrites: bool
) -> None:
    store = MemoryStore()
    older, newer = Process(1, store, overwrite=older_overwrites), Process(2, store, overwrite=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in schedule:
            (older, newer)[index].act()
            assert len(set(find_shown(store))) <= 1, "steps of both are shown as one run"

    assert find_shown(store) == [2] * newer.logged
    (facts,) = iter_runs(open_repository(store))
    assert (facts.status, newer.notes) == ("complete", ())
    expected = int(can_notice(schedule))
    assert len([note for note in older.notes if "another recording" in note]) == len(older.notes) == expected
    assert len([each for each in caught if issubclass(each.category, RecordingWarning)]) == expected


@THINNED
@pytest.mark.parametrize("struck", [0, 1])
def test_a_recording_that_acts_inside_an_action_of_the_other_leaves_one_run(struck: int, step: int) -> None:
    is_whole = step == 1
    for number, others_actions in product(range(len(ACTIONS)) if is_whole else (1,), (1, 2, 4) if is_whole else (2,)):
        at = find_first(number + others_actions, step)
        while strike(struck, number, at, others_actions):
            at += step


def strike(struck: int, number: int, at: int, others_actions: int) -> bool:
    """Let one of two recordings act at one operation of an action of the other; returns whether there was one."""
    inner, operations = MemoryStore(), 0

    def act_inside(name: str, key: str) -> None:
        nonlocal operations
        if is_armed:
            operations += 1
            if operations == at:
                for _ in range(others_actions):
                    other.act()

    is_armed = False
    store = HookedStore(inner, before=act_inside)
    older, newer = (Process(1, store if struck == 0 else inner), Process(2, store if struck == 1 else inner))
    one, other = (older, newer) if struck == 0 else (newer, older)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        if struck == 1:
            older.act()
        for _ in range(number):
            one.act()
        is_armed = True
        one.act()
        is_armed = False
        has_struck = operations >= at
        while older.is_active or newer.is_active:
            assert len(set(find_shown(inner))) <= 1, (struck, number, at, others_actions)
            for process in (older, newer):
                process.act()
    # One that begins while the other is about to begin is older: it deletes nothing of the other.
    winner = older if struck == number == 0 and has_struck else newer
    assert find_shown(inner) == [winner.number] * winner.logged, (struck, number, at, others_actions)
    assert winner.notes == ()
    return has_struck


def test_without_overwrite_the_recording_that_commits_second_stops() -> None:
    store = MemoryStore()
    first, second = (Process(number, store, overwrite=False) for number in (1, 2))

    first.act()
    second.act()
    first.act()
    with pytest.warns(RecordingWarning, match="another recording has written segments under its name"):
        second.act()
    for process in (first, second) * 2:
        process.act()

    assert find_shown(store) == [1] * first.logged
    assert (first.notes, len(second.notes)) == ((), 1)


def test_a_run_that_is_deleted_while_it_is_recorded_is_not_continued() -> None:
    store = MemoryStore()
    process = Process(1, store)
    process.act()
    process.act()
    delete_snapshot(store, "@runs/run/@r0/00000000")

    with pytest.warns(RecordingWarning, match="has deleted its segments"):
        process.act()
    process.act()

    assert find_shown(store) == []


def test_segments_of_a_larger_world_are_replaced_with_the_run() -> None:
    repo = new_repo()
    for rank in range(2):
        write_segment(repo, make_segment(rank, world=2), ObservedEvents(), {})

    run = record_steps(repo, "run", overwrite=True, count=1)

    assert (run.ranks, run.facts.world, run.facts.notes) == ((0,), 1, ())


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "shown"),
    [
        ({"job": "a"}, {"job": "a"}, (0, 1)),
        ({"job": "a"}, {"job": "b"}, (0,)),
        ({"job": "a"}, {"job": ""}, (0, 1)),
        ({"job": ""}, {"job": ""}, (0, 1)),
        ({"job": "", "world": 1}, {"job": "", "world": 2}, (0,)),
        ({"job": "a", "world": 1}, {"job": "", "world": 2}, (0,)),
    ],
)
def test_ranks_of_another_job_are_no_part_of_the_run(
    rank_0: dict[str, Any], rank_1: dict[str, Any], shown: tuple[int, ...]
) -> None:
    repo = new_repo()
    for rank, facts in enumerate((rank_0, rank_1)):
        write_segment(repo, make_segment(rank, **facts), ObservedEvents(), {})

    run = read_run(repo, "run")

    assert run.ranks == shown
    assert any("another recording under this name" in note for note in run.facts.notes) == (len(shown) == 1)


def make_segment(rank: int, *, world: int = 2, job: str = "") -> Segment:
    return Segment("run", rank, 0, world, 1.5 + rank, {}, (), {}, True, recording=f"of rank {rank}", job=job)
