"""A diff as lines: counts first, then changes in batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.serving.answers import diffs
from holdfast.serving.answers.diffs import iter_diff


@pytest.mark.parametrize("values", [True, False])
def test_counts_come_first_and_changes_in_batches(
    tmp_path: Path, values: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffs, "_BATCH", 2)
    with holdfast.open(tmp_path / "store") as store:
        store.save("a", {str(at): torch.zeros(3) for at in range(5)})
        store.save("b", {str(at): torch.full((3,), float(at)) for at in range(6)})

        head, *batches = iter_diff(
            store.repository, store.snapshot("a").record, store.snapshot("b").record, values=values
        )

    assert (head["changed"], head["added"], head["total"]) == (4, 1, 5)
    assert [len(batch["changes"]) for batch in batches] == [2, 2, 1]
    assert [len(change["distances"]) for change in batches[0]["changes"]] == [int(values)] * 2


def test_equal_snapshots_have_no_batches(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        store.save("a", {"x": torch.zeros(3)})
        record = store.snapshot("a").record

        lines = list(iter_diff(store.repository, record, record, values=True))

    assert [line["is_equal"] for line in lines] == [True]
