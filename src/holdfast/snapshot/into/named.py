"""Modules and optimizers under names that do not depend on wrappers, and objects composed of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch

from holdfast.errors import Mismatch, Unsupported
from holdfast.snapshot.into.restore import restore_optimizer
from holdfast.snapshot.optimizers import AnyOptimizer, is_optimizer_state, unwrap


@runtime_checkable
class Composed(Protocol):
    """An object that is loaded by loading each of its parts."""

    def __holdfast_parts__(self) -> dict[str, Any]:
        """Return the parts by name; a saved plain value is put into this dict."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedModule:
    """A module whose state is saved under other names than its own `state_dict` uses."""

    module: torch.nn.Module
    read: Callable[[], dict[str, Any]]
    """Returns the module's own tensors."""
    write: Callable[[dict[str, Any], bool], None]
    """Loads a state; the flag says whether every key must match."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self.read()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load a state."""
        self.write(state_dict, True)


@dataclass(frozen=True, slots=True, eq=False)
class NamedOptimizer:
    """An optimizer whose state is saved under the names of parameters, not their numbers."""

    optimizer: AnyOptimizer
    """An optimizer, or a wrapper around one."""
    names: Sequence[str]
    """The names of all its parameters, in its order."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; state that the optimizer has not created yet is not included."""
        state = cast(Any, self.optimizer).state_dict()
        if not is_optimizer_state(state):
            raise Unsupported(
                f"the state of a {type(self.optimizer).__name__} does not have the form of torch's optimizers, so it"
                " cannot be saved by parameter name; pass it under a name of its own:"
                " training_state(model, my_optimizer=...)"
            )
        groups = [
            # The optimizer's own list of names contains the prefixes of wrappers.
            {key: value for key, value in group.items() if key != "param_names"}
            | {"params": [self.names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ]
        return {
            "state": {self._name(number): values for number, values in state["state"].items()},
            "param_groups": groups,
        }

    def _name(self, number: object) -> object:
        # Some optimizers keep state for all parameters together, under a key of their own.
        return self.names[number] if isinstance(number, int) else number

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load a state; raises Mismatch if its groups differ."""
        problems = self.find_problems([group["params"] for group in state_dict["param_groups"]])
        if problems:
            text = f"the optimizer cannot take this state over: {'; '.join(problems)}"
            raise Mismatch(text, problems=tuple(problems))
        restore_optimizer(self.optimizer, self.number(state_dict))

    def find_problems(self, groups: Sequence[Sequence[str]]) -> list[str]:
        """Return the differences between saved groups of names and the optimizer's."""
        own_groups = self.list_groups()
        if len(own_groups) != len(groups):
            return [f"{len(own_groups)} parameter groups in the target, {len(groups)} in the snapshot"]
        problems = []
        for number, pair in enumerate(zip(own_groups, groups, strict=True)):
            mine, theirs = map(dict.fromkeys, pair)
            only = [(name, "target") for name in mine if name not in theirs]
            only += [(name, "snapshot") for name in theirs if name not in mine]
            problems += [f"{name} is in group {number} of the {side} only" for name, side in only]
        return problems

    def list_groups(self) -> list[list[str]]:
        """Return the names of the parameters in each group."""
        names = iter(self.names)
        return [[next(names) for _ in group["params"]] for group in unwrap(self.optimizer).param_groups]

    def number(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state keyed by the numbers of parameters."""
        numbers = {name: number for number, name in enumerate(self.names)}
        groups = [
            group | {"params": [numbers[name] for name in names]}
            for group, names in zip(state["param_groups"], self.list_groups(), strict=True)
        ]
        return {
            "state": {numbers.get(key, key): values for key, values in state["state"].items()},
            "param_groups": groups,
        }
