"""Recordings of a model of layers in a row, made by hand: no model, no hooks, the same every time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from holdfast.capture.stored.events import Event, EventKind, Phase, Site, Stats
from holdfast.capture.stored.runs import Run, RunFacts
from holdfast.capture.stored.segments import Segment, compute_root, write_segment
from holdfast.repo.handle.repository import Repository
from tests.kit.runs_in_memory import as_observed, make_run

FAULT: Final = (1, "layers.1", "output")
"""The step, the module and the kind of the first tensor that differs in a bad recording."""


@dataclass(frozen=True)
class Recording:
    """What is recorded, and how."""

    name: str
    is_bad: bool = False
    """Whether it differs from the output of the second layer on, in step 1."""
    level: str = "full"
    world: int = 1
    steps: int = 3
    layers: int = 3
    hole: float = 0.0
    """What one value of the fault becomes instead: NaN, say."""
    odd_rank: int = -1
    """Whose weights are not those of the others."""
    first_step: int = 0
    stem: str = "layers"
    """The name of each layer, before its number."""
    notes: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def make_recorded(recording: Recording) -> Run:
    """Return a recording as a run in memory."""
    events: list[Event] = []
    tensors: dict[str, torch.Tensor] = {}
    for rank in range(recording.world):
        made, kept = _make_rank(recording, rank)
        events += made
        tensors |= {f"{rank}/{seq}": tensor for seq, tensor in kept.items()}
    events = [event._replace(leaf=f"{event.rank}/{event.seq}" if event.leaf else "") for event in events]
    facts = RunFacts(recording.name, dict(recording.environment), recording.world, notes=recording.notes)
    return make_run(facts, events, tensors)


def write_recorded(repo: Repository, recording: Recording) -> None:
    """Write a recording to a store, a segment for each rank."""
    for rank in range(recording.world):
        events, tensors = _make_rank(recording, rank)
        steps = {event.site.step for event in events}
        roots = {step: compute_root(event for event in events if event.site.step == step) for step in sorted(steps)}
        segment = Segment(
            run=recording.name,
            rank=rank,
            number=0,
            world=recording.world,
            started_s=1.79e9,
            environment=dict(recording.environment),
            notes=recording.notes,
            roots=roots,
            is_last=True,
        )
        write_segment(repo, segment, as_observed(events), tensors)


def _make_rank(recording: Recording, rank: int) -> tuple[list[Event], dict[int, torch.Tensor]]:
    events: list[Event] = []
    tensors: dict[int, torch.Tensor] = {}
    for site, tensor in _iter_seen(recording, rank):
        event = _make_event(len(events), rank, site, tensor, recording.level)
        events.append(event)
        if event.leaf:
            tensors[event.seq] = tensor
    return events, tensors


def _iter_seen(recording: Recording, rank: int) -> Sequence[tuple[Site, torch.Tensor]]:
    observed: list[tuple[Site, torch.Tensor]] = []
    for step in range(recording.first_step, recording.first_step + recording.steps):
        weight = torch.full((2, 2), 1.5 + (0.5 if rank == recording.odd_rank else 0.0))
        observed += [
            (_place(step, "parameter", f"{recording.stem}.{layer}.weight"), weight) for layer in range(recording.layers)
        ]
        value = torch.linspace(-1, 1, 12).reshape(3, 4) + step
        for layer in range(recording.layers):
            fqn = f"{recording.stem}.{layer}"
            observed.append((_place(step, "input", fqn), value))
            value = value * 1.5
            if recording.is_bad and (step, f"layers.{layer}", "output") == FAULT:
                value = value + 0.25
                if recording.hole:
                    value[1, 2] = recording.hole
            observed.append((_place(step, "output", fqn), value))
    return observed


def _place(step: int, kind: EventKind, fqn: str, phase: Phase = "forward") -> Site:
    return Site(step, phase, kind, fqn, 0, "")


def _make_event(seq: int, rank: int, site: Site, tensor: torch.Tensor, level: str) -> Event:
    event = Event(
        seq=seq,
        site=site,
        rank=rank,
        dtype="float32",
        shape=tuple(tensor.shape),
        digest=hashlib.sha256(tensor.numpy().tobytes()).digest()[:16],
        module="Linear",
        source="model.py:7",
        leaf=f"0/{seq}" if level == "full" else "",
    )
    return event._replace(stats=_take_stats(tensor)) if level == "stats" else event


def _take_stats(tensor: torch.Tensor) -> Stats:
    finite = tensor[tensor.isfinite()]
    mean = float(finite.mean())
    nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return Stats(
        float(finite.min()), float(finite.max()), mean, math.sqrt(float(finite.square().sum())), nan, inf, 0, (5, 7)
    )
