"""How often a loop of faults strikes: at one operation in five by default, at each one in the slow tests."""

from __future__ import annotations

from typing import Final

import pytest

STEP: Final = 5

THINNED: Final = pytest.mark.parametrize(
    "step", [STEP, pytest.param(1, marks=pytest.mark.slow)], ids=["thinned", "whole"]
)
"""Gives a test the argument `step`: it strikes at each `step`-th operation.

A loop begins at another operation for each of its parameters (`find_first`): thinned, the faults of one verb, or the
verbs that share their steps, take turns and together meet each kind of operation.
"""


def find_first(turn: int, step: int) -> int:
    """Return the first operation, counted from 1, for the parameters with this number."""
    return 1 + turn % step
