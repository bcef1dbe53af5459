"""The headline of a comparison says if a difference is NaN or infinite, and which parameter groups were not clipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from holdfast.capture.compare.compare import diff_runs
from holdfast.capture.compare.measure import recognize_fill
from holdfast.capture.compare.nan import find_nonfinite
from holdfast.capture.record.options import LevelName, make_options
from holdfast.capture.record.recorder import record
from holdfast.capture.stored.observed import observe
from holdfast.capture.stored.runs import Run, read_run
from tests.kit.made_runs import make_event
from tests.kit.recorded_training import new_repo

LEVELS: Final[tuple[LevelName, ...]] = ("digest", "stats", "full")
UNKNOWN: Final = "whether it is NaN or infinite is unknown at level digest"
Change = Callable[[torch.Tensor], torch.Tensor]
Clip = Callable[[torch.optim.Optimizer], object]


class Changed(nn.Module):
    """Passes a tensor on, and changes it or its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self._forward: Change = lambda x: x * 1.0
        self._backward: Change | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self._forward(x)
        if self._backward is not None:
            x.register_hook(self._backward)  # type: ignore[no-untyped-call]  # torch's
        return found


@dataclass(frozen=True)
class Faulty:
    """What a training does."""

    forward: Change = lambda x: x * 1.0
    backward: Change | None = None
    weight: float = 0.5
    clip: Clip = lambda optimizer: None


def put(value: float, *, everywhere: bool = False) -> Change:
    def change(x: torch.Tensor) -> torch.Tensor:
        is_first = torch.arange(x.numel()).reshape(x.shape) == 0
        return torch.where(is_first | everywhere, torch.full_like(x, value), x * 1.0)

    return change


def clip_groups(*numbers: int, together: bool = True, limit: float = 1e-3) -> Clip:
    """Clip the gradients of some parameter groups, to one norm of all of them or to one for each."""

    def clip(optimizer: torch.optim.Optimizer) -> None:
        groups = [optimizer.param_groups[number]["params"] for number in numbers]
        for parameters in [chain(*groups)] if together else groups:
            clip_grad_norm_(parameters, limit)

    return clip


def train(name: str, faulty: Faulty, level: LevelName) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), Changed(), nn.Linear(3, 2), nn.Linear(2, 2))
    changed: Any = model[1]
    changed._forward, changed._backward = faulty.forward, faulty.backward
    with torch.no_grad():
        model.get_parameter("0.weight")[0, 0] = faulty.weight
    groups: Sequence[Iterable[nn.Parameter]] = (model[0].parameters(), model[2].parameters(), model[3].parameters())
    optimizer = torch.optim.SGD([{"params": [*each]} for each in groups], lr=0.1)
    repo = new_repo()
    with record(repo, name, model, optimizer, options=make_options(level=level)):
        model(torch.ones(2, 4)).square().sum().backward()
        faulty.clip(optimizer)
        optimizer.step()
    return read_run(repo, name)


@dataclass(frozen=True)
class Case:
    """A fault, and what the headline says of it at each level."""

    bad: Faulty
    says: Sequence[str]
    """At all levels."""
    digest: str = ""
    values: str = ""
    """At the levels "stats" and "full"."""
    never: Sequence[str] = ()
    good: Faulty = field(default_factory=Faulty)


OUTPUT: Final = "forward, 1: output differs though inputs are equal"
CHANGED: Final = "changed after the backward pass in"
CASES: Final = {
    "NaN in one value": Case(
        Faulty(put(math.nan)), [OUTPUT],
        digest="; whether it is NaN or infinite is unknown at level digest; later, all values of param_grad#1 of ",
        values="; 1 of 6 values are NaN in bad, and none in good",
    ),
    "an infinity in one value": Case(
        Faulty(put(math.inf)), [OUTPUT], digest=UNKNOWN,
        values="; 1 of 6 values are infinite in bad, and none in good",
    ),
    "NaN everywhere": Case(
        Faulty(put(math.nan, everywhere=True)), [OUTPUT],
        digest="; all values are NaN in bad", values="; 6 of 6 values are NaN in bad, and none in good",
    ),
    "minus infinity everywhere": Case(
        Faulty(put(-math.inf, everywhere=True)), [OUTPUT],
        digest="; all values are infinite in bad", values="; 6 of 6 values are infinite in bad, and none in good",
    ),
    "NaN in the first run": Case(
        Faulty(), [OUTPUT], good=Faulty(put(math.nan, everywhere=True)),
        digest="; all values are NaN in good", values="; none of 6 values are NaN in bad, and 6 in good",
    ),
    "NaN in a gradient": Case(
        Faulty(backward=put(math.nan)), ["backward, 0: gradient of 0.bias differs"],
        digest=UNKNOWN, values="; 1 of 3 values are NaN in bad, and none in good",
    ),
    "a NaN weight": Case(
        Faulty(weight=math.nan), ["0.weight: parameter differs by itself"],
        digest=UNKNOWN, values="; 1 of 12 values are NaN in bad, and none in good",
    ),
    "another number": Case(
        Faulty(put(0.25)), [OUTPUT], digest=UNKNOWN, never=["values are NaN", "values are infinite"],
    ),
    "one group is not clipped": Case(
        Faulty(clip=clip_groups(0, 2)),
        [f"those of param_groups.1 are {CHANGED} good and not in bad", "param_groups.1:"],
        good=Faulty(clip=clip_groups(0, 1, 2)), never=["NaN"],
    ),
    "two groups are not clipped": Case(
        Faulty(clip=clip_groups(0)), [f"those of param_groups.1, param_groups.2 are {CHANGED} good and not in bad"],
        good=Faulty(clip=clip_groups(0, 1, 2)), never=["NaN"],
    ),
    "one group is clipped by itself": Case(
        Faulty(clip=clip_groups(2)), [f"those of param_groups.2 are {CHANGED} bad and not in good", "param_groups.2:"],
        never=["NaN"],
    ),
    "one group is clipped to another norm": Case(
        Faulty(clip=clip_groups(0, 1, together=False)),
        [f"those of param_groups.1 are {CHANGED} both, but not in the same way"],
        good=Faulty(clip=lambda optimizer: (clip_groups(0)(optimizer), clip_groups(1, limit=2e-3)(optimizer))),
        never=["NaN"],
    ),
    "all groups are clipped": Case(
        Faulty(clip=clip_groups(0, 1, 2)), [f"{CHANGED} bad and not in good"], never=["param_groups", "NaN"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("title", CASES)
def test_a_headline_says_what_is_known_of_a_fault(title: str, level: LevelName) -> None:
    case = CASES[title]

    result = diff_runs(train("good", case.good, level), train("bad", case.bad, level))

    assert result.origin is not None
    told = "\n".join([result.headline, *result.origin.notes])
    for text in [*case.says, case.digest if level == "digest" else case.values]:
        assert text in (told if text == UNKNOWN else result.headline)
    assert not [text for text in case.never if text in result.headline]
    assert level == "digest" or UNKNOWN not in told


@pytest.mark.parametrize("level", LEVELS)
def test_the_first_nan_is_found_by_a_digest_if_all_values_are_nan(level: LevelName) -> None:
    found = find_nonfinite(train("bad", Faulty(put(math.nan, everywhere=True)), level))

    assert "forward, 1: output is not finite though inputs are finite" in found.headline
    assert ("all values are NaN" if level == "digest" else "6 NaN, 0 infinite") in found.headline


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn]
)
def test_a_tensor_of_one_value_that_is_not_finite_is_known_by_its_digest(dtype: torch.dtype, value: float) -> None:
    for shape in ((), (1,), (3, 5)):
        tensor = torch.full(shape, value).to(dtype)
        event = make_event(0, "x", shape=shape, dtype=str(dtype)[6:], digest=observe(tensor).digest())

        assert recognize_fill(event) == ("NaN" if bool(tensor.float().isnan().all()) else "infinite")
        assert recognize_fill(event._replace(digest=observe(torch.ones(shape).to(dtype)).digest())) == ""
