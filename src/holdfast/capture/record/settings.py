"""Reads the settings of a model and its optimizers during a recording: values that no tensor shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from holdfast.capture.record.points import Points
from holdfast.capture.stored.settings import OptimizerSettings, ParameterSettings, encode_model, encode_optimizer
from holdfast.json_text import Json

_PLAIN: Final = (bool, int, float, str, type(None))
_MAX_ITEMS: Final = 16
_MAX_TEXT: Final = 200
_MAX_CHANGES: Final = 8
_MODE: Final = "training"
_IMPLEMENTATION: Final = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Keys of parameter groups that choose how an optimizer computes, not what."""


class SettingsReader:
    """Reads settings as text; the text of a model is encoded again only when a value has changed."""

    def __init__(self, points: Points, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Choose the attributes to read: those that are plain now."""
        self._points = points
        self._optimizers = optimizers
        self._attributes = [
            (fqn, module, tuple(name for name, value in vars(module).items() if _is_setting(name, value)))
            for fqn, module in points.described
        ]
        self._last: tuple[list[list[Json]], object] = ([], None)
        self._changes: Counter[tuple[str, str]] = Counter()
        """By module and attribute, how often its value has changed."""
        self._text = ""

    def read_model(self) -> str:
        """Return the settings of all modules and parameters."""
        groups = {id(parameter): name for name, parameter in self._iter_grouped()}
        parameters = [(each.requires_grad, groups.get(id(each), "")) for each in self._points.parameters.values()]
        values = self._read_values()
        if (values, parameters) != self._last:
            if self._leave_out_counters(values):
                values = self._read_values()
            self._last = (values, parameters)
            self._text = self._encode(values, [ParameterSettings(*flags) for flags in parameters])
        return self._text

    def _read_values(self) -> list[list[Json]]:
        return [
            [type(module).__name__, *(_freeze(vars(module).get(name)) for name in names)]
            for _, module, names in self._attributes
        ]

    def _leave_out_counters(self, values: Sequence[Sequence[Json]]) -> bool:
        """Leave out attributes that change again and again: not settings, and their text would be stored each time."""
        for (fqn, _, names), before, now in zip(self._attributes, self._last[0], values, strict=False):
            pairs = zip(names, before[1:], now[1:], strict=True)
            self._changes.update((fqn, name) for name, first, second in pairs if first != second and name != _MODE)
        counters = {key for key, count in self._changes.items() if count > _MAX_CHANGES}
        for key in counters:
            del self._changes[key]
        self._attributes = [
            (fqn, module, tuple(name for name in names if (fqn, name) not in counters))
            for fqn, module, names in self._attributes
        ]
        return bool(counters)

    def read_optimizer(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the class and the settings of an optimizer."""
        groups = tuple(dict(_iter_group(group)) for group in optimizer.param_groups)
        return encode_optimizer(OptimizerSettings(type(optimizer).__name__, groups))

    def find_number(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the number of an optimizer as text; "" if there is only one."""
        return str(self._optimizers.index(optimizer)) if len(self._optimizers) > 1 else ""

    def _iter_grouped(self) -> Iterator[tuple[str, torch.Tensor]]:
        for optimizer in self._optimizers:
            number = self.find_number(optimizer)
            for index, group in enumerate(optimizer.param_groups):
                name = f"{number}.{index}" if number else str(index)
                yield from ((name, parameter) for parameter in group["params"])

    def _encode(self, values: Sequence[Sequence[Json]], parameters: Sequence[ParameterSettings]) -> str:
        modules: dict[str, Mapping[str, Json]] = {}
        for (fqn, _, names), found in zip(self._attributes, values, strict=True):
            modules[fqn] = dict(zip(("class", *names), found, strict=True))
        return encode_model(
            modules, dict(zip(self._points.parameters, parameters, strict=True)), dict(self._points.tied)
        )


def _is_setting(name: str, value: object) -> bool:
    """Return whether an attribute of a module is a setting: public, and a number, a short text or a few of these."""
    if name.startswith("_"):
        return False
    items = value if isinstance(value, tuple | list) else (value,)
    return len(items) <= _MAX_ITEMS and all(
        type(item) in _PLAIN and (not isinstance(item, str) or len(item) <= _MAX_TEXT) for item in items
    )


def _freeze(value: object) -> Json:
    """Return a value as JSON that does not change later; other values than settings as the name of their class."""
    if type(value) in _PLAIN:
        return value if not isinstance(value, float) or math.isfinite(value) else str(value)
    if isinstance(value, tuple | list):
        return [_freeze(item) for item in value]
    return type(value).__name__


def _iter_group(group: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
    for key, value in group.items():
        if key in _IMPLEMENTATION:
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            yield key, _freeze(value.item())
        elif _is_setting(key, value):
            yield key, _freeze(value)
