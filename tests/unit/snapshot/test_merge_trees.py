"""Trees of several ranks are merged: keys are added, and leaves that differ are named."""

from __future__ import annotations

import pytest

from holdfast.json_text import Json
from holdfast.snapshot.merge_trees import merge_trees, warn_alone, warn_of_variants


def test_keys_of_all_ranks_are_in_the_merged_tree() -> None:
    trees: list[Json] = [["dict", "a", 1, "b", ["dict", "x", 1]], ["dict", "b", ["dict", "y", 2], "c", 3]]

    assert merge_trees(trees) == (["dict", "a", 1, "b", ["dict", "x", 1, "y", 2], "c", 3], [])


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (["dict", "a", 1], ["dict", "a", 2], ["a"]),
        (["dict", "a", 1], ["dict", "a", 1.0], ["a"]),
        (["dict", "a", ["list", 1, 2]], ["dict", "a", ["list", 1, 3]], ["a.1"]),
        (["dict", "a", ["list", 1]], ["dict", "a", ["list", 1, 2]], ["a"]),
        (["dict", "a", ["tuple", 1]], ["dict", "a", ["list", 1]], ["a"]),
        (["list", ["dict", 5, 1]], ["list", ["dict", 5, 2]], ["0.5"]),
    ],
)
def test_of_leaves_that_differ_the_first_is_used_and_named_once(first: Json, second: Json, names: list[str]) -> None:
    assert merge_trees([first, second, second]) == (first, names)


def test_a_warning_names_some_of_the_values() -> None:
    with pytest.warns(UserWarning, match=r"^'run' was saved by 2 ranks and is loaded by 1.* v0, .*, v19 and 5 more\."):
        warn_of_variants("run", [f"v{number}" for number in range(25)], saved_by=2, loaded_by=1)


def test_a_snapshot_of_one_process_needs_no_warning() -> None:
    warn_alone("run", None)
