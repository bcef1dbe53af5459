"""The observer: errors of the recorder and tensors without bytes do not stop the training."""

from __future__ import annotations

import pytest
import torch

from holdfast.capture.record.observer import RecordingWarning
from holdfast.capture.stored.runs import read_run
from holdfast.errors import StoreError
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import open_repository
from holdfast.testing.faults import Fault, FaultyStore
from tests.kit.hooking import Hook
from tests.kit.recorded_training import count_hooks, new_repo, new_training, pick, record_steps


def test_what_was_asked_to_be_raised_is_raised() -> None:
    training = new_training()
    repo = open_repository(FaultyStore(MemoryStore(), fault=Fault.NO_SPACE, at=20), create=True)

    with pytest.raises(StoreError):
        record_steps(repo, training=training, level="full", segment_steps=1, when_full="raise", count=8)

    assert count_hooks(training.model) == 0


def test_a_bug_of_the_recorder_stops_the_recording_and_not_the_training(hook: Hook) -> None:
    training, repo = new_training(), new_repo()

    with training.record(repo) as rec:
        training.step()
        hook(rec._state, "observe_state", _fail)
        with pytest.warns(RecordingWarning, match="recording stopped at step 1: ValueError: ours"):
            training.step()
        training.step()

    assert list(read_run(repo, "run").steps) == [0]


def _fail() -> None:
    raise ValueError("ours")


def test_a_tensor_that_has_no_bytes_is_left_out_and_named() -> None:
    training, repo = new_training(), new_repo()

    with training.record(repo) as rec:
        with pytest.warns(RecordingWarning, match="log of odd is not recorded"):
            rec.log("odd", torch.eye(2).to_sparse())
        rec.log("even", torch.eye(2))

    assert [event.site.fqn for event in pick(read_run(repo, "run").events(0), "log")] == ["even"]
