"""Replaying recorded calls, and the proof that recording changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.capture.record.options import make_options
from holdfast.capture.record.recorder import record
from holdfast.capture.record.replay import replay
from holdfast.errors import NotFound
from tests.kit.recorded_training import Block, new_repo, new_training, record_steps


def test_a_replayed_call_gives_what_was_recorded() -> None:
    training = new_training()

    with training.record(new_repo(), level="full") as rec:
        for _ in range(3):
            training.step()
        replayed = rec.replay("layers.1", step=1)

    assert replayed.is_close
    assert replayed.max_abs == 0.0
    assert replayed.unmatched == ()


def test_a_call_is_replayed_more_exactly_as_a_reference() -> None:
    training = new_training()

    with training.record(new_repo(), level="full") as rec:
        training.step()
        replayed = rec.replay("layers.0", step=0, dtype=torch.float64, device="cpu")

    assert replayed.result.dtype == torch.float64
    assert 0 < replayed.max_abs < 1e-5
    assert training.model.get_parameter("layers.0.up.weight").dtype == torch.float32


def test_a_module_whose_weights_have_changed_since_shows_it_if_they_are_asked_for() -> None:
    training = new_training()

    with training.record(new_repo(), level="full") as rec:
        for _ in range(2):
            training.step()
        replayed = rec.replay("layers.0.up", step=0, weights="live")

    assert not replayed.is_close
    assert replayed.max_abs > 1e-3


def test_a_replay_leaves_the_module_the_generators_and_the_recording_alone() -> None:
    training = new_training()

    with training.record(new_repo(), level="full") as rec:
        training.step()
        before = {name: value.clone() for name, value in training.model.state_dict().items()}
        state = torch.get_rng_state()
        rec.replay("", step=0)
        count = len(rec.read().events(0))

    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in training.model.state_dict().items())
    assert count == len(record_steps(new_repo(), count=1).events(0))


def test_a_run_is_replayed_on_another_module() -> None:
    repo = new_repo()
    run = record_steps(repo, level="full", count=1)

    replayed = replay(run, Block(), "layers.0", 0)

    assert replayed.is_close


def test_a_call_that_was_not_recorded_in_full_says_how_to_record_it() -> None:
    run = record_steps(new_repo(), count=1)

    with pytest.raises(NotFound, match=r"inputs of call 0 of 'layers\.0' in step 0; .* level=\{'layers\.0': 'full'"):
        replay(run, nn.Identity(), "layers.0", 0)


def test_a_selfcheck_proves_that_recording_changes_nothing_and_leaves_all_as_it_was() -> None:
    training = new_training()

    with training.record(new_repo(), level="full", drill="layers.0") as rec:
        training.step()
        before = {name: value.clone() for name, value in training.model.state_dict().items()}
        checked = rec.selfcheck(training.step)
        after = training.model.state_dict()
        steps = list(rec.read().steps)

    assert checked.is_unchanged
    assert checked.differences == ()
    assert steps == [0]
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_a_step_that_is_not_repeatable_is_reported() -> None:
    training = new_training()
    counted: list[int] = []

    def step() -> torch.Tensor:
        counted.append(1)
        return training.step() + len(counted)

    with training.record(new_repo()) as rec:
        checked = rec.selfcheck(step)

    assert not checked.is_repeatable
    assert not checked.is_unchanged
    assert checked.differences == ("result",)


def test_a_recording_without_an_optimizer_can_be_replayed() -> None:
    repo, model = new_repo(), nn.Linear(2, 2)

    with record(repo, "run", model, options=make_options(level="full")) as rec:
        model(torch.ones(1, 2))
        rec.step()
        assert rec.replay("", step=0).max_abs == 0.0
