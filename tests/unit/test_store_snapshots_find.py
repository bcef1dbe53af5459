"""Finding snapshots again: conditions, order, the best by a metric, and answers that nobody can change."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

import holdfast
from holdfast.errors import BadExpression, NotFound
from holdfast.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = holdfast.open(tmp_path / "s")
    losses = {1: 3.0, 2: 1.0, 3: "nan", 10: 2.0}
    for step, loss in losses.items():
        opened.save(f"run/step-{step}", {"x": step}, metadata={"step": step, "metrics": {"val_loss": loss}})
    opened.save("other", {"x": 0})
    opened.tag("kept", "run/step-10")
    return opened


def names(found: list[holdfast.Snapshot]) -> list[str]:
    return [snapshot.name for snapshot in found]


def test_snapshots_are_selected_sorted_and_limited(store: Store) -> None:
    assert names(store.snapshots("run/", where="val_loss < 3 and step >= 1")) == ["run/step-2", "run/step-10"]
    assert names(store.snapshots("run/", sort="-val_loss")) == ["run/step-1", "run/step-10", "run/step-2", "run/step-3"]
    assert names(store.snapshots(sort=["val_loss", "name"], limit=2)) == ["run/step-2", "run/step-10"]
    assert names(store.snapshots(where="tag = 'kept'")) == ["run/step-10"]
    assert names(store.snapshots(where="step > 99")) == []


def test_the_best_is_found(store: Store) -> None:
    assert store.best("run/", "val_loss").name == "run/step-2"
    assert store.best("run/", "val_loss", mode="max").name == "run/step-1"
    assert store.best("run/", "val_loss", mode="max", where="step > 1").name == "run/step-10"
    with pytest.raises(NotFound, match="no snapshot that begins with 'other' has a finite number 'val_loss'"):
        store.best("other", "val_loss")


def test_a_bad_condition_is_refused(store: Store) -> None:
    with pytest.raises(BadExpression, match="expected a field or a value"):
        store.snapshots(where="val_loss <")
    with pytest.raises(BadExpression, match="mode is 'min' or 'max'"):
        store.best("run/", "val_loss", mode=cast("Any", "least"))


def test_a_change_to_metadata_that_was_returned_shows_nowhere_else(store: Store) -> None:
    found = store.snapshots("run/")[0]
    cast("dict[str, Any]", found.metadata)["metrics"]["val_loss"] = -1
    cast("dict[str, Any]", found.environment).clear()

    assert found.metadata["metrics"] == {"val_loss": 3.0}
    assert store.best("run/", "val_loss").name == "run/step-2"
    assert store.snapshots("run/")[0].environment["world_size"] == 1


def test_another_handle_sees_what_this_one_saves_deletes_and_overwrites(store: Store, tmp_path: Path) -> None:
    other = holdfast.open(tmp_path / "s")
    assert other.best("run/", "val_loss").name == "run/step-2"

    store.save("run/step-2", {"x": 9}, metadata={"metrics": {"val_loss": 9.0}}, overwrite=True)
    assert other.best("run/", "val_loss").name == "run/step-10"
    store.delete("run/step-1")
    store.save("run/step-11", {"x": 11}, metadata={"val_loss": 0.5})

    assert other.best("run/", "val_loss").name == "run/step-11"
    assert names(other.snapshots("run/")) == ["run/step-2", "run/step-3", "run/step-10", "run/step-11"]
