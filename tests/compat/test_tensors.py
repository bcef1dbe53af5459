"""A store with every kind of tensor, checked in: each of them still loads, bit for bit, and has the digest it had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.store import Store
from holdfast.store import open as open_store
from tests.compat.archive import unpack
from tests.compat.make_tensors import ARCHIVE, choose_names, make_plain, make_shared, make_tree
from tests.kit.capabilities import needs_torch
from tests.kit.tensors import SUBCLASSES, TENSORS, assert_same_tensor, find_facts
from tests.tensor_zoo import DTYPES

LATER = {"bcomplex32"}
"""Dtypes that torch has got since the store was made."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    place = unpack(ARCHIVE, tmp_path_factory.mktemp("tensors"))
    with open_store(place, read_only=True, types=SUBCLASSES) as found:
        yield found


@pytest.fixture(scope="module")
def names(store: Store) -> list[str]:
    """The names of all tensors in the store."""
    return list(store.snapshot("every")["tensors"].keys())


def find_kind(name: str) -> str:
    return name.partition("/")[0]


KINDS = [
    *(pytest.param(name, marks=needs_torch(name)) for name in ("float4_e2m1fn_x2", "float8_e8m0fnu")),
    *sorted({find_kind(name) for name in choose_names()} - {"float4_e2m1fn_x2", "float8_e8m0fnu", *LATER}),
]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_old_stores_are_what_they_were(store: Store, names: list[str], kind: str) -> None:
    here = [name for name in names if find_kind(name) == kind and name in TENSORS]
    found = store.load("every", only=[f"tensors.{name}" for name in here])["tensors"]
    assert found
    assert [name for name, tensor in found.items() if find_facts(tensor) != find_facts(TENSORS[name]())] == []


def test_plain_values_of_old_stores_are_what_they_were(store: Store) -> None:
    found, wanted = store.load("every", only="plain")["plain"], make_plain()
    states = [value["containers"][-1] for value in (found, wanted)]
    arrays = [value["numpy"].pop() for value in (found, wanted)]
    assert_same_tensor(states[0].pop("w"), states[1].pop("w"))
    assert states[0]._metadata == states[1]._metadata
    assert (arrays[0].dtype, arrays[0].tolist()) == (arrays[1].dtype, arrays[1].tolist())
    assert repr(found) == repr(wanted)


def test_memory_shared_in_old_stores_is_shared(store: Store) -> None:
    found, wanted = store.load("every", only="shared")["shared"], make_shared()
    for name, tensor in wanted.items():
        assert_same_tensor(found[name], tensor)
    assert found["base"] is found["same"]
    found["base"][1001] = -1
    assert (found["rows"][0, 1], found["stepped"][1001 // 3 + 1]) == (-1, 1002)
    found["gappy"][3] = -2.0
    assert found["tied"][3] == -2.0


def test_an_old_store_checks_clean(store: Store) -> None:
    assert store.check(read=True) == []


@needs_torch("float4_e2m1fn_x2", "float8_e8m0fnu")
@pytest.mark.slow
def test_the_digest_is_what_saving_it_today_gives(store: Store, names: list[str]) -> None:
    today = open_store("memory://", types=SUBCLASSES)
    assert today.save("every", make_tree(names), grads=True).digest == store.snapshot("every").digest


def test_every_dtype_and_layout_is_there_and_the_store_stays_small(names: list[str]) -> None:
    wanted = [name for name in choose_names() if not any(dtype in name for dtype in LATER)]
    missing = [dtype for dtype in DTYPES.keys() - LATER if not any(name.startswith(dtype + "/") for name in names)]
    assert missing == []
    assert set(wanted) <= set(names)
    assert ARCHIVE.stat().st_size < 100_000
