"""Run code again: a module on the recorded inputs of a call, or a step with and without recording."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.func import functional_call

from holdfast.capture.compare.measure import TensorDistance, measure
from holdfast.capture.record.points import build_arguments, list_paths
from holdfast.capture.stored.events import Event, EventKind
from holdfast.capture.stored.observed import observe
from holdfast.capture.stored.runs import Run
from holdfast.digest import fingerprint
from holdfast.errors import NotFound
from holdfast.snapshot.call import Call
from holdfast.snapshot.into.undo import restore_optimizer
from holdfast.snapshot.resume import RngState
from holdfast.tensors.device_digest.deferred import DeferredDigests, can_defer
from holdfast.trees.apply import cast_floating, move_to_device

Weights = Literal["recorded", "live"]
"""The parameters and buffers recorded in a step, as far as they were kept, or the current ones."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replayed call, and its difference from the recorded one."""

    fqn: str
    step: int
    result: Any
    measures: dict[str, TensorDistance]
    """By path in the results, the difference from the recorded tensor; only for tensors recorded at level "full"."""
    unmatched: tuple[str, ...] = ()
    """Paths that only one of the two results has, or whose bytes were not kept."""

    @property
    def is_close(self) -> bool:
        """Whether every result could be compared and is within the tolerance of its dtype."""
        return bool(self.measures) and not self.unmatched and all(each.is_close for each in self.measures.values())

    @property
    def max_abs(self) -> float:
        """The largest absolute difference; NaN if nothing could be compared."""
        found = [each.max_abs for each in self.measures.values() if each.max_abs is not None]
        return max(found, default=float("nan"))


def replay(
    run: Run,
    module: torch.nn.Module,
    fqn: str,
    step: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    call: int = 0,
    rank: int | None = None,
    weights: Weights = "recorded",
) -> Replayed:
    """Run a module on the inputs of a recorded call, and compare the results.

    Neither the module nor the RNG state changes. Raises NotFound if the inputs were not recorded at level "full".

    Args:
        run: the recorded run.
        module: the module to run.
        fqn: its name in the recorded model.
        step: the recorded step.
        dtype: cast floating-point arguments, parameters and buffers to this dtype; float64 gives a reference result.
        device: run on this device.
        call: which call of the module in that step, from 0.
        rank: the rank that recorded the call; by default the first.
        weights: use the parameters and buffers that were "recorded" in that step, or the current ones ("live").
    """
    if rank is None:
        rank = run.ranks[0] if run.ranks else 0
    events = run.events(step, rank)
    inputs = _find_events(events, "input", fqn, call)
    form = next((event.form for event in inputs if event.form), "")
    if not form:
        raise NotFound(
            f"run {run.facts.name!r} did not keep the inputs of call {call} of {fqn or 'the model'!r} in step {step};"
            f" record with level={{{fqn or '*'!r}: 'full', '*': 'digest'}} to replay it",
            name=fqn,
        )
    args, kwargs = build_arguments(form, {event.site.path: run.read_tensor(event) for event in inputs})
    kept_weights = {} if weights == "live" else _read_weights(run, events, fqn)
    result = _run_module(module, Call(*args, **kwargs), kept_weights, dtype=dtype, device=device)
    recorded = {event.site.path: event for event in _find_events(events, "output", fqn, call)}
    found = dict(list_paths(result))
    kept = [path for path, event in recorded.items() if path in found and event.leaf]
    measures = {path: measure(run.read_tensor(recorded[path]), found[path]) for path in kept}
    unmatched = sorted((recorded.keys() | found.keys()) - measures.keys())
    return Replayed(fqn, step, result, measures, tuple(unmatched))


def _find_events(events: Iterable[Event], kind: EventKind, fqn: str, number: int) -> list[Event]:
    return [
        event
        for event in events
        if (event.site.kind, event.site.fqn, event.site.call) == (kind, fqn, number) and not event.recompute
    ]


def _read_weights(run: Run, events: Iterable[Event], fqn: str) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers at the start of the step, as far as their bytes were kept."""
    prefix = f"{fqn}." if fqn else ""
    return {
        event.site.fqn.removeprefix(prefix): run.read_tensor(event)
        for event in events
        if event.site.kind in ("parameter", "buffer") and event.site.phase == "forward" and event.leaf
        if event.site.fqn.startswith(prefix)
    }


def _run_module(
    module: torch.nn.Module,
    call: Call,
    weights: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Any:
    state: dict[str, torch.Tensor] = {name: parameter.detach() for name, parameter in module.named_parameters()}
    # A call may write to buffers, so it gets copies.
    state |= {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    state |= {name: tensor for name, tensor in weights.items() if name in state}
    state = cast_floating(state, dtype)
    if device is not None:
        state = move_to_device(state, device)
    with torch.no_grad(), torch.random.fork_rng():
        return call.run(
            lambda *args, **kwargs: functional_call(module, state, args, kwargs), device=device, dtype=dtype
        )


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
    state = _StepState(model, optimizers)
    try:
        bare = _run_step(function, state, nullcontext())
        again = _run_step(function, state, nullcontext())
        recorded = _run_step(function, state, recording())
    finally:
        state.restore()
    names = sorted(bare.keys() | recorded.keys())
    differences = tuple(name for name in names if bare.get(name) != recorded.get(name))
    return Checked(bare == again, differences)


def _run_step(
    function: Callable[[], object], state: _StepState, context: AbstractContextManager[object]
) -> dict[str, bytes]:
    state.restore()
    with context:
        result = function()
    return {**hash_all({f"result{path}": tensor for path, tensor in list_paths(result)}), **state.describe()}


def hash_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return a digest of each tensor, computed where it is."""
    deferred = DeferredDigests()
    found: dict[str, bytes | int] = {
        name: deferred.queue(tensor) if can_defer(tensor.device) else observe(tensor.detach()).digest()
        for name, tensor in tensors.items()
    }
    digests = deferred.collect().wait()
    return {name: digests[each] if isinstance(each, int) else each for name, each in found.items()}


class _StepState:
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
        """Restore parameters, buffers, gradients, optimizers and RNG state."""
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
        """Return a digest of each tensor and of the RNG state, by name."""
        found = {f"parameter or buffer {name}": tensor for name, tensor in self._iter_tensors()}
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
        for number, optimizer in enumerate(self._optimizers):
            for path, tensor in list_paths(optimizer.state_dict()["state"]):
                found[f"state of optimizer {number}{path}"] = tensor
        generators = fingerprint(repr(self._generators.state_dict()).encode())
        return {**hash_all(found), "random generators": generators}
