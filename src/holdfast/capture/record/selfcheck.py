"""Self-check: run a step with and without recording from the same state, and compare the results bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.capture.record.forms import iter_paths
from holdfast.capture.stored.observed import observe
from holdfast.digest import fingerprint
from holdfast.snapshot.into.restore import restore_optimizer
from holdfast.snapshot.resume import RngState


@dataclass(frozen=True, slots=True)
class Checked:
    """Whether recording changes a step."""

    is_repeatable: bool
    """Whether two runs of the step without recording are equal; if not, the check proves nothing."""
    differences: tuple[str, ...]
    """What recording changed, such as "result[0]", "gradient of layers.0.weight" or "random generators"."""

    @property
    def is_unchanged(self) -> bool:
        """Whether the step is repeatable and recording changed nothing."""
        return self.is_repeatable and not self.differences


def check_step(
    function: Callable[[], object],
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    recording: Callable[[], AbstractContextManager[object]],
) -> Checked:
    """Run a step twice without and once with recording, then restore model, optimizers and RNG state."""
    state = _State(model, optimizers)
    try:
        bare = _run(function, state, nullcontext())
        again = _run(function, state, nullcontext())
        recorded = _run(function, state, recording())
    finally:
        state.restore()
    names = sorted(bare.keys() | recorded.keys())
    differences = tuple(name for name in names if bare.get(name) != recorded.get(name))
    return Checked(bare == again, differences)


def _run(function: Callable[[], object], state: _State, context: AbstractContextManager[object]) -> dict[str, bytes]:
    state.restore()
    with context:
        result = function()
    return {**{f"result{path}": _digest(tensor) for path, tensor in iter_paths(result)}, **state.describe()}


def _digest(tensor: torch.Tensor) -> bytes:
    return observe(tensor.detach()).digest()


class _State:
    """A copy of everything that a step may change."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._generators = RngState()
        self._tensors = {name: tensor.detach().clone() for name, tensor in self._iter_tensors()}
        self._grads = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()
        }
        self._states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        self._random = self._generators.state_dict()

    def _iter_tensors(self) -> Any:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    def restore(self) -> None:
        with torch.no_grad():
            for name, tensor in self._iter_tensors():
                tensor.copy_(self._tensors[name])
            for name, parameter in self._model.named_parameters():
                grad = self._grads[name]
                parameter.grad = None if grad is None else grad.clone()
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            restore_optimizer(optimizer, copy.deepcopy(state))
        self._generators.load_state_dict(self._random)

    def describe(self) -> dict[str, bytes]:
        found = {f"parameter or buffer {name}": _digest(tensor) for name, tensor in self._iter_tensors()}
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = _digest(parameter.grad)
        for number, optimizer in enumerate(self._optimizers):
            for path, tensor in iter_paths(optimizer.state_dict()["state"]):
                found[f"state of optimizer {number}{path}"] = _digest(tensor)
        found["random generators"] = fingerprint(repr(self._generators.state_dict()).encode())
        return found
