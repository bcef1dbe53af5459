"""Facts of leaves: kind, dtype, shape and size from the manifest alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.diff.facts import LeafFacts, iter_described, join_role, parse_shape
from holdfast.errors import Corrupt
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.read.reader import open_snapshot
from holdfast.snapshot.opened import Opened
from holdfast.store import Store


def describe(tree: object) -> dict[str, LeafFacts]:
    store = Store(MemoryStore())
    store.save("a", tree)
    with Opened(open_snapshot(store.repository, store.snapshot("a").record)) as opened:
        return {each.leaf.name: each.facts for each in iter_described(opened.reader.manifest, opened.tree)}


def test_leaves_are_described_without_their_bytes() -> None:
    found = describe({"w": torch.zeros(2, 3).bfloat16(), "n": np.zeros(4, dtype=np.int16), "lr": 0.1})

    assert found["w"] == LeafFacts("tensor", 12, "bfloat16", (2, 3))
    assert str(found["w"]) == "bfloat16 (2, 3)"
    assert (found["n"].kind, found["n"].size_bytes, found["n"].shape) == ("array", 8, (4,))
    assert (found["lr"].size_bytes, str(found["lr"])) == (0, "0.1")


def test_a_tensor_made_of_others_has_their_size() -> None:
    found = describe({"s": torch.eye(3).to_sparse()})["s"]

    assert (found.kind, found.dtype, found.shape) == ("sparse_coo", "float32", (3, 3))
    assert found.size_bytes == 3 * 4 + 2 * 3 * 8


@pytest.mark.parametrize("shape", [None, "3", [-1], [1.0], [True], [1 << 61], [1] * 65])
def test_what_is_no_shape_is_refused(shape: Json) -> None:
    with pytest.raises(Corrupt, match="w: the stored tree has a malformed leaf"):
        parse_shape(shape, "w")


def test_roles_are_joined_by_a_dot() -> None:
    assert (join_role("", "grad"), join_role("a", ""), join_role("a", "b")) == ("grad", "a", "a.b")
