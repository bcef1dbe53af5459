"""A copy of a model that is made while the model is recorded: it works, is not recorded, and has no hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from holdfast.capture.stored.runs import read_run
from tests.kit.recorded_training import new_repo, new_training, pick


def count_hooks(model: nn.Module) -> int:
    names = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_backward_hooks")
    return sum(len(vars(module)[name]) for module in model.modules() for name in names)


@pytest.mark.parametrize("drill", [(), ("layers.0",)])
def test_a_copy_is_not_recorded_and_has_no_hooks(drill: tuple[str, ...]) -> None:
    repo, training = new_repo(), new_training()

    with training.record(repo, drill=drill) as recorder:
        training.step()
        copied = copy.deepcopy(training.model).eval()
        training.model.eval()
        found, expected = copied(training.batch), training.model(training.batch)
        training.model.train()
        recorder.step()

    assert recorder.notes == ()
    assert count_hooks(copied) == 0
    assert torch.equal(found, expected)
    assert [len(pick(read_run(repo, "run").events(step), "output", "layers.0")) for step in (0, 1)] == [1, 1]


@pytest.mark.parametrize("drill", [(), ("layers.0",)])
def test_a_copy_has_parameters_of_its_own(drill: tuple[str, ...]) -> None:
    training = new_training()

    with training.record(new_repo(), drill=drill):
        training.step()
        copied = copy.deepcopy(training.model).eval()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()

    assert not torch.equal(copied(training.batch), training.model.eval()(training.batch))


def test_the_hooks_of_the_user_are_copied() -> None:
    training, called = new_training(), []
    training.model.register_forward_hook(lambda module, args, output: called.append(module))

    with training.record(new_repo()):
        copied = copy.deepcopy(training.model)
        copied(training.batch)

    assert called == [copied]


def test_a_moving_average_can_be_made_and_updated_during_a_recording() -> None:
    repo, training = new_repo(), new_training()

    with training.record(repo) as recorder:
        training.step()
        average = torch.optim.swa_utils.AveragedModel(training.model)
        training.step()
        average.update_parameters(training.model)

    assert recorder.notes == ()
    assert read_run(repo, "run").steps == (0, 1)
