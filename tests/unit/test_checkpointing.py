"""The checkpoint manager in one process: when it saves, what it keeps, how it resumes and stops."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import checkpointing
from holdfast.checkpointing import CheckpointManager, load_first_intact, parse_seconds
from holdfast.errors import Corrupt, StoreError
from tests.kit.damaged_packs import damaging_new_packs
from tests.kit.hooking import Hook


@pytest.fixture
def store(tmp_path: Path) -> Iterator[holdfast.Store]:
    with holdfast.open(tmp_path / "store") as opened:
        yield opened


class Clock:
    """Stands in for the clock of the manager."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((4,), float(value)), "step": int(value)}


def names(store: holdfast.Store) -> list[str]:
    return [snapshot.name for snapshot in store.snapshots()]


def train(manager: CheckpointManager, *steps: int, **more: Any) -> list[int]:
    """Run steps and return those that were saved."""
    with manager:
        return [step for step in steps if manager.step(step, state(step), **more)]


def test_steps_that_are_due_are_saved(store: holdfast.Store) -> None:
    assert train(store.manager("run/", every=3), *range(1, 8)) == [3, 6]

    assert names(store) == ["run/step-3", "run/step-6"]
    assert store.load("run/step-6")["w"].tolist() == [6.0] * 4
    assert store.snapshot("run/step-6").metadata == {"step": 6}


def test_a_state_that_is_made_by_a_function_is_made_only_if_it_is_saved(store: holdfast.Store) -> None:
    made = []

    def make() -> object:
        made.append(1)
        return state()

    with store.manager("run/", every=2) as manager:
        for step in range(1, 5):
            manager.step(step, make)

    assert len(made) == 2


def test_a_module_is_a_state_although_it_can_be_called(store: holdfast.Store) -> None:
    with store.manager("run/", every=1) as manager:
        manager.step(1, torch.nn.Linear(2, 2))

    assert set(store.load("run/step-1")) == {"weight", "bias"}


def test_old_checkpoints_are_deleted_and_their_space_is_freed(store: holdfast.Store) -> None:
    manager = store.manager("run/", every=1, keep_last=2, keep_every=4)
    store.save("other", state())

    train(manager, *range(1, 8))

    assert names(store) == ["other", "run/step-4", "run/step-6", "run/step-7"]
    assert store.gc().freed_bytes == 0, "there is nothing left to free"


def test_the_best_by_a_metric_are_kept_and_so_is_the_newest(store: holdfast.Store) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: 9.0}
    with store.manager("run/", every=1, keep_best=("loss", 2)) as manager:
        for step, loss in losses.items():
            manager.step(step, state(step), metrics={"loss": loss})

    assert names(store) == ["run/step-2", "run/step-3", "run/step-5"]
    assert store.snapshot("run/step-3").metadata == {"step": 3, "metrics": {"loss": 2.0}}


def test_nothing_is_deleted_before_a_checkpoint_has_the_metric(store: holdfast.Store) -> None:
    with store.manager("run/", every=1, keep_best=("loss", 1)) as manager:
        for step in (1, 2):
            manager.step(step, state(step))
        manager.wait()
        before = names(store)
        manager.step(3, state(3), metrics={"loss": 1.0})

    assert before == ["run/step-1", "run/step-2"]
    assert names(store) == ["run/step-3"]


def test_nothing_is_deleted_while_the_metric_is_not_a_number(store: holdfast.Store) -> None:
    train(store.manager("run/", every=1, keep_best=("loss", 1)), 1, 2, metrics={"loss": float("nan")})

    assert names(store) == ["run/step-1", "run/step-2"]


def test_snapshots_that_the_manager_did_not_save_are_neither_deleted_nor_counted(store: holdfast.Store) -> None:
    foreign = ["run/final", "run/eval/step-9", "run/step-2-export"]
    for name in foreign:
        store.save(name, state(), metadata={"step": 9})

    with store.manager("run/", every=1, keep_last=2) as manager:
        for step in (1, 2, 3):
            manager.step(step, state(step))
            manager.wait()

    assert sorted(names(store)) == sorted([*foreign, "run/step-2", "run/step-3"])


def test_snapshots_that_the_manager_did_not_save_are_not_resumed(store: holdfast.Store) -> None:
    train(store.manager("run/", every=1), 4)
    store.save("run/eval/step-9", state(9), metadata={"step": 9})
    store.save("run/final", state(10), metadata={"step": 10})

    assert store.manager("run/", stop_signals=()).resume(state()) == 4


def test_a_metric_that_is_not_a_number_is_stored_as_text(store: holdfast.Store) -> None:
    train(store.manager("run/", every=1), 1, metrics={"loss": torch.tensor(float("nan"))}, metadata={"note": "x"})

    assert store.snapshot("run/step-1").metadata == {"step": 1, "metrics": {"loss": "nan"}, "note": "x"}


def test_nothing_is_deleted_before_the_new_checkpoint_is_durable(store: holdfast.Store, hook: Hook) -> None:
    manager = store.manager("run/", every=1, keep_last=1)
    manager.step(1, state(1))
    manager.wait()
    hook(type(store), "save_async", _refuse)

    with pytest.raises(StoreError, match="the disk is full"):
        manager.step(2, state(2))

    manager.close()
    assert names(store) == ["run/step-1"]


def _refuse(*_: object, **__: object) -> None:
    raise StoreError("the disk is full")


def test_a_save_that_failed_in_the_background_is_raised_at_the_next_one(store: holdfast.Store, hook: Hook) -> None:
    manager = store.manager("run/", every=1, keep_last=1)
    hook(checkpointing, "apply_prune", _refuse)
    manager.step(1, state(1))

    with pytest.raises(StoreError, match="the disk is full"):
        manager.step(2, state(2))
    manager.step(3, state(3))
    with pytest.raises(StoreError, match="the disk is full"):
        manager.close()


def test_resume_loads_the_newest_and_returns_its_step(store: holdfast.Store) -> None:
    train(store.manager("run/", every=2), *range(1, 6))
    target = state()

    assert store.manager("run/", stop_signals=()).resume(target) == 4
    assert target["w"].tolist() == [4.0] * 4


def test_the_text_of_a_manager_says_where_it_resumed(store: holdfast.Store) -> None:
    train(store.manager("run/", every=2), *range(1, 6))
    manager = store.manager("run/", every=2, stop_signals=())

    manager.resume(state())

    assert repr(manager) == "<CheckpointManager 'run/': resumed at step 4, nothing saved yet; saves every 2 steps>"


def test_resume_without_a_checkpoint_returns_none_and_changes_nothing(store: holdfast.Store) -> None:
    store.save("run/notes", {"text": "not a checkpoint"})
    store.save("run2/step-1", state(1))
    target = state(7)

    assert store.manager("run/", stop_signals=()).resume(target) is None
    assert target["w"].tolist() == [7.0] * 4


def test_a_run_that_went_back_resumes_where_it_was_last(store: holdfast.Store) -> None:
    train(store.manager("run/", every=1), 1, 2, 3)
    train(store.manager("run/", every=1), 2)

    assert store.manager("run/", stop_signals=()).resume(state()) == 2


def test_a_damaged_checkpoint_is_skipped_with_a_warning(store: holdfast.Store, tmp_path: Path) -> None:
    train(store.manager("run/", every=1, async_=False), 1)
    with damaging_new_packs(tmp_path / "store"), store.manager("run/", every=1, async_=False) as manager:
        manager.step(2, {"w": torch.randn(4), "big": torch.randn(5000), "step": 2})
    target = {**state(), "big": torch.zeros(5000)}

    with pytest.warns(UserWarning, match=r"'run/step-2' cannot be loaded, trying the one before: "):
        assert store.manager("run/", stop_signals=()).resume(target, strict=False) == 1
    store.delete("run/step-1")
    with pytest.raises(Corrupt), pytest.warns(UserWarning, match="run/step-2"):
        store.manager("run/", stop_signals=()).resume(target, strict=False)


def test_an_error_after_a_load_is_raised_and_not_taken_for_damage(store: holdfast.Store) -> None:
    train(store.manager("run/", every=1), 1, 2)
    tried = []

    def fail(snapshot: holdfast.Snapshot) -> None:
        tried.append(snapshot.name)
        raise Corrupt("of something else")

    with pytest.raises(Corrupt, match="of something else"):
        load_first_intact(store.snapshots("run/"), fail, may_go_on=lambda: False)

    assert tried == ["run/step-1"]


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_at_the_next_step_and_stops(store: holdfast.Store, kind: signal.Signals) -> None:
    before = signal.getsignal(kind)
    with store.manager("run/", every=100, keep_last=1) as manager:
        assert not manager.step(1, state(1))
        signal.raise_signal(kind)
        assert manager.stop_reason == ""
        assert manager.step(2, state(2))
        assert manager.should_stop
        assert manager.stop_reason == kind.name
        assert names(store) == ["run/step-2"], "it is durable when the step returns"
        assert not manager.step(3, state(3)), "it has been saved"
        assert repr(manager) == (
            f"<CheckpointManager 'run/': last saved step 2 ({kind.name}); saves every 100 steps, stopping: {kind.name}>"
        )
    assert signal.getsignal(kind) is before


def test_a_second_ctrl_c_interrupts_at_once(store: holdfast.Store) -> None:
    with store.manager("run/", every=100):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_signals_can_be_left_alone(store: holdfast.Store) -> None:
    before = signal.getsignal(signal.SIGINT)
    with store.manager("run/", every=1, stop_signals=()):
        assert signal.getsignal(signal.SIGINT) is before


def test_a_manager_in_another_thread_leaves_signals_alone(store: holdfast.Store) -> None:
    saved: list[list[int]] = []
    thread = threading.Thread(target=lambda: saved.append(train(store.manager("run/", every=1), 1)))
    thread.start()
    thread.join()

    assert saved == [[1]]


def test_a_wall_clock_budget_saves_and_stops(store: holdfast.Store, clock: Clock) -> None:
    with store.manager("run/", stop_after="3h50m") as manager:
        assert not manager.step(1, state(1))
        clock.now_s += 3 * 3600 + 50 * 60 - 1
        assert not manager.step(2, state(2))
        clock.now_s += 1
        assert manager.step(3, state(3))
        assert manager.stop_reason == "the time is up"
        assert not manager.step(4, state(4))


def test_saves_can_be_due_by_time(store: holdfast.Store, clock: Clock) -> None:
    with store.manager("run/", every_seconds=timedelta(minutes=10)) as manager:
        saved = []
        for step in range(1, 30):
            clock.now_s += 60
            if manager.step(step, state(step)):
                saved.append(step)
    assert saved == [10, 20]


def test_a_step_can_be_saved_by_force(store: holdfast.Store) -> None:
    assert train(store.manager("run/", every=100), 7, force=True) == [7]


def test_an_error_of_the_loop_is_not_hidden_by_one_of_the_save(store: holdfast.Store, hook: Hook) -> None:
    hook(checkpointing, "apply_prune", _refuse)

    def fail() -> None:
        with store.manager("run/", every=1, keep_last=1) as manager:
            manager.step(1, state(1))
            raise ZeroDivisionError

    with pytest.warns(UserWarning, match="a checkpoint was not saved"), pytest.raises(ZeroDivisionError):
        fail()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "every= is a number of steps"),
        ({"keep_last": -1}, "cannot be negative"),
        ({"keep_best": ("loss", 0)}, "at least one"),
        ({"stop_after": "soon"}, "'soon' is not a duration"),
        ({"stop_after": ""}, "'' is not a duration"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_the_first_step(
    store: holdfast.Store, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        store.manager("run/", **options)


def test_a_prefix_ends_with_a_slash(store: holdfast.Store) -> None:
    with pytest.raises(ValueError, match="ends with a slash: 'run/', not 'run'"):
        store.manager("run")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3h50m", 13800), ("90m", 5400), ("45s", 45), ("1d2h3m4s", 93784), (2.5, 2.5), (timedelta(hours=1), 3600)],
)
def test_a_duration_is_a_number_a_timedelta_or_a_text(value: float | str | timedelta, seconds: float) -> None:
    assert parse_seconds(value) == seconds
