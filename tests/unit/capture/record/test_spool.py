"""Recording while the store fails or the queue is full: training continues, and the user is warned once."""

from __future__ import annotations

import warnings
from itertools import count

import pytest
import torch

from holdfast.capture.record.observer import RecordingWarning
from holdfast.capture.record.options import LevelName
from holdfast.capture.record.spool import Copy, Spool
from holdfast.capture.stored.runs import read_run
from holdfast.capture.stored.segments import iter_segments
from holdfast.errors import StoreError, StoreFull
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import MANIFESTS
from holdfast.repo.handle.repository import open_repository
from holdfast.tensors.device_digest.deferred import DeferredDigests
from holdfast.testing.faults import Fault, FaultyStore
from tests.faults.hooked_store import HookedStore
from tests.kit.hooking import Hook, hooked
from tests.kit.recorded_training import count_hooks, leave_out_settings, new_repo, new_training, record_steps


@pytest.mark.parametrize("fault", [Fault.NO_SPACE, Fault.FOR_GOOD])
def test_a_store_that_fails_stops_no_training_and_the_user_is_warned_once(fault: Fault) -> None:
    bare = new_training()
    expected = [bare.step() for _ in range(8)]
    training = new_training()
    store = FaultyStore(MemoryStore(), fault=fault, at=40)
    repo = open_repository(store, create=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with training.record(repo, level="full", segment_steps=1) as rec:
            found = []
            for _ in range(8):
                found.append(training.step())
                rec._spool.wait()

    assert torch.equal(torch.stack(found), torch.stack(expected))
    texts = [str(each.message) for each in caught if issubclass(each.category, RecordingWarning)]
    assert len([text for text in texts if "could not be written" in text]) == 1
    assert "recording stopped" in texts[-1]
    assert count_hooks(training.model) == 0


def test_a_store_that_fails_once_loses_tensors_and_no_events() -> None:
    training, inner = new_training(), MemoryStore()
    record_steps(open_repository(inner, create=True), "before", count=1)
    failed: list[str] = []

    def fail_once(name: str, key: str) -> None:
        if not failed and name == "create" and key.startswith(MANIFESTS):
            failed.append(key)
            raise StoreError("on cue", key=key)

    repo = open_repository(HookedStore(inner, before=fail_once))

    with pytest.warns(RecordingWarning, match="only digests and statistics are kept"):
        record_steps(repo, training=training, level="full", segment_steps=1, count=4)

    run = read_run(open_repository(inner), "run")
    assert run.facts.status == "complete"
    assert list(run.steps) == [0, 1, 2, 3]
    counts = [len(run.events(step)) for step in run.steps]
    assert counts[1:] == [counts[1]] * 3
    assert "could not be written" in run.facts.notes[0]
    assert all(event.stats is not None for event in leave_out_settings(run.events(3)))


def test_a_full_queue_raises_if_that_was_asked_for() -> None:
    training = new_training()

    with (
        pytest.raises(StoreFull, match="queue_bytes=200"),
        training.record(new_repo(), level="full", queue_bytes=200, when_full="raise"),
    ):
        training.step()

    assert count_hooks(training.model) == 0


def test_a_full_queue_makes_training_wait_and_nothing_is_lost() -> None:
    run = record_steps(new_repo(), level="full", queue_bytes=200, count=2)

    assert all(event.leaf for step in run.steps for event in leave_out_settings(run.events(step)))
    assert run.facts.notes == ()


def test_a_full_queue_degrades_to_numbers_if_that_was_asked_for() -> None:
    with pytest.warns(RecordingWarning, match="degraded to stats"):
        run = record_steps(new_repo(), level="full", queue_bytes=200, when_full="degrade", count=1)

    events = leave_out_settings(run.events(0))
    assert {bool(event.leaf) for event in events} == {True, False}
    assert all(event.stats is not None for event in events)


def test_a_budget_that_is_used_up_degrades_to_numbers() -> None:
    with pytest.warns(RecordingWarning, match="max_bytes=10000 is used up"):
        run = record_steps(new_repo(), level="full", max_bytes="10kB", count=3)

    kept = [event for step in run.steps for event in run.events(step) if event.leaf]
    assert kept
    assert not [event for event in run.events(2) if event.leaf and event.site.kind == "output"]
    assert "max_bytes" in run.facts.notes[0]


def test_what_was_committed_before_a_crash_is_readable() -> None:
    training, inner = new_training(), MemoryStore()
    recording = training.record(open_repository(inner, create=True), segment_steps=2)
    recording.__enter__()
    for _ in range(5):
        training.step()
    recording._spool.wait()

    run = read_run(open_repository(inner), "run")

    assert run.facts.status == "unfinished"
    assert list(run.steps) == [0, 1, 2]
    recording.__exit__(None, None, None)


def test_a_crash_loses_no_more_steps_than_were_committed_plus_one() -> None:
    training, repo = new_training(), new_repo()
    recording = training.record(repo, segment_steps=8)
    recording.__enter__()
    committed = []
    for _ in range(24):
        training.step()
        recording._spool.wait()
        committed.append(len({step for segment, _ in iter_segments(repo) for step in segment.roots}))

    # A step ends when the next one begins.
    lost = [ended - kept for ended, kept in enumerate(committed)]
    assert all(steps <= kept and steps < 8 for steps, kept in zip(lost, committed, strict=True))
    recording.__exit__(None, None, None)


@pytest.mark.parametrize("level", ["stats", "full"])
def test_an_equal_run_is_stored_once_however_fast_the_clock_runs(
    level: LevelName, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = new_repo()
    added = []
    for name, seconds in (("first", 0.001), ("second", 25.0)):
        ticks = count(step=seconds)
        monkeypatch.setattr("holdfast.capture.record.spool.time.monotonic", ticks.__next__)
        training = new_training()
        with training.record(repo, name, level=level) as rec:
            for _ in range(24):
                training.step()
        added.append(rec.new_bytes)

    segments = {
        name: [segment.roots.keys() for segment, _ in iter_segments(repo, name)] for name in ("first", "second")
    }
    assert sorted(map(sorted, segments["first"])) == sorted(map(sorted, segments["second"]))
    # A manifest lists its tensors, and is not shared.
    limit = added[0] / 10 if level == "full" else 1024 * len(segments["second"])
    assert added[1] < limit


def test_where_segments_end_does_not_depend_on_how_far_the_writer_is(hook: Hook) -> None:
    def find_digests() -> list[bytes]:
        repo = new_repo()
        training = new_training()
        with training.record(repo, level="full", queue_bytes=4000):
            for _ in range(3):
                training.step()
        found = sorted(iter_segments(repo, "run"), key=lambda each: each[0].number)
        return [record.digest for _, record in found]

    behind = find_digests()
    add_copy = Spool.add_copy

    def wait_first(spool: Spool, copy: Copy) -> str:
        spool.wait()
        return add_copy(spool, copy)

    hook(Spool, "add_copy", wait_first)
    ahead = find_digests()

    assert len(behind) > 4
    assert ahead == behind


def test_an_error_of_a_device_that_is_asked_for_digests_is_a_note() -> None:
    def fail(self: DeferredDigests) -> None:
        raise RuntimeError("the device is lost")

    training, repo = new_training(), new_repo()
    with training.record(repo, segment_steps=1) as rec:
        training.step()
        with hooked(DeferredDigests, "collect", fail):
            with pytest.warns(RecordingWarning, match="a device computed no digests.*RuntimeError: the device is lost"):
                rec.flush()
        training.step()
        training.step()

    run = read_run(repo, "run")
    assert list(run.steps) == [0, 1, 2]
    assert ["the device is lost" in note for note in run.facts.notes] == [True]
