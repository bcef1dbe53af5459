"""assert_runs_match: raises if two runs differ, and says where."""

from __future__ import annotations

import pytest

from holdfast.capture.compare.compare import assert_runs_match
from holdfast.capture.compare.measure import Tolerance
from tests.kit.planted_faults import train, train_well


def test_an_assertion_fails_with_the_site_where_runs_diverge() -> None:
    good, bad = train_well(), train(lambda model: model.drop_out(on=True), name="bad", steps=1)

    assert_runs_match(good, train(name="again", steps=1))
    with pytest.raises(AssertionError, match=r"step 0, forward, layers\.0\.drop: output differs"):
        assert_runs_match(good, bad)
    assert_runs_match(good, bad, tolerance=Tolerance(0.0, 1e9))
