"""Read runs: `Run` gives access to the events and tensors of a recording, step by step."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import groupby
from typing import Final, Literal, Protocol

import torch

from holdfast.capture.stored.events import Event
from holdfast.capture.stored.segments import (
    NO_ROOT,
    TABLE,
    TENSORS,
    Segment,
    compute_root,
    decode_events,
    iter_segments,
    parse_leaf,
    pick_recording,
    verify_run_name,
)
from holdfast.digest import hash_kind
from holdfast.display.markup import readable_repr
from holdfast.errors import Corrupt, NotFound
from holdfast.json_text import Json
from holdfast.lru import LruCache
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot as Record
from holdfast.snapshot.lazy import Snapshot, View
from holdfast.snapshot.load import ReusedMemory, TensorReader
from holdfast.trees.registered import Types

Status = Literal["complete", "unfinished"]
_KEPT_SEGMENTS: Final = 16
"""Number of decoded segments to cache: a comparison reads steps in order and rarely returns to old ones."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run that are known before its events are read."""

    name: str
    environment: Mapping[str, Json] = field(default_factory=dict)
    world: int = 1
    """Number of ranks."""
    status: Status = "complete"
    started_s: float = 0.0
    notes: tuple[str, ...] = ()
    """What could not be recorded, and why."""
    lost_step: int | None = None
    """The first step of which a part is missing, because other code had removed hooks; None if there is none.

    Comparisons end before it: a difference in it may have its origin in what is missing.
    """

    __repr__ = readable_repr


class RunSource(Protocol):
    """Provides the events and tensors of a run: a store, memory, or another run."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that recorded something."""

    @property
    def steps(self) -> Sequence[int]:
        """The steps that have events, in order."""

    def read_root(self, step: int, rank: int) -> bytes:
        """Return the root of one rank's events of a step."""

    def read_events(self, step: int, rank: int) -> Sequence[Event]:
        """Return one rank's events of a step, in order."""

    def read_tensor(self, event: Event) -> torch.Tensor:
        """Return the tensor of an event that has a leaf."""

    def read_tensors(self, events: Sequence[Event], memory: ReusedMemory) -> Sequence[torch.Tensor]:
        """Return the tensors of events that have leaves, in memory of their own or in the one that is passed."""

    def find_size_bytes(self, step: int) -> int:
        """Return about how many bytes were recorded of a step, without reading any."""


class Run:
    """A recorded run: its steps, events and tensors. Thread-safe."""

    def __init__(self, facts: RunFacts, source: RunSource) -> None:
        self.facts = facts
        self._source = source

    def __repr__(self) -> str:
        """Show name, number of steps and status."""
        return f"<Run {self.facts.name!r} {len(self.steps)} steps, {self.facts.status}>"

    @property
    def steps(self) -> Sequence[int]:
        """The steps that have events, in order."""
        return self._source.steps

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that recorded something, in order."""
        return self._source.ranks

    def root(self, step: int, rank: int | None = None) -> bytes:
        """Return the root of a step, for one rank or all: a digest of its events. Equal roots mean equal steps."""
        if rank is not None:
            return self._source.read_root(step, rank)
        roots = [(rank, self._source.read_root(step, rank)) for rank in self.ranks]
        return hash_kind("run ranks", [rank.to_bytes(4, "little") + root for rank, root in roots if root])

    def events(self, step: int, rank: int | None = None) -> Sequence[Event]:
        """Return the events of a step in the order of observation, for one rank or all."""
        if rank is not None:
            return self._source.read_events(step, rank)
        if len(self.ranks) == 1:
            return self._source.read_events(step, self.ranks[0])
        found = [event for rank in self.ranks for event in self._source.read_events(step, rank)]
        return sorted(found, key=lambda event: (event.seq, event.rank))

    def read_tensor(self, event: Event) -> torch.Tensor:
        """Return the tensor of an event; raises NotFound if only its digest or statistics were kept."""
        if event.leaf:
            return self._source.read_tensor(event)
        level = "digest" if event.stats is None else "stats"
        site = event.site
        raise NotFound(
            f"run {self.facts.name!r}, step {site.step}: {site.kind} of {site.fqn or 'the model'!r} was recorded at"
            f" level {level}; record again with level={{{site.fqn or '*'!r}: 'full', '*': {level!r}}}",
            name=site.fqn,
        )

    def read_tensors(self, events: Sequence[Event], memory: ReusedMemory) -> Sequence[torch.Tensor]:
        """Return the tensors of events that all have leaves, read together; valid until the memory is cleared."""
        return self._source.read_tensors(events, memory)

    def find_size_bytes(self, step: int) -> int:
        """Return about how many bytes were recorded of a step, without reading any."""
        return self._source.find_size_bytes(step)


def read_run(repo: Repository, name: str) -> Run:
    """Open a run; reads its list of segments, but no events. Raises NotFound."""
    name = verify_run_name(name)
    found = {segment.name: (segment, record) for segment, record in iter_segments(repo, name)}
    if not found:
        names = sorted({segment.run for segment, _ in iter_segments(repo)})
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise NotFound(f"no run {name!r} in {repo.store.url}; {hint}`holdfast run ls` lists all runs", name=name)
    segments = [segment for segment, _ in found.values()]
    shown = [found[segment.name] for segment in pick_recording(segments)]
    return Run(_describe(segments), _StoredRun(repo, shown))


def iter_runs(repo: Repository) -> Iterator[RunFacts]:
    """Yield the facts of each run, sorted by name."""
    segments = sorted((segment for segment, _ in iter_segments(repo)), key=lambda segment: segment.run)
    for _, group in groupby(segments, key=lambda segment: segment.run):
        yield _describe(list(group))


def _describe(segments: Sequence[Segment]) -> RunFacts:
    """Return the facts of a run from all segments under its name."""
    shown = pick_recording(segments)
    newest = {segment.rank: segment for segment in shown}
    first = shown[0]
    notes = [
        f"rank {segment.rank}: {note}" if first.world > 1 else note
        for segment in newest.values()
        for note in segment.notes
    ]
    if len(shown) < len(segments):
        notes.append(
            f"{len(segments) - len(shown)} segments of another recording under this name are left out; record one of"
            " the two again under another name"
        )
    is_complete = len(newest) == first.world and all(segment.is_last for segment in newest.values())
    return RunFacts(
        name=first.run,
        environment=first.environment,
        world=first.world,
        status="complete" if is_complete else "unfinished",
        started_s=first.started_s,
        notes=tuple(notes),
        lost_step=min((each.lost_step for each in newest.values() if each.lost_step is not None), default=None),
    )


class _StoredRun:
    """A run in a store; reads a segment when one of its steps is first used."""

    def __init__(self, repo: Repository, found: Iterable[tuple[Segment, Record]]) -> None:
        self._segments = {
            (segment.rank, segment.number): (segment, Snapshot(repo, record, Types()))
            for segment, record in sorted(found, key=lambda pair: (pair[0].rank, pair[0].number))
        }
        self._readers: dict[tuple[int, int], TensorReader] = {}
        self._lock = threading.Lock()
        self.ranks = tuple(sorted({rank for rank, _ in self._segments}))
        # Steps are read one after the other, each for all ranks: with fewer, every step would decode every rank again.
        self._decoded: LruCache[tuple[int, int], Mapping[int, Sequence[Event]]] = LruCache(
            max(_KEPT_SEGMENTS, len(self.ranks))
        )
        self.steps = tuple(sorted({step for segment, _ in self._segments.values() for step in segment.roots}))

    def read_root(self, step: int, rank: int) -> bytes:
        # Each segment's root covers all events of the step so far, so the last one is the step's root.
        roots = [segment.roots[step] for segment, _ in self._iter_segments(step, rank)]
        return roots[-1] if roots else NO_ROOT

    def read_events(self, step: int, rank: int) -> Sequence[Event]:
        parts = [self._read_segment(segment, snapshot)[step] for segment, snapshot in self._iter_segments(step, rank)]
        if len(parts) == 1:
            return parts[0]
        # By number: a retry after an uncertain commit may have written the same events twice.
        found = {event.seq: event for part in parts for event in part}
        return [found[seq] for seq in sorted(found)]

    def read_tensor(self, event: Event) -> torch.Tensor:
        key, index = self._find_leaf(event)
        tensor: torch.Tensor = self._segments[key][1][f"{TENSORS}.{index}"].read(aliases="fresh")
        return tensor

    def read_tensors(self, events: Sequence[Event], memory: ReusedMemory) -> Sequence[torch.Tensor]:
        leaves = [self._find_leaf(event) for event in events]
        found: dict[tuple[tuple[int, int], int], torch.Tensor] = {}
        for key in dict.fromkeys(key for key, _ in leaves):
            indices = list(dict.fromkeys(index for of_key, index in leaves if of_key == key))
            tensors = self._find_reader(key).read([f"{TENSORS}.{index}" for index in indices], memory)
            found |= {(key, index): tensor for index, tensor in zip(indices, tensors, strict=True)}
        return [found[leaf] for leaf in leaves]

    def find_size_bytes(self, step: int) -> int:
        found = (each for each in self._segments.values() if step in each[0].roots)
        return sum(snapshot.logical_bytes // len(segment.roots) for segment, snapshot in found)

    def _find_leaf(self, event: Event) -> tuple[tuple[int, int], int]:
        """Return the rank and number of the segment that has an event's tensor, and its number in it."""
        number, index = parse_leaf(event.leaf)
        if (event.rank, number) not in self._segments:
            raise NotFound(
                f"segment {number} of rank {event.rank}, which contains the {event.site.kind} of"
                f" {event.site.fqn or 'the model'!r}, no longer exists; record the run again",
                name=event.leaf,
            )
        return (event.rank, number), index

    def _find_reader(self, key: tuple[int, int]) -> TensorReader:
        with self._lock:
            if key not in self._readers:
                self._readers[key] = TensorReader(self._segments[key][1].open())
            return self._readers[key]

    def _iter_segments(self, step: int, rank: int) -> Iterator[tuple[Segment, Snapshot]]:
        for (of_rank, _), (segment, snapshot) in self._segments.items():
            if of_rank == rank and step in segment.roots:
                yield segment, snapshot

    def _read_segment(self, segment: Segment, snapshot: Snapshot) -> Mapping[int, Sequence[Event]]:
        key = (segment.rank, segment.number)
        with self._lock:
            found = self._decoded.get(key)
            if found is None:
                table = snapshot[TABLE]
                if not isinstance(table, View):
                    raise Corrupt(f"{segment.name}: its table of events is no table; run `holdfast check`")
                events = decode_events(table.load(), rank=segment.rank, what=segment.name)
                by_step: dict[int, list[Event]] = {step: [] for step in segment.roots}
                for event in events:
                    by_step.setdefault(event.site.step, []).append(event)
                found = by_step
                self._decoded.put(key, found)
            return found


def shift_run(run: Run, by: int) -> Run:
    """Return a run with `by` added to its step numbers; the same run if `by` is 0."""
    lost = run.facts.lost_step
    facts = run.facts if lost is None else replace(run.facts, lost_step=lost + by)
    return Run(facts, _ShiftedRun(run, by)) if by else run


def find_lost(*runs: Run) -> tuple[int | None, str]:
    """Return the first step that some run lacks in part, and a text that says so; None and "" if none does."""
    lost = [(run.facts.lost_step, run.facts.name) for run in runs if run.facts.lost_step is not None]
    if not lost:
        return None, ""
    return min(lost)[0], "; ".join(
        f"{name} is not recorded since step {step}: hooks were removed" for step, name in lost
    )


class _ShiftedRun:
    """A run whose step numbers are shifted."""

    def __init__(self, run: Run, by: int) -> None:
        self._run, self._by = run, by
        self.ranks: Sequence[int] = run.ranks
        self.steps: Sequence[int] = tuple(step + by for step in run.steps)

    def read_root(self, step: int, rank: int) -> bytes:
        # The root covers the step number, so it has to be computed again.
        return compute_root(self.read_events(step, rank))

    def read_events(self, step: int, rank: int) -> Sequence[Event]:
        return tuple(self._move(event, self._by) for event in self._run.events(step - self._by, rank))

    def read_tensor(self, event: Event) -> torch.Tensor:
        return self._run.read_tensor(self._move(event, -self._by))

    def read_tensors(self, events: Sequence[Event], memory: ReusedMemory) -> Sequence[torch.Tensor]:
        return self._run.read_tensors([self._move(event, -self._by) for event in events], memory)

    def find_size_bytes(self, step: int) -> int:
        return self._run.find_size_bytes(step - self._by)

    @staticmethod
    def _move(event: Event, by: int) -> Event:
        return event._replace(site=event.site._replace(step=event.site.step + by))
