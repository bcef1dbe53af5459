"""Renumber the steps of a run: a resumed run that counts from 0 gets the numbers it continues with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run
from holdfast.capture.stored.table import NO_ROOT, advance_root


def shift_run(run: Run, by: int) -> Run:
    """Return a run with `by` added to its step numbers; the same run if `by` is 0."""
    return Run(run.facts, _Shifted(run, by)) if by else run


class _Shifted:
    """A run whose step numbers are shifted."""

    def __init__(self, run: Run, by: int) -> None:
        self._run, self._by = run, by
        self.ranks: Sequence[int] = run.ranks
        self.steps: Sequence[int] = tuple(step + by for step in run.steps)

    def read_root(self, step: int, rank: int) -> bytes:
        # The root covers the step number, so it has to be computed again.
        root = NO_ROOT
        for event in self.read_events(step, rank):
            root = advance_root(root, event)
        return root

    def read_events(self, step: int, rank: int) -> Sequence[Event]:
        return tuple(self._move(event, self._by) for event in self._run.events(step - self._by, rank))

    def read_tensor(self, event: Event) -> torch.Tensor:
        return self._run.read_tensor(self._move(event, -self._by))

    @staticmethod
    def _move(event: Event, by: int) -> Event:
        return replace(event, site=event.site._replace(step=event.site.step + by))
