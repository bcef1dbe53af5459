"""Recording calls of all shapes: trees, modules called twice, tied weights, calls made again, calls that fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdfast.capture.record.recorder import record
from holdfast.capture.stored.runs import read_run
from tests.kit.recorded_training import Model, new_repo, new_training, pick, record_steps


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Result:
    hidden: torch.Tensor
    more: dict[str, object]


class Nested(nn.Module):
    """Takes and gives trees."""

    def forward(self, x: torch.Tensor, *, mask: dict[str, torch.Tensor], flag: bool = False) -> Result:
        return Result(x * mask["keep"], {"pair": Pair(x, -x), "list": [x + 1, 3], "none": None})


def test_tensors_in_trees_are_named_by_where_they_are() -> None:
    repo, model = new_repo(), Nested()

    with record(repo, "run", model) as rec:
        model(torch.ones(2), mask={"keep": torch.zeros(2)})
        rec.step()

    events = read_run(repo, "run").events(0)
    assert [event.site.path for event in pick(events, "input")] == ["[0]", "['mask']['keep']"]
    assert [event.site.path for event in pick(events, "output")] == [
        ".hidden",
        ".more['pair'].left",
        ".more['pair'].right",
        ".more['list'][0]",
    ]


class Twice(nn.Module):
    """Calls one module twice, under two names, and ties a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.same = self.first
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tied: torch.Tensor = self.tied(self.same(self.first(x)))
        return tied


def test_a_module_that_is_called_twice_has_two_calls_under_its_first_name() -> None:
    run = record_steps(new_repo(), training=new_training(Twice), count=1)

    assert [event.site.call for event in pick(run.events(0), "output", "first")] == [0, 1]
    assert [event.site.call for event in pick(run.events(0), "grad", "first")] == [1, 0]
    assert not pick(run.events(0), "output", "same")


def test_a_tied_parameter_is_recorded_once() -> None:
    events = record_steps(new_repo(), training=new_training(Twice), count=1).events(0)

    forward = [event.site.fqn for event in pick(events, "parameter") if event.site.phase == "forward"]
    assert forward == ["first.weight", "first.bias"]


class Checkpointed(Model):
    """Computes its blocks again in the backward pass."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        normed: torch.Tensor = self.norm(x)
        return normed


class Reentrant(Checkpointed):
    """The same, the old way."""

    use_reentrant = True


@pytest.mark.parametrize("make", [Checkpointed, Reentrant])
def test_what_is_computed_again_for_the_backward_pass_says_so(make: type[nn.Module]) -> None:
    training = new_training(make)
    training.batch.requires_grad_()

    events = record_steps(new_repo(), training=training, count=1).events(0)

    outputs = pick(events, "output", "layers.0.up")
    assert [(event.recompute, event.site.call) for event in outputs] == [(False, 0), (True, 0)]
    assert outputs[0].digest == outputs[1].digest
    assert len(pick(events, "grad", "layers.0.up")) == 1


class Failing(Model):
    """Raises in its first call, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.is_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.is_first:
            self.is_first = False
            raise RuntimeError("as planned")
        normed: torch.Tensor = self.norm(x)
        return normed


def test_a_forward_pass_that_raises_leaves_the_recording_in_order() -> None:
    training, repo = new_training(Failing), new_repo()

    with training.record(repo):
        with pytest.raises(RuntimeError, match="as planned"):
            training.step()
        training.step()

    events = read_run(repo, "run").events(0)
    assert [event.site.call for event in pick(events, "output", "layers.0")] == [0, 1]
    assert [event.site.call for event in pick(events, "output", "")] == [1]
