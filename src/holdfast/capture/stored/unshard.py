"""Runs of many ranks as if one had done it all: parts of sharded tensors put together, replicas taken once."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final, Literal

import torch

from holdfast.capture.stored.events import Event, Site
from holdfast.capture.stored.observed import observe
from holdfast.capture.stored.runs import Run
from holdfast.capture.stored.table import NO_ROOT, advance_root
from holdfast.errors import NotFound
from holdfast.repo.format.boxes import Box, slices

Dim = int | Literal["replicate", "partial"]
Dims = Mapping[str, Dim]
"""By pattern of names, how the tensors of the ranks lie together: along a dim in order, all the same, or as a sum."""

_KEPT_STEPS: Final = 4
_PREFIX: Final = "whole/"


def gather_run(run: Run, *, dims: Dims | None = None) -> tuple[Run, Gathering]:
    """Return a run as one rank would have recorded it, and what could not be put together, as it is met."""
    gathering = Gathering(run, dims or {})
    return Run(replace(run.facts, world=1), gathering), gathering


def is_sharded(event: Event) -> bool:
    """Tell whether an event is a part of something that is larger, or yet to be added up."""
    return bool(event.placement) and (event.shape != event.global_shape or "Partial" in event.placement)


def find_dim(dims: Dims, event: Event) -> Dim | None:
    """Return how the user says that the tensors of this place lie together; the first pattern counts."""
    return next((dim for pattern, dim in dims.items() if fnmatchcase(event.site.fqn, pattern)), None)


@dataclass(frozen=True, slots=True)
class _Step:
    events: tuple[Event, ...]
    parts: Mapping[str, tuple[Event, ...]]
    """By leaf, what a tensor is put together from."""


class Gathering:
    """The events of all ranks as those of one."""

    def __init__(self, run: Run, dims: Dims) -> None:
        """Read nothing yet."""
        self._run, self._dims = run, dims
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._left_out: dict[str, dict[Site, None]] = {}
        self.ranks: Sequence[int] = (0,)

    @property
    def steps(self) -> Sequence[int]:
        """The steps that have events."""
        return self._run.steps

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be put together of the steps that were read."""
        found = []
        for why, sites in self._left_out.items():
            first = next(iter(sites))
            what = f"{first.kind} of {first.fqn or 'the model'} in step {first.step}"
            found.append(
                f"{self._run.facts.name}: {len(sites)} tensors of many ranks are left out: {why} (first: {what})"
            )
        return tuple(found)

    def read_root(self, step: int, rank: int) -> bytes:
        """Return the root over the events that were put together."""
        root = NO_ROOT
        for event in self.read_events(step, rank):
            root = advance_root(root, event)
        return root

    def read_events(self, step: int, rank: int) -> Sequence[Event]:
        """Return the events of a step, in the order of the first rank that has each."""
        if rank != 0:
            return ()
        if step not in self._steps:
            self._steps[step] = self._gather(step)
            if len(self._steps) > _KEPT_STEPS:
                self._steps.popitem(last=False)
        return self._steps[step].events

    def read_tensor(self, event: Event) -> torch.Tensor:
        """Return the tensor of an event, put together if need be."""
        self.read_events(event.site.step, 0)
        parts = self._steps[event.site.step].parts[event.leaf]
        return self._put_together(parts)

    def _gather(self, step: int) -> _Step:
        groups: dict[Site, list[Event]] = {}
        for event in sorted(self._run.events(step), key=lambda event: (event.rank, event.seq)):
            if not event.recompute:
                groups.setdefault(event.site, []).append(event)
        events: list[Event] = []
        parts: dict[str, tuple[Event, ...]] = {}
        for number, (site, group) in enumerate(groups.items()):
            try:
                whole, used = self._join(group, f"{_PREFIX}{number}")
            except _Apart as reason:
                self._left_out.setdefault(str(reason), {})[site] = None
                continue
            events.append(whole)
            if whole.leaf:
                parts[whole.leaf] = used
        events.sort(key=lambda event: event.seq)
        return _Step(tuple(events), parts)

    def _join(self, group: Sequence[Event], leaf: str) -> tuple[Event, tuple[Event, ...]]:
        first = group[0]
        dim = find_dim(self._dims, first)
        is_same = len({(event.digest, event.dtype, event.shape) for event in group}) == 1
        is_whole = not any(map(is_sharded, group)) and (is_same or dim == "replicate" or first.site.kind == "rng")
        if is_whole and (dim is None or dim == "replicate"):
            return replace(_forget_place(first), leaf=leaf if first.leaf else ""), (first,)
        if not any(map(is_sharded, group)) and (dim is None or dim == "replicate"):
            raise _Apart("they differ between ranks, and nothing says how they lie together: name them in dims")
        if not all(event.leaf for event in group):
            raise _Apart("only digests or stats of their parts were kept: record them with level='full'")
        try:
            whole = self._put_together(group)
        except (NotFound, RuntimeError) as error:
            raise _Apart(f"{type(error).__name__}: {error}") from error
        look = observe(whole)
        joined = replace(_forget_place(first), shape=look.shape, digest=look.digest(), stats=None, leaf=leaf)
        return joined, tuple(group)

    def _put_together(self, group: Sequence[Event]) -> torch.Tensor:
        first = group[0]
        if len(group) == 1 and not is_sharded(first):
            return self._run.read_tensor(first)
        if any(map(is_sharded, group)):
            return self._place(group)
        dim = find_dim(self._dims, first)
        tensors = [self._run.read_tensor(event) for event in group]
        if isinstance(dim, int):
            return torch.cat(tensors, dim)
        return torch.stack(tensors).sum(0).to(tensors[0].dtype)

    def _place(self, group: Sequence[Event]) -> torch.Tensor:
        """Return a sharded tensor as a whole: boxes in their places, what is partial added up."""
        shape = group[0].global_shape
        boxes: dict[Box, list[Event]] = {}
        for event in group:
            starts = event.offsets or (0,) * len(event.shape)
            boxes.setdefault(Box(starts, event.shape), []).append(event)
        if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
            raise _Apart("their parts do not make up the whole: not every rank has recorded its own")
        whole = None
        for box, events in boxes.items():
            # Replicas of a part are the same; what is partial is a summand on each rank.
            used = events if "Partial" in events[0].placement else events[:1]
            tensors = [self._run.read_tensor(event) for event in used]
            whole = torch.empty(shape, dtype=tensors[0].dtype) if whole is None else whole
            part = torch.stack(tensors).sum(0) if len(tensors) > 1 else tensors[0]
            whole[slices(box)] = part / len(tensors) if "avg" in events[0].placement else part
        assert whole is not None, "a group has an event"
        return whole


class _Apart(Exception):
    """The events of a place do not make one: why, for all of that kind."""


def _forget_place(event: Event) -> Event:
    return replace(event, rank=0, placement="", global_shape=(), offsets=())
