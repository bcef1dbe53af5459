"""Runs in memory, from events that a test creates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

import torch

from holdfast.capture.stored.events import Event, EventFacts, Measured, ObservedEvent, ObservedEvents, Site, Stats
from holdfast.capture.stored.runs import Run, RunFacts
from holdfast.capture.stored.segments import compute_root, format_leaf
from holdfast.digest import fingerprint
from holdfast.errors import NotFound
from holdfast.snapshot.load import ReusedMemory


def make_run(facts: RunFacts, events: Iterable[Event], tensors: Mapping[str, torch.Tensor] | None = None) -> Run:
    """Return a run of events that are in memory; `tensors` holds those whose events name a leaf."""
    return Run(facts, _Memory(events, tensors or {}))


class _Memory:
    """A run in memory."""

    def __init__(self, events: Iterable[Event], tensors: Mapping[str, torch.Tensor]) -> None:
        ordered = sorted(events, key=lambda event: (event.site.step, event.rank, event.seq))
        grouped = groupby(ordered, key=lambda event: (event.site.step, event.rank))
        self._events = {key: tuple(group) for key, group in grouped}
        self._tensors = tensors
        self._roots: dict[tuple[int, int], bytes] = {}
        self.steps = tuple(sorted({step for step, _ in self._events}))
        self.ranks = tuple(sorted({rank for _, rank in self._events}))

    def read_root(self, step: int, rank: int) -> bytes:
        if (step, rank) not in self._roots:
            self._roots[step, rank] = compute_root(self.read_events(step, rank))
        return self._roots[step, rank]

    def read_events(self, step: int, rank: int) -> Sequence[Event]:
        return self._events.get((step, rank), ())

    def read_tensor(self, event: Event) -> torch.Tensor:
        try:
            return self._tensors[event.leaf]
        except KeyError as error:
            raise NotFound(f"no tensor {event.leaf!r} was given with this run", name=event.leaf) from error

    def read_tensors(self, events: Sequence[Event], memory: ReusedMemory) -> Sequence[torch.Tensor]:
        return [self.read_tensor(event) for event in events]

    def find_size_bytes(self, step: int) -> int:
        events = (event for (of_step, _), group in self._events.items() if of_step == step for event in group)
        return sum(self._tensors[event.leaf].nbytes for event in events if event.leaf in self._tensors)


def as_observed(events: Iterable[Event]) -> ObservedEvents:
    """Return events as the recorder collects them."""
    return ObservedEvents(
        ObservedEvent(
            event.seq,
            event.site.step,
            EventFacts(
                *(*event.site[1:], event.dtype, event.shape, event.module, event.parent, event.recompute, event.source),
                *(event.placement, event.global_shape, event.offsets),
            ),
            event.digest,
            event.alias,
            Measured(event.stats),
            event.leaf,
            event.form,
            event.blake3,
        )
        for event in events
    )


def make_output(seq: int, *, step: int = 0, fqn: str = "layers.0", rank: int = 0) -> Event:
    """Return an event whose digest depends on its number and name."""
    digest = fingerprint(f"{seq}/{fqn}".encode())
    return Event(seq, Site(step, "forward", "output", fqn, 0, "[1]"), rank, "float32", (2, 3), digest)


FULL_EVENT: Final = Event(
    seq=7,
    site=Site(3, "backward", "grad", "layers.é.\n", 2, "['mask']"),
    rank=0,
    dtype="bfloat16",
    shape=(4, 0),
    digest=b"0123456789abcdef",
    module="Linear",
    parent="layers",
    recompute=True,
    source="model.py:212",
    alias=5,
    placement="Shard(dim=0)",
    global_shape=(8, 0),
    offsets=(4, 0),
    stats=Stats(-1.0, 2.0, 0.5, 3.0, 1, 2, 3, (1, 2, 3)),
    leaf=format_leaf(2, 17),
)
"""An event that has a value in every field except the form."""
