"""The benchmark of starts without dynamo: its rows say what was measured, and wrong results end the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from bench.kit.measure import WrongResult
from bench.suites.whole import EAGER, WARM, WHOLE, Start, make_row, verify

ONE: Final = Start(cpu=6.0, wall=7.0, digest="same", used_dynamo=True, hit=0)
STORED: Final = Start(cpu=1.5, wall=2.0, digest="same", used_dynamo=False, hit=1)
FOUND: Final = {WARM: [ONE, replace(ONE, cpu=8.0)], WHOLE: [STORED], EAGER: [replace(ONE, cpu=1.25)]}


def test_the_best_rounds_are_compared() -> None:
    row = make_row("MLP", FOUND, has_optimizer=False)

    assert (row.figure, row.limit, row.verdict) == (1.5, 6.0, "pass")
    assert row.note.startswith("4.0 times as fast as torch, warm directory; eager 1.25 s")
    assert make_row("MLP", FOUND, has_optimizer=True).verdict == ""


@pytest.mark.parametrize(
    "wrong", [replace(STORED, digest="other"), replace(STORED, hit=0), replace(STORED, used_dynamo=True)]
)
def test_wrong_results_end_the_run(wrong: Start) -> None:
    verify("MLP", {WARM: ONE, WHOLE: ONE}, FOUND, has_optimizer=False)
    with pytest.raises(WrongResult):
        verify("MLP", {WARM: ONE, WHOLE: ONE}, {**FOUND, WHOLE: [wrong]}, has_optimizer=False)
