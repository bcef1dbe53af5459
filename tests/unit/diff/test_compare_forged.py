"""Forged snapshots are refused by name, and quickly."""

from __future__ import annotations

import pytest

from holdfast.errors import Corrupt, HoldfastError, NewerFormat
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.write.writer import Request, save
from holdfast.store import Store


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore())


@pytest.mark.parametrize(
    ("node", "spec", "error"),
    [
        (["@tensor", 7], {}, Corrupt),
        (["@tensor", -1], {}, Corrupt),
        (["@tensor", True], {}, Corrupt),
        (["@tensor"], {}, Corrupt),
        (["@tensor", 0, "x"], {}, Corrupt),
        (["@parts", "sparse_coo", [], None], {}, Corrupt),
        (["@parts", "sparse_coo", {"shape": 5}, None, "values", ["@tensor", 0]], {}, Corrupt),
        (["@parts", "x", {}, None, "values", ["@tensor", 0], "values", ["@tensor", 0]], {}, Corrupt),
        (["@grad", ["@tensor", 0]], {}, Corrupt),
        (["@tides", 0], {}, NewerFormat),
        (["@tensor", 0], {"type": "tensor", "dtype": "float32", "shape": [99]}, Corrupt),
        (["@tensor", 0], {"type": "tensor", "dtype": "float32", "shape": [1], "stride": []}, Corrupt),
        (["@tensor", 0], {"type": "tensor", "dtype": "float32", "shape": "x"}, Corrupt),
        (["@tensor", 0], {"type": "tensor", "dtype": "int9999999999", "shape": [1]}, Corrupt),
        (["@tensor", 0], {"type": "array", "dtype": "<f4", "shape": [-1]}, Corrupt),
    ],
)
def test_a_forged_tree_is_refused(store: Store, node: Json, spec: Json, error: type[HoldfastError]) -> None:
    for name, data in (("a", b"abcd"), ("b", b"efgh")):
        save(store.repository, Request(name, [BytesSource("x", data, spec)], spec={"tree": ["dict", "x", node]}))

    with pytest.raises(error, match="x"):
        store.diff("a", "b")


def test_a_forged_view_of_a_few_bytes_as_many_ends_soon(store: Store) -> None:
    for name, step in (("a", 1), ("b", 2)):
        spec: Json = {"type": "tensor", "dtype": "uint8", "shape": [1 << 20, 1 << 20], "stride": [1, step]}
        data = bytes(1 + 3 * ((1 << 20) - 1))
        save(
            store.repository,
            Request(name, [BytesSource("x", data, spec)], spec={"tree": ["dict", "x", ["@tensor", 0]]}),
        )

    assert [change.what for change in store.diff("a", "b", values=True).changes] == [("strides", "values")]
