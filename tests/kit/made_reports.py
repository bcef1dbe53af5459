"""Results of comparisons, created by hand for tests of the page."""

from __future__ import annotations

from holdfast.capture.compare.result import ComparedInput, EnvironmentChange, Origin, RunDiff, StepDiff
from holdfast.capture.stored.events import Site


def make_diff(name: str) -> RunDiff:
    """Return the result of a comparison in which every text that a user chooses is `name`."""
    same = (ComparedInput(name, "equal"),)
    site = Site(0, "forward", "output", name, 0, name)
    origin = Origin(name, 0, "forward", "output", 0, name, name, site, inputs=same, parameters=same, notes=(name,))
    steps = (StepDiff(0, {"origin": 1}),)
    return RunDiff(name, name, origin, steps=steps, environment=(EnvironmentChange(name, name, name),))
