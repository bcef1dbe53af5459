"""Answers about recorded runs: their list, the events of one in pages, its first NaN or infinity, a report on two."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from holdfast.capture.compare.compare import DiffOptions, diff_runs
from holdfast.capture.compare.nan import find_nonfinite
from holdfast.capture.compare.result import Origin
from holdfast.capture.report.report import make_policy, make_report, render_html
from holdfast.capture.stored.described import describe_event, describe_run, label_site, name_level
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run, iter_runs, read_run
from holdfast.json_text import Json
from holdfast.query.globs import Glob, is_glob
from holdfast.repo.format.layout import natural_order
from holdfast.repo.handle.repository import Repository

MAX_EVENTS: Final = 1000
"""Events of one page."""


class EventLabel(NamedTuple):
    """What the filter looks at; equal events of all steps share one."""

    phase: str
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class RunOutline:
    """A run, and for each of its events in order a number that stands for its label."""

    run: Run
    starts: Sequence[int]
    """The position of the first event of each step, and at the end the number of all events."""
    labels: Sequence[EventLabel]
    label_numbers: np.ndarray[Any, Any]
    levels: Mapping[str, int]
    """How many events were recorded at each level."""

    @property
    def size(self) -> int:
        """The number of events."""
        return self.starts[-1]

    def find_range(self, step: int | None) -> range:
        """Return the positions of the events of a step, or of all; empty if the step has none."""
        if step is None:
            return range(self.size)
        at = bisect_left(self.run.steps, step)
        is_known = at < len(self.run.steps) and self.run.steps[at] == step
        return range(self.starts[at], self.starts[at + 1]) if is_known else range(0)

    def read_events(self, positions: Sequence[int]) -> list[Event]:
        """Return the events at positions that are in order."""
        found: list[Event] = []
        events: Sequence[Event] = ()
        at = -1
        for position in positions:
            if at < 0 or position >= self.starts[at + 1]:
                at = bisect_right(self.starts, position) - 1
                events = self.run.events(self.run.steps[at])
            found.append(events[position - self.starts[at]])
        return found


def read_outline(repo: Repository, name: str) -> RunOutline:
    """Read all events of a run once; raises NotFound."""
    run = read_run(repo, name)
    starts, numbers = [0], []
    known: dict[EventLabel, int] = {}
    levels: Counter[str] = Counter()
    for step in run.steps:
        for event in run.events(step):
            label = EventLabel(event.site.phase, event.site.kind, label_site(event.site))
            numbers.append(known.setdefault(label, len(known)))
            levels[name_level(event)] += 1
        starts.append(len(numbers))
    return RunOutline(run, starts, tuple(known), np.array(numbers, dtype=np.int32), levels)


def choose_events(outline: RunOutline, text: str, step: int | None) -> Sequence[int]:
    """Return the positions of the events that match every word: a kind, a phase, a part of a name, or a glob."""
    chosen = outline.find_range(step)
    words = text.split()
    if not words or not chosen:
        return chosen
    tests = [(word, Glob(word) if is_glob(word) else None) for word in words]
    matches = np.array([all(_matches(label, *test) for test in tests) for label in outline.labels], dtype=bool)
    found = np.flatnonzero(matches[outline.label_numbers[chosen.start : chosen.stop]]) + chosen.start
    return array("q", found.astype(np.int64).tobytes())


def _matches(label: EventLabel, word: str, glob: Glob | None) -> bool:
    return word in (label.phase, label.kind) or word in label.name or (glob is not None and glob.matches(label.name))


def describe_outline(outline: RunOutline) -> dict[str, Json]:
    """Return the facts of a run, with its steps and the number of its events."""
    return {
        **describe_run(outline.run.facts),
        "ranks": list(outline.run.ranks),
        "steps": _describe_steps(outline.run.steps),
        "events": outline.size,
        "levels": dict(outline.levels),
    }


def describe_events(
    outline: RunOutline, positions: Sequence[int], step: int | None, offset: int, limit: int
) -> dict[str, Json]:
    """Return a part of the chosen events, as `holdfast run events --json` prints them; and the steps around `step`."""
    steps = outline.run.steps
    near: dict[str, Json] = {"previous": None, "next": None}
    if step is not None:
        before, after = bisect_left(steps, step) - 1, bisect_right(steps, step)
        near = {
            "previous": steps[before] if before >= 0 else None,
            "next": steps[after] if after < len(steps) else None,
        }
    events = outline.read_events(positions[offset : offset + limit])
    return {
        "total": len(positions),
        "offset": offset,
        "steps": {**_describe_steps(steps), **near},
        "events": [describe_event(event) for event in events],
    }


def _describe_steps(steps: Sequence[int]) -> dict[str, Json]:
    return {"first": steps[0] if steps else None, "last": steps[-1] if steps else None, "count": len(steps)}


def describe_nonfinite(outline: RunOutline) -> dict[str, Json]:
    """Return what `holdfast run nan --json` prints, and the row of the first NaN or Inf in the events of its step."""
    found = find_nonfinite(outline.run)
    return {**found.to_json(), "row": _find_row(outline.run, found.origin) if found.origin else None}


def _find_row(run: Run, origin: Origin) -> int | None:
    wanted = (origin.site, origin.rank, False)
    events = enumerate(run.events(origin.site.step))
    return next((at for at, event in events if (event.site, event.rank, event.recompute) == wanted), None)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """What the comparison of two runs found, and the page that shows it."""

    headline: str
    is_match: bool
    page: bytes
    policy: str
    """Its content security policy."""


def list_runs(repo: Repository) -> list[Json]:
    """Return every recorded run, as `holdfast run ls --json` prints it."""
    found = sorted(iter_runs(repo), key=lambda facts: natural_order(facts.name))
    return [describe_run(facts) for facts in found]


def compare_runs(repo: Repository, a: str, b: str) -> RunComparison:
    """Compare two runs with the tolerances of torch.testing, and render the page of `holdfast run report`."""
    first, second = read_run(repo, a), read_run(repo, b)
    diff = diff_runs(first, second, options=DiffOptions(budget_bytes=repo.budget_bytes))
    report = make_report(first, second, diff, tolerance="Tolerance: torch.testing's table for each dtype.")
    return RunComparison(diff.headline, diff.is_match, render_html(report), make_policy())
