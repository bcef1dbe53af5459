"""A diff as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

import holdfast
from holdfast.diff.changes import Distance, _describe_distance, describe_diff, summarize_diff
from holdfast.diff.values import iter_measured


def test_a_diff_is_described_with_counts_and_changes(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        store.save("a", {"x": torch.zeros(3), "n": 1})
        store.save("b", {"x": torch.ones(3), "n": 1, "y": 2})
        diff = store.diff("a", "b", values=True)

        found = describe_diff(diff)
        one_by_one = list(iter_measured(store.repository, store.diff("a", "b")))

    assert {**summarize_diff(diff), "changes": found["changes"]} == found
    assert (found["changed"], found["added"], found["equal"]) == (1, 1, 1)
    assert found["changes"][0]["distances"][0]["max_abs"] == 1.0
    assert one_by_one == list(diff.changes)


def test_infinity_is_a_text_because_json_has_none() -> None:
    found = _describe_distance(Distance(1, 1, math.inf, relative_l2=math.nan))

    assert json.loads(json.dumps(found, allow_nan=False))["max_abs"] == "inf"
