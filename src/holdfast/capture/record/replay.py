"""Replay: run a live module on the recorded inputs of a call, and compare its results with the recorded ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch.func import functional_call

from holdfast.capture.compare.measure import TensorDistance, measure
from holdfast.capture.record.forms import build_arguments, iter_paths
from holdfast.capture.stored.events import Event, EventKind
from holdfast.capture.stored.runs import Run
from holdfast.errors import NotFound
from holdfast.snapshot.call import Call
from holdfast.trees.move import cast_floating, move_to_device


class ReplayOptions(TypedDict, total=False):
    """The keyword options of `replay`."""

    dtype: torch.dtype | None
    """Cast floating-point arguments, parameters and buffers to this dtype; float64 gives a reference result."""
    device: torch.device | str | None
    call: int
    """Which call of the module in that step, from 0."""
    rank: int
    weights: Literal["recorded", "live"]
    """Use the parameters and buffers recorded in that step, as far as they were kept, or the current ones."""


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


def replay(run: Run, module: torch.nn.Module, fqn: str, step: int, **options: Unpack[ReplayOptions]) -> Replayed:
    """Run a module on the inputs of a recorded call, and compare the results.

    Neither the module nor the RNG state changes. Raises NotFound if the inputs were not recorded at level "full".
    """
    rank, number = options.get("rank", run.ranks[0] if run.ranks else 0), options.get("call", 0)
    events = run.events(step, rank)
    inputs = _find_events(events, "input", fqn, number)
    form = next((event.form for event in inputs if event.form), "")
    if not form:
        raise NotFound(
            f"run {run.facts.name!r} did not keep the inputs of call {number} of {fqn or 'the model'!r} in step {step};"
            f" record with level={{{fqn or '*'!r}: 'full', '*': 'digest'}} to replay it",
            name=fqn,
        )
    args, kwargs = build_arguments(form, {event.site.path: run.read_tensor(event) for event in inputs})
    weights = {} if options.get("weights") == "live" else _read_weights(run, events, fqn)
    result = _run(module, Call(*args, **kwargs), weights, dtype=options.get("dtype"), device=options.get("device"))
    recorded = {event.site.path: event for event in _find_events(events, "output", fqn, number)}
    found = dict(iter_paths(result))
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


def _run(
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
