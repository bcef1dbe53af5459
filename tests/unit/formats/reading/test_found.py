"""Walks over the trees that readers find: names, renames, classes of containers, and a limit of depth."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch

from holdfast.errors import BadFile
from holdfast.formats.reading.found import iter_named_tensors, map_tree


def test_tensors_are_named_by_their_path_also_when_repeated() -> None:
    one = torch.ones(1)
    tree = {"a": [one, {"b": one}], 3: (torch.zeros(1), "text")}

    assert [name for name, _ in iter_named_tensors(tree)] == ["a.0", "a.1.b", "3.0"]


def test_a_copy_keeps_classes_attributes_and_order() -> None:
    ordered: Any = OrderedDict(z=1, a=2)
    ordered._metadata = {"version": 1}
    made: defaultdict[str, Any] = defaultdict(list, x=3)
    tree = {"o": ordered, "d": made, "t": (4, [5])}

    copied = map_tree(tree, lambda leaf: leaf * 10, rename=lambda found: {"z": "y"})

    assert copied == {"o": OrderedDict(y=10, a=20), "d": {"x": 30}, "t": (40, [50])}
    assert list(copied["o"]) == ["y", "a"]
    assert copied["o"]._metadata == {"version": 1}
    assert copied["d"].default_factory is list
    assert tree["o"] == OrderedDict(z=1, a=2)


def test_a_tree_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)

    with pytest.raises(BadFile, match="nested too deep"):
        list(iter_named_tensors(loop))
    with pytest.raises(BadFile, match="nested too deep"):
        map_tree(loop, lambda leaf: leaf)
