"""Settings of a step as recorded: attributes of modules, which parameters are trained or tied, and optimizers.

Their event has the settings as JSON in `form`, so they are known at every level.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from holdfast.capture.stored.events import Event
from holdfast.errors import Corrupt
from holdfast.json_text import Json

_KEPT: Final = 64
"""Number of decoded texts to cache: most steps have the settings of the step before."""


@dataclass(frozen=True, slots=True)
class ParameterSettings:
    """What an optimizer does with a parameter."""

    requires_grad: bool
    group: str
    """Its parameter group: "0", or "1.0" for the first group of the second of several optimizers; "" if in none."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The class and the settings of an optimizer."""

    class_name: str
    groups: tuple[Mapping[str, Json], ...]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of one step of one rank; empty if none were recorded."""

    modules: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    """By name of the module, its class, its mode and its plain attributes."""
    parameters: Mapping[str, ParameterSettings] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    """Other names of a parameter, and the name under which it is recorded."""
    optimizers: Mapping[str, OptimizerSettings] = field(default_factory=dict)
    """By number, "0", "1"; "" if there is only one."""


def encode_model(
    modules: Mapping[str, Mapping[str, Json]], parameters: Mapping[str, ParameterSettings], tied: Mapping[str, str]
) -> str:
    """Return the settings of a model as text."""
    flags = {name: [each.requires_grad, each.group] for name, each in parameters.items()}
    return json.dumps({"modules": modules, "parameters": flags, "tied": tied}, separators=(",", ":"))


def encode_optimizer(settings: OptimizerSettings) -> str:
    """Return the settings of an optimizer as text."""
    return json.dumps({"class": settings.class_name, "groups": settings.groups}, separators=(",", ":"))


def is_settings(event: Event) -> bool:
    """Return whether an event is settings, which explain differences and are not compared like tensors."""
    return event.site.kind == "setting"


def keep_shared(ours: Sequence[Event], theirs: Sequence[Event]) -> tuple[Sequence[Event], Sequence[Event]]:
    """Leave out gradients during the backward pass if only one run has any: earlier versions did not record them."""
    if any(map(_is_during_backward, ours)) == any(map(_is_during_backward, theirs)):
        return ours, theirs
    first, second = ([event for event in side if not _is_during_backward(event)] for side in (ours, theirs))
    return first, second


def _is_during_backward(event: Event) -> bool:
    return event.site.kind == "param_grad" and event.site.path.startswith("#")


def read_settings(events: Iterable[Event]) -> StepSettings:
    """Return the settings among the events of a step; raises Corrupt if their text is invalid."""
    found: dict[str, Any] = {}
    optimizers: dict[str, OptimizerSettings] = {}
    for event in events:
        if event.site.kind != "setting":
            continue
        try:
            if event.site.phase == "optimizer":
                optimizers[event.site.path] = _decode_optimizer(event.form)
            else:
                found = _decode_model(event.form)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"the settings of step {event.site.step} are invalid: {error!r}") from error
    return StepSettings(**found, optimizers=optimizers)


@lru_cache(maxsize=_KEPT)
def _decode_model(text: str) -> dict[str, Any]:
    found = json.loads(text)
    parameters = {name: ParameterSettings(*flags) for name, flags in found["parameters"].items()}
    return {"modules": dict(found["modules"]), "parameters": parameters, "tied": dict(found["tied"])}


@lru_cache(maxsize=_KEPT)
def _decode_optimizer(text: str) -> OptimizerSettings:
    found = json.loads(text)
    return OptimizerSettings(found["class"], tuple(dict(group) for group in found["groups"]))
