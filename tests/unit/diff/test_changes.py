"""The differences between two snapshots, as the texts and the card that people see."""

from __future__ import annotations

import torch

from holdfast.diff.changes import Aspect, Distance
from holdfast.objects.memory import MemoryStore
from holdfast.store import Store


def make_store() -> Store:
    """Return a store with two snapshots: a tensor and a value differ, one leaf is added and one is gone."""
    store = Store(MemoryStore())
    weight = torch.arange(12.0)
    store.save("a", {"w": weight, "lr": 0.1, "old": torch.zeros(3), "same": torch.ones(4)})
    store.save("b", {"w": weight + 1, "lr": 0.2, "new<b>": torch.zeros(3), "same": torch.ones(4)})
    return store


def test_a_diff_is_shown_as_names_and_counts() -> None:
    assert repr(make_store().diff("a", "b")) == "<Diff 'a' -> 'b': 1 added, 1 removed, 2 changed, 1 equal>"


def test_a_change_is_shown_as_the_line_that_the_command_line_prints() -> None:
    changes = {change.name: repr(change) for change in make_store().diff("a", "b").changes}

    assert changes["w"] == "<Change ~ w  float32 (12,)  values differ>"
    assert changes["lr"] == "<Change ~ lr  0.1 -> 0.2>"
    assert changes["old"] == "<Change - old  float32 (3,)>"


def test_the_card_lists_every_change_and_escapes_names() -> None:
    page = make_store().diff("a", "b", values=True)._repr_html_()

    for text in ("a → b", "~ w", "max abs 1 at (0,)", "0.1 -&gt; 0.2", "- old", "+ new&lt;b&gt;"):
        assert text in page


def test_the_card_of_equal_snapshots_says_so() -> None:
    store = make_store()

    assert "Nothing differs." in store.diff("a", "a")._repr_html_()


def test_an_aspect_of_a_part_names_the_part() -> None:
    assert str(Aspect("dtype", "float32", "bfloat16", "grad")) == "grad: dtype float32 -> bfloat16"


def test_a_distance_in_bytes_counts_them() -> None:
    assert str(Distance(10, 3, unit="byte")) == "3 of 10 bytes differ"
    assert str(Distance(10, 0)) == "values are the same"
