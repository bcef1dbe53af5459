"""Gather a run of many ranks into one rank: assembles sharded tensors, and keeps one copy of replicas."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final, Literal

import torch

from holdfast.capture.stored.events import Event, Site, find_common_digests
from holdfast.capture.stored.observed import observe
from holdfast.capture.stored.runs import Run
from holdfast.capture.stored.segments import compute_root
from holdfast.digest import hash_bytes
from holdfast.errors import NotFound
from holdfast.lru import LruCache
from holdfast.repo.format.boxes import Box, slices
from holdfast.snapshot.load import ReusedMemory

Dim = int | Literal["replicate", "partial"]
Dims = Mapping[str, Dim]
"""How to combine the tensors of all ranks, by name pattern: concatenate along a dim, take one, or sum."""

_KEPT_STEPS: Final = 4
_PREFIX: Final = "whole/"


def gather_run(run: Run, *, dims: Dims | None = None) -> tuple[Run, Gathering]:
    """Return a run as a single rank would have recorded it, and the `Gathering`, whose notes list what is left out."""
    gathering = Gathering(run, dims or {})
    return Run(replace(run.facts, world=1), gathering), gathering


def is_sharded(event: Event) -> bool:
    """Return whether an event is a shard of a larger tensor, or a partial sum."""
    return bool(event.placement) and (event.shape != event.global_shape or "Partial" in event.placement)


def find_dim(dims: Dims, event: Event) -> Dim | None:
    """Return what `dims` says about an event; the first pattern that matches wins."""
    return next((dim for pattern, dim in dims.items() if fnmatchcase(event.site.fqn, pattern)), None)


@dataclass(frozen=True, slots=True)
class _Step:
    events: tuple[Event, ...]
    parts: Mapping[str, tuple[Event, ...]]
    """By leaf, the events that a tensor is assembled from."""


class Gathering:
    """A source of events that presents all ranks as rank 0."""

    def __init__(self, run: Run, dims: Dims) -> None:
        self._run, self._dims = run, dims
        self._lock = threading.Lock()
        self._steps: LruCache[int, _Step] = LruCache(_KEPT_STEPS)
        self._left_out: dict[str, dict[Site, None]] = {}
        self.ranks: Sequence[int] = (0,)

    @property
    def steps(self) -> Sequence[int]:
        """The steps that have events."""
        return self._run.steps

    @property
    def notes(self) -> tuple[str, ...]:
        """Which tensors of the steps read so far could not be assembled, and why."""
        found = []
        for why, sites in self._left_out.items():
            first = next(iter(sites))
            what = f"{first.kind} of {first.fqn or 'the model'} in step {first.step}"
            found.append(
                f"{self._run.facts.name}: {len(sites)} tensors of several ranks are left out: {why} (first: {what})"
            )
        return tuple(found)

    def read_root(self, step: int, rank: int) -> bytes:
        """Return the root of the assembled events."""
        return compute_root(self.read_events(step, rank))

    def read_events(self, step: int, rank: int) -> Sequence[Event]:
        """Return the events of a step, in the order of the first rank that has each."""
        return self._read_step(step).events if rank == 0 else ()

    def read_tensor(self, event: Event) -> torch.Tensor:
        """Return the tensor of an event, assembled from its shards if necessary."""
        return self._assemble(self._read_step(event.site.step).parts[event.leaf])

    def read_tensors(self, events: Sequence[Event], memory: ReusedMemory) -> Sequence[torch.Tensor]:
        """Return the tensors of events; those that need no assembly are read together."""
        groups = [self._read_step(event.site.step).parts[event.leaf] for event in events]
        alone = [group[0] for group in groups if _is_alone(group)]
        found = iter(self._run.read_tensors(alone, memory))
        return [next(found) if _is_alone(group) else self._assemble(group) for group in groups]

    def find_size_bytes(self, step: int) -> int:
        """Return about how many bytes all ranks recorded of a step."""
        return self._run.find_size_bytes(step)

    def _read_step(self, step: int) -> _Step:
        with self._lock:
            found = self._steps.get(step)
            if found is None:
                found = self._gather(step)
                self._steps.put(step, found)
            return found

    def _gather(self, step: int) -> _Step:
        groups: dict[Site, list[Event]] = {}
        for event in sorted(self._run.events(step), key=lambda event: (event.rank, event.seq)):
            # The sums of single ranks are not gathered; what they were reduced to is.
            is_unreduced = event.site.kind == "param_grad" and bool(event.site.path)
            if not event.recompute and not (is_unreduced and len(self._run.ranks) > 1):
                groups.setdefault(event.site, []).append(event)
        events: list[Event] = []
        parts: dict[str, tuple[Event, ...]] = {}
        for number, (site, group) in enumerate(groups.items()):
            try:
                whole, used = self._join(group, f"{_PREFIX}{number}")
            except _CannotGather as reason:
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
        digests = find_common_digests(group)
        contents = zip(group, digests or (), strict=False)
        is_same = len({(digest, event.dtype, event.shape) for event, digest in contents}) == 1
        is_whole = not any(map(is_sharded, group)) and (
            is_same or dim == "replicate" or first.site.kind in ("rng", "setting")
        )
        if is_whole and (dim is None or dim == "replicate"):
            return _as_whole(first)._replace(leaf=leaf if first.leaf else ""), (first,)
        if not any(map(is_sharded, group)) and (dim is None or dim == "replicate"):
            if digests is None:
                raise _CannotGather("their digests are of different kinds; record them with hashes='both'")
            raise _CannotGather("they differ between ranks; name them in dims to say how to combine them")
        if not all(event.leaf for event in group):
            raise _CannotGather("only digests or stats of their shards were kept; record them with level='full'")
        try:
            whole = self._assemble(group)
        except (NotFound, RuntimeError) as error:
            raise _CannotGather(f"{type(error).__name__}: {error}") from error
        observed = observe(whole)
        blake3 = hash_bytes(observed.data) if any(event.blake3 for event in group) else b""
        joined = _as_whole(first)._replace(shape=observed.shape, digest=observed.digest(), blake3=blake3)
        return joined._replace(stats=None, leaf=leaf), tuple(group)

    def _assemble(self, group: Sequence[Event]) -> torch.Tensor:
        first = group[0]
        if _is_alone(group):
            return self._run.read_tensor(first)
        if any(map(is_sharded, group)):
            return self._assemble_shards(group)
        dim = find_dim(self._dims, first)
        tensors = [self._run.read_tensor(event) for event in group]
        if isinstance(dim, int):
            return torch.cat(tensors, dim)
        return torch.stack(tensors).sum(0).to(tensors[0].dtype)

    def _assemble_shards(self, group: Sequence[Event]) -> torch.Tensor:
        """Return a sharded tensor as a whole: shards at their offsets, partial values reduced."""
        shape = group[0].global_shape
        boxes: dict[Box, list[Event]] = {}
        for event in group:
            starts = event.offsets or (0,) * len(event.shape)
            boxes.setdefault(Box(starts, event.shape), []).append(event)
        if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
            raise _CannotGather("their shards do not cover the whole tensor: some ranks did not record theirs")
        whole = None
        for box, events in boxes.items():
            # Replicas of a shard are equal, so one is enough; of a partial tensor, each rank has a summand.
            used = events if "Partial" in events[0].placement else events[:1]
            tensors = [self._run.read_tensor(event) for event in used]
            whole = torch.empty(shape, dtype=tensors[0].dtype) if whole is None else whole
            part = torch.stack(tensors).sum(0) if len(tensors) > 1 else tensors[0]
            whole[slices(box)] = part / len(tensors) if "avg" in events[0].placement else part
        assert whole is not None, "a group has an event"
        return whole


def _is_alone(group: Sequence[Event]) -> bool:
    return len(group) == 1 and not is_sharded(group[0])


class _CannotGather(Exception):
    """The events of a site cannot be combined into one; the message says why and is shared by all such sites."""


def _as_whole(event: Event) -> Event:
    return event._replace(rank=0, placement="", global_shape=(), offsets=())
