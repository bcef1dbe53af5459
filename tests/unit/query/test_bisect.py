"""Bisecting: against a linear search, the ends first, skips, and series without a boundary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import NotBisectable, NotFound
from holdfast.query.bisect import Bisection, bisect, order_series
from holdfast.query.facts import Facts
from tests.kit.committed import make_committed


def search(verdicts: Sequence[bool | None]) -> Bisection[int]:
    return bisect(range(len(verdicts)), lambda at: verdicts[at], label=str, prefix="run/")


@given(num_good=st.integers(1, 60), num_bad=st.integers(1, 60))
def test_the_first_bad_one_is_found_with_few_tests(num_good: int, num_bad: int) -> None:
    found = search([True] * num_good + [False] * num_bad)

    assert (found.last_good, found.first_bad) == (num_good - 1, num_good)
    assert found.candidates == (num_good,)
    assert found.skipped == ()
    assert found.tried[:2] == (0, num_good + num_bad - 1)
    assert len(found.tried) <= 2 + math.ceil(math.log2(num_good + num_bad))


@given(st.data(), st.integers(1, 30), st.integers(1, 30))
def test_skipped_ones_are_never_called_good_or_bad(data: st.DataObject, num_good: int, num_bad: int) -> None:
    verdicts: list[bool | None] = [at < num_good for at in range(num_good + num_bad)]
    # One good and one bad one stay, wherever.
    good, bad = data.draw(st.integers(0, num_good - 1)), data.draw(st.integers(num_good, num_good + num_bad - 1))
    for at in data.draw(st.sets(st.integers(0, len(verdicts) - 1))) - {good, bad}:
        verdicts[at] = None

    found = search(verdicts)

    assert verdicts[found.last_good] is True
    assert verdicts[found.first_bad] is False
    assert found.candidates == tuple(range(found.last_good + 1, found.first_bad + 1))
    assert all(verdicts[at] is None for at in found.candidates[:-1])
    assert set(found.skipped) == {at for at in found.tried if verdicts[at] is None}
    assert len(found.tried) == len(set(found.tried))


@pytest.mark.parametrize(
    ("verdicts", "reason"),
    [
        ([True], "'0' is the only snapshot here; a series to bisect has at least two"),
        ([False, False], "'0', the first of the series, fails already; begin with an earlier one"),
        ([None, False, True], "'1', the first of the series, fails already"),
        ([True, True], "'1', the last of the series, passes, so no snapshot is the first that fails"),
        ([True, None], "'0', the last of the series, passes"),
        ([None, None], "the test skipped every snapshot of the series"),
    ],
)
def test_a_series_without_a_boundary_is_refused(verdicts: list[bool | None], reason: str) -> None:
    with pytest.raises(NotBisectable, match=reason):
        search(verdicts)


def test_an_empty_series_is_not_found() -> None:
    with pytest.raises(NotFound, match="no snapshot begins with 'run/', so there is nothing to bisect"):
        search([])


def test_a_test_must_say_true_false_or_none() -> None:
    with pytest.raises(TypeError, match=r"returns True \(good\), False \(bad\) or None \(skip\), not 0"):
        bisect([1, 2], lambda _: 0, label=str, prefix="")  # type: ignore[arg-type,return-value]  # that is the point


def make(name: str, time_s: float, **metadata: object) -> Facts:
    return Facts(make_committed(name, metadata, time_s=time_s), (), 0.0)


def test_a_series_is_in_the_order_of_steps_if_each_has_its_own() -> None:
    by_step = [make("x/step-10", 1), make("x/step-9", 2), make("x/last", 0, step=11)]
    by_time = [make("x/step-10", 1), make("x/step-9", 2), make("x/last", 0)]
    repeated = [make("a/step-10", 1), make("a/step-9", 2), make("b/step-9", 0)]
    not_finite = [make("a", 2, metrics={"step": "nan"}), make("b", 1, step=1)]

    ordered = [order_series(series) for series in (by_step, by_time, repeated, not_finite)]

    assert [order for _, order in ordered] == ["step", "time", "time", "time"]
    assert [[each.snapshot.name for each in series] for series, _ in ordered] == [
        ["x/step-9", "x/step-10", "x/last"],
        ["x/last", "x/step-10", "x/step-9"],
        ["b/step-9", "a/step-10", "a/step-9"],
        ["b", "a"],
    ]


def test_a_store_finds_the_first_snapshot_with_a_nan(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "s")
    for step in range(1, 13):
        store.save(f"run/step-{step}", {"w": torch.full((2,), math.nan if step >= 8 else step)})

    found = store.bisect("run/", lambda snapshot: bool(snapshot["w"].read().isfinite().all()))

    assert (found.first_bad.name, found.last_good.name) == ("run/step-8", "run/step-7")
    assert len(found.tried) <= 6
