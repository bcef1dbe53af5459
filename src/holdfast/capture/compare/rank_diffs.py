"""Compare the ranks of one run: parameters, reduced gradients and results that should be equal on several ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.capture.compare.measure import TensorDistance, TensorPair
from holdfast.capture.compare.result import name_site
from holdfast.capture.stored.described import describe_site
from holdfast.capture.stored.events import Event, Site, find_common_digests
from holdfast.capture.stored.runs import Run
from holdfast.capture.stored.unshard import Dims, find_dim
from holdfast.json_text import Json

_REPLICAS: Final = frozenset({"parameter", "buffer", "optimizer"})
_MAX_FINDINGS: Final = 1000


@dataclass(frozen=True, slots=True)
class Replica:
    """A tensor that should be equal on several ranks, and is not."""

    site: Site
    groups: tuple[tuple[int, ...], ...]
    """Groups of ranks whose tensors are equal; the largest group first, then by lowest rank."""
    why: str
    source: str = ""
    measure: TensorDistance | None = None
    """The difference between the first two groups."""

    @property
    def fqn(self) -> str:
        """Name of the module, parameter or state."""
        return self.site.fqn

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that are not in the largest group."""
        return tuple(sorted(rank for group in self.groups[1:] for rank in group))

    def __str__(self) -> str:
        """Describe the difference in one sentence."""
        site = self.site
        source = f" ({self.source})" if self.source else ""
        most, odd = _show_ranks(self.groups[0]), _show_ranks(self.odd)
        return f"step {site.step}, {site.phase}, {name_site(site)}: {odd} differs from {most}: {self.why}{source}"

    def to_json(self) -> dict[str, Json]:
        """Return the difference as JSON."""
        groups: list[Json] = [list(group) for group in self.groups]
        return {
            **describe_site(self.site),
            "groups": groups,
            "odd": list(self.odd),
            "why": self.why,
            "source": self.source,
            "measure": self.measure.to_json() if self.measure else None,
        }


@dataclass(frozen=True, slots=True)
class RanksDiff:
    """The replicas of a run that are not equal."""

    run: str
    world: int
    findings: tuple[Replica, ...]
    """In order; the first is where the ranks diverge."""
    checked: int
    """Number of tensors that should be equal on several ranks."""
    notes: tuple[str, ...] = ()

    @property
    def origin(self) -> Replica | None:
        """The first difference; None if all replicas are equal."""
        return self.findings[0] if self.findings else None

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        if self.origin:
            return str(self.origin)
        if not self.checked:
            return f"{self.run}: no recorded tensor should be equal on several ranks; nothing was compared"
        return f"{self.run}: all {self.checked} replicas of {self.world} ranks are equal"

    def to_json(self) -> dict[str, Json]:
        """Return the whole result as JSON."""
        return {
            "run": self.run,
            "world": self.world,
            "headline": self.headline,
            "findings": [finding.to_json() for finding in self.findings],
            "checked": self.checked,
            "notes": list(self.notes),
        }


def diff_ranks(run: Run, *, dims: Dims | None = None, steps: Collection[int] | None = None) -> RanksDiff:
    """Find tensors that should be equal on several ranks and are not.

    Tensors that `dims` declares as split or partial are left out. `steps` limits the comparison.
    """
    check = _RankCheck(run, dims or {})
    for step in run.steps:
        if (steps is None or step in steps) and len(check.findings) < _MAX_FINDINGS:
            check.check_step(step)
    return RanksDiff(run.facts.name, run.facts.world, tuple(check.findings), check.checked, tuple(check.find_notes()))


class _RankCheck:
    """The state of one check."""

    def __init__(self, run: Run, dims: Dims) -> None:
        self._run, self._dims = run, dims
        self._rng_steps: dict[int, None] = {}
        self._unknown = 0
        self.findings: list[Replica] = []
        self.checked = 0

    def find_notes(self) -> Iterator[str]:
        """Yield the notes of the run and of this check."""
        yield from self._run.facts.notes
        missing = sorted(set(range(self._run.facts.world)) - set(self._run.ranks))
        if missing:
            yield f"{_show_ranks(missing)} recorded nothing"
        if self._rng_steps:
            yield f"RNG states differ between ranks from step {next(iter(self._rng_steps))} on; that may be intended"

        if self._unknown:
            yield (
                f"{self._unknown} tensors were not compared: their digests are of different kinds, because some ranks"
                " hashed them on a device and others on the host; record with hashes='both'"
            )

    def check_step(self, step: int) -> None:
        """Check one step: state and reduced gradients, and outputs of calls with equal inputs."""
        groups: dict[Site, list[Event]] = {}
        for event in self._run.events(step):
            if not event.recompute:
                groups.setdefault(event.site, []).append(event)
        found = [*self._iter_state(groups), *self._iter_results(groups)]
        found.sort(key=lambda pair: pair[0])
        self.findings += [replica for _, replica in found]

    def _iter_state(self, groups: dict[Site, list[Event]]) -> Iterator[tuple[int, Replica]]:
        for site, events in groups.items():
            if site.kind == "rng" and len(_split(events)) > 1:
                self._rng_steps.setdefault(site.step)
            # With a path, it is the gradient of this rank alone, before it is reduced.
            is_reduced = site.kind == "param_grad" and not site.path
            if site.kind not in _REPLICAS and not is_reduced:
                continue
            what = "a gradient after it was reduced" if is_reduced else f"a {site.kind} that should be equal on all"
            for same in self._find_replicas(events):
                yield from self._check(same, what)

    def _iter_results(self, groups: dict[Site, list[Event]]) -> Iterator[tuple[int, Replica]]:
        """Check outputs of calls whose inputs, parameters and buffers are equal on all ranks."""
        inputs: dict[tuple[str, int], list[list[Event]]] = {}
        bad = set()
        for site, events in groups.items():
            if site.kind == "input" and site.phase == "forward":
                inputs.setdefault((site.fqn, site.call), []).append(events)
            elif site.kind in _REPLICAS and any(len(_split(same)) > 1 for same in self._find_replicas(events)):
                bad.add(site.fqn)
        for site, events in groups.items():
            passed = inputs.get((site.fqn, site.call), ()) if site.kind == "output" and site.phase == "forward" else ()
            if not passed or any(name.startswith(f"{site.fqn}." if site.fqn else "") for name in bad):
                continue
            if all(len(each) == len(events) and len(_split(each)) == 1 for each in passed):
                for same in self._find_replicas(events):
                    yield from self._check(same, "an output of equal inputs and parameters")

    def _find_replicas(self, events: Sequence[Event]) -> list[list[Event]]:
        """Return groups of events of one site that should be equal: whole tensors, or the same shard."""
        if find_dim(self._dims, events[0]) not in (None, "replicate"):
            return []
        parts: dict[object, list[Event]] = {}
        for event in events:
            if "Partial" not in event.placement:
                parts.setdefault((event.placement, event.offsets, event.global_shape), []).append(event)
        return [part for part in parts.values() if len(part) > 1]

    def _check(self, events: Sequence[Event], why: str) -> Iterator[tuple[int, Replica]]:
        groups = _split(events)
        if not groups:
            self._unknown += 1
            return
        self.checked += 1
        if len(groups) == 1:
            return
        (first, *_), (second, *_) = groups[0], groups[1]
        measure = TensorPair(self._run, first, self._run, second).measure(None)
        ranks = tuple(tuple(event.rank for event in group) for group in groups)
        yield first.seq, Replica(first.site, ranks, why, first.source, measure)


def _split(events: Sequence[Event]) -> list[list[Event]]:
    """Group events by content; the largest group first, then by rank. No groups if digests are of different kinds."""
    groups: dict[object, list[Event]] = {}
    events = sorted(events, key=lambda event: event.rank)
    for event, digest in zip(events, find_common_digests(events) or (), strict=False):
        groups.setdefault((digest, event.dtype, event.shape), []).append(event)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))


def _show_ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
