"""Saving a tree: what is counted, what is recorded, what a repeated save does, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.errors import NameInUse, Unsupported
from holdfast.objects.memory import MemoryStore
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.read.reader import SnapshotReader
from holdfast.snapshot.save import SaveOptions, make_request
from holdfast.store import OpenOptions, Store
from holdfast.trees.registered import Types


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore())


def make_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(100, 30, generator=generator), "step": 7, "names": ["a", "b"]}


def test_every_leaf_that_has_bytes_is_an_entry_and_the_tree_is_the_spec(store: Store) -> None:
    store.save("x", {"w": torch.ones(2), "note": "n" * 5000, "step": 3})
    repo = store.repository
    with SnapshotReader(repo, read_snapshot(repo.store, "x")) as reader:
        assert list(reader.manifest.names) == ["w", "note"]
        assert reader.manifest.spec == {"tree": ["dict", "w", ["@tensor", 0], "note", ["@str", 1], "step", 3]}


def test_a_request_reads_no_tensor() -> None:
    tensor = torch.zeros(4)
    request = make_request("x", [tensor], SaveOptions(), Types())
    tensor[2] = 5.0
    assert bytes(request.sources[0].read(8, 12)) == tensor[2:3].numpy().tobytes()


def test_a_second_save_of_the_same_tree_writes_nothing(store: Store) -> None:
    first = store.save("x", make_state())
    again = store.save("x", make_state())
    elsewhere = store.save("y", make_state())
    assert (again.existed, again.new_bytes, again.digest) == (True, 0, first.digest)
    assert (elsewhere.existed, elsewhere.new_bytes, elsewhere.digest) == (False, 0, first.digest)


def test_another_tree_under_the_name_is_refused_unless_it_may_overwrite(store: Store) -> None:
    store.save("x", make_state())
    with pytest.raises(NameInUse, match="'x' is in use and holds other content"):
        store.save("x", make_state(1))
    assert torch.equal(store.load("x")["w"], make_state()["w"])
    store.save("x", make_state(1), overwrite=True)
    assert torch.equal(store.load("x")["w"], make_state(1)["w"])


def change_dtype(state: dict[str, Any]) -> None:
    state["w"] = state["w"].view(torch.int32)


def change_stride(state: dict[str, Any]) -> None:
    state["w"] = state["w"].view(30, 100).t()


def change_role(state: dict[str, Any]) -> None:
    state["w"] = torch.nn.Parameter(state["w"])


def change_order(state: dict[str, Any]) -> None:
    state["w"] = state.pop("w")


def change_kind(state: dict[str, Any]) -> None:
    state["names"] = tuple(state["names"])


def change_number(state: dict[str, Any]) -> None:
    state["step"] = 7.0


def change_bit(state: dict[str, Any]) -> None:
    state["w"].view(torch.int32)[99, 29] ^= 1


@pytest.mark.parametrize(
    "change", [change_dtype, change_stride, change_role, change_order, change_kind, change_number, change_bit]
)
def test_whatever_changes_changes_the_digest(store: Store, change: Any) -> None:
    first = store.save("x", make_state())
    state = make_state()
    change(state)
    assert store.save("y", state).digest != first.digest


def test_what_shares_memory_has_another_digest_than_what_is_equal(store: Store) -> None:
    tensor = torch.ones(600)
    tied = store.save("tied", [tensor, tensor.view(600)])
    apart = store.save("apart", [tensor, tensor.clone()])
    same = store.save("same", [tensor, tensor])
    assert len({tied.digest, apart.digest, same.digest}) == 3


def test_the_environment_is_recorded_and_not_part_of_the_content() -> None:
    inner = MemoryStore()
    first = Store(inner).save("x", make_state())
    second = Store(inner, OpenOptions(environment=False)).save("y", make_state())
    assert first.digest == second.digest
    assert "torch" in Store(inner).snapshot("x").environment
    assert Store(inner).snapshot("y").environment == {}


def test_metadata_is_kept_and_must_be_json(store: Store) -> None:
    store.save("x", make_state(), metadata={"loss": 0.5})
    assert store.snapshot("x").metadata == {"loss": 0.5}
    with pytest.raises(Unsupported, match="the metadata of 'y' is not plain JSON"):
        store.save("y", make_state(), metadata={"loss": torch.ones(1)})


def test_a_file_saved_by_bytes_alone_is_a_dict_of_bytes(store: Store) -> None:
    store.save("x", {"big": b"z" * 9000, "small": b"s", "array": bytearray(b"a" * 5000)})
    assert store.load("x") == {"big": b"z" * 9000, "small": b"s", "array": bytearray(b"a" * 5000)}


@pytest.mark.parametrize("tree", [None, 5, "text", [], {}, torch.ones(2, 2), b"x" * 9999], ids=repr)
def test_anything_may_be_the_whole_tree(store: Store, tree: Any) -> None:
    store.save("x", tree)
    found = store.load("x")
    assert torch.equal(found, tree) if isinstance(tree, torch.Tensor) else found == tree


def test_names_that_are_no_valid_text_are_kept(store: Store) -> None:
    tree = {"\ud800": torch.ones(1), "a\x00b": torch.ones(2), "": torch.ones(3), 3: torch.ones(4), None: torch.ones(5)}
    store.save("x", tree)
    assert list(store.load("x")) == list(tree)
