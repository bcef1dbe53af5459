"""Loading a tree: devices, verification, damage, repair from copies, pickles; wrong bytes are never returned."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import Corrupt, DigestMismatch, MissingChunk, NotFound, Unsupported
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import pack_key
from holdfast.snapshot.lazy import Snapshot
from holdfast.store import OpenOptions, Store
from tests.kit.saving import pack_of, rot
from tests.kit.tensors import SUBCLASSES, TENSORS, assert_same_tensor


class Bomb:
    """What leaves a file behind if somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore(), OpenOptions(types=SUBCLASSES))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def damage(store: Store, name: str, entry: str, at: int = 9) -> str:
    """Flip a bit of the first chunk of an entry; return the pack that it lies in."""
    location = pack_of(store.repository, name, entry)
    rot(store.repository.store, pack_key(location.pack_id), location.offset + at)
    return location.pack_id


def forge_notes(store: Store, tree: Any, note: Any) -> Snapshot:
    """Save a tree and return its snapshot, open, with another note on every entry."""
    store.save("x", tree)
    snapshot = store.snapshot("x")
    manifest = snapshot.open().reader.manifest
    manifest._head["notes"] = [note] * len(manifest._head["notes"])
    return snapshot


# Devices


def test_meta_tensors_are_specs_without_bytes(store: Store) -> None:
    tensor = torch.empty_strided((1 << 20, 1 << 20), (1, 1 << 20), dtype=torch.bfloat16, device="meta")
    result = store.save("x", tensor)
    assert result.logical_bytes == 0
    for device in ("cpu", "saved", "meta"):
        assert_same_tensor(store.load("x", device=device), tensor)


def test_tensors_go_to_the_device_that_was_asked_for(store: Store) -> None:
    base = noise(4, 6)
    store.save("x", [base, base.t(), base[:, ::2], TENSORS["sparse_coo/hybrid"](), TENSORS["jagged/whole"]()])
    found = store.load("x", device="meta")
    assert all(tensor.is_meta for tensor in found)
    assert [tensor.stride() for tensor in found[:3]] == [(6, 1), (1, 6), (6, 2)]
    assert not any(tensor.is_meta for tensor in store.load("x", device="saved"))


def test_the_state_of_generators_stays_on_the_cpu(store: Store) -> None:
    state = torch.get_rng_state()
    tree: dict[str, Any] = {"rng": {"cuda": torch.arange(16, dtype=torch.uint8)}, "default": state, "w": torch.ones(2)}
    store.save("x", tree)
    found = store.load("x", device="meta")
    assert found["w"].is_meta
    assert_same_tensor(found["default"], state)
    assert_same_tensor(found["rng"]["cuda"], tree["rng"]["cuda"])


@pytest.mark.parametrize("name", ["quint8/per channel 1", "qint8/whole", "nested/whole"])
def test_what_torch_cannot_hold_on_a_device_is_refused_by_name(store: Store, name: str) -> None:
    store.save("x", {"w": TENSORS[name]()})
    with pytest.raises(Unsupported, match=r"^'x', w: torch has no .* on the meta device.*load it to the CPU"):
        store.load("x", device="meta")


def test_a_saved_device_that_is_not_here_is_named(store: Store) -> None:
    opened = forge_notes(store, {"w": torch.ones(1)}, {"device": "cuda:3"})
    assert store.load(opened)["w"].device.type == "cpu"
    with pytest.raises(Unsupported, match=r"^w was on cuda:3, and cannot be put there: .*; pass device="):
        store.load(opened, device="saved")


def test_a_saved_device_that_is_none_is_refused(store: Store) -> None:
    opened = forge_notes(store, {"w": torch.ones(1)}, {"device": "nonsense"})
    with pytest.raises(Corrupt, match=r"^w: .*nonsense"):
        store.load(opened, device="saved")


def test_a_saved_device_is_gone_back_to(store: Store) -> None:
    opened = forge_notes(store, {"w": torch.ones(1)}, {"device": "meta"})
    assert store.load(opened, device="saved")["w"].is_meta


def test_a_device_that_is_none_is_refused(store: Store) -> None:
    store.save("x", {"w": torch.ones(1)})
    with pytest.raises(RuntimeError, match="nonsense"):
        store.load("x", device="nonsense")


# Choice


def test_only_what_is_chosen_is_loaded(store: Store) -> None:
    store.save("x", {"a": {"w": torch.ones(2), "b": 1}, "c": [torch.ones(1), 5]})
    assert store.load("x", only="a.b") == {"a": {"b": 1}}
    assert store.load("x", only=["c.1", "a.b"]) == {"a": {"b": 1}, "c": [None, 5]}
    with pytest.raises(NotFound, match=r"no leaf of 'x' fits \['z'\]; `holdfast show x` lists them"):
        store.load("x", only="z")


def test_only_one_of_tensors_that_lie_apart_in_memory_is_loaded(store: Store) -> None:
    base = noise(5000)
    store.save("x", {"all": base, "end": base[4990:], "middle": base[2000:2010]})
    found = store.load("x", only=["end", "middle"])
    assert_same_tensor(found["end"], base[4990:])
    assert_same_tensor(found["middle"], base[2000:2010])
    assert found["end"].untyped_storage().nbytes() < 200


def test_keys_are_renamed(store: Store) -> None:
    store.save("x", {"module.w": torch.ones(1), "module.b": 2})
    assert list(store.load("x", rename={"module.": ""})) == ["w", "b"]


# Damage


@pytest.mark.parametrize("verify", ["full", "fast"])
def test_a_flipped_bit_is_found_and_named(store: Store, verify: Any) -> None:
    store.save("run/1", {"model": {"w": noise(400, 400)}, "other": torch.ones(2)})
    pack = damage(store, "run/1", "model.w")
    with pytest.raises(DigestMismatch) as caught:
        store.load("run/1", verify=verify)
    text = str(caught.value)
    assert "'run/1', entry 'model.w', chunk " in text
    assert f"damaged in pack {pack}" in text
    assert "no other intact copy" in text
    assert caught.value.key == pack_key(pack)


def test_an_unverified_load_does_not_look(store: Store) -> None:
    tensor = noise(400)
    store.save("x", tensor)
    damage(store, "x", "value")
    found = store.load("x", verify=False)
    assert not torch.equal(found, tensor)
    assert found.shape == tensor.shape


def test_a_bad_way_to_verify_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="verify must be 'full', 'fast', 'device' or False, not True"):
        store.load("x", verify=True)  # type: ignore[arg-type]  # on purpose


def test_what_is_not_hit_loads_all_the_same(store: Store) -> None:
    tree = {"hit": noise(1000), "fine": noise(10, 100)}
    store.save("x", tree)
    damage(store, "x", "hit")
    assert_same_tensor(store.load("x", only="fine")["fine"], tree["fine"])


def test_a_second_intact_copy_heals(store: Store) -> None:
    tensor = noise(4000)
    store.save("x", {"w": tensor})
    damage(store, "x", "w")
    # Another handle reads what it would reuse, and so writes the chunk anew.
    Store(store.repository.store).save("y", {"w": tensor})
    assert_same_tensor(store.load("x")["w"], tensor)


def test_a_lost_pack_is_named(store: Store) -> None:
    store.save("x", {"w": noise(1000)})
    pack = pack_of(store.repository, "x", "w").pack_id
    store.repository.store.delete(pack_key(pack))
    with pytest.raises(MissingChunk, match=rf"'x', entry 'w', chunk .*: its pack {pack} is gone"):
        store.load("x")


def test_a_tree_and_entries_that_disagree_are_refused(store: Store) -> None:
    store.save("x", {"a": torch.ones(2), "b": "t" * 5000})
    opened = store.snapshot("x")
    opened.open().tree[2], opened.open().tree[4] = ["@tensor", 1], ["@str", 0]
    with pytest.raises(Corrupt, match=r"^'x', a: the stored tree and its entry disagree on what it is"):
        store.load(opened)


# Pickles


def test_a_pickle_needs_permission_on_both_sides(store: Store) -> None:
    value = Path.cwd  # a function, which nothing else can hold
    with pytest.raises(Unsupported, match=r"^f: a function cannot be saved; convert it, or pass allow_pickle=True"):
        store.save("x", {"f": value})
    store.save("x", {"f": value}, allow_pickle=True)
    with pytest.raises(Unsupported, match=r"^'x', f was pickled: loading it may run any code; pass allow_pickle=True"):
        store.load("x")
    assert store.load("x", allow_pickle=True) == {"f": value}


def test_what_was_pickled_is_not_run_without_permission(store: Store, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    store.save("x", {"bomb": Bomb(trap), "w": torch.ones(2)}, allow_pickle=True)
    with pytest.raises(Unsupported, match="was pickled"):
        store.load("x")
    snapshot = store.snapshot("x")
    assert snapshot.keys() == ["bomb", "w"]
    assert store.load("x", only="w")["w"].tolist() == [1.0, 1.0]
    assert store.check(read=True) == []
    assert not trap.exists()
    store.load("x", allow_pickle=True)
    assert trap.exists()


@pytest.mark.parametrize("tag", ["@array", "@str", "@bytes", "@bytearray", "@tensor"])
def test_a_pickle_under_another_tag_is_not_run_either(store: Store, tmp_path: Path, tag: str) -> None:
    trap = tmp_path / "sprung"
    store.save("x", {"bomb": pickle.dumps(Bomb(trap)) + bytes(5000)})
    opened = store.snapshot("x")
    opened.open().tree[2] = [tag, 0]
    if tag in ("@array", "@tensor", "@str"):
        with pytest.raises(Corrupt):
            store.load(opened)
    else:
        store.load(opened)
    assert not trap.exists()


def test_a_forged_pickle_node_is_not_run(store: Store, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    store.save("x", {"bomb": pickle.dumps(Bomb(trap)) + bytes(5000)})
    opened = store.snapshot("x")
    opened.open().tree[2] = ["@pickle", 0]
    with pytest.raises(Unsupported, match="was pickled"):
        store.load(opened)
    assert not trap.exists()


def test_a_pickle_that_cannot_be_read_says_so(store: Store) -> None:
    store.save("x", {"b": b"\x80nonsense" * 1000})
    opened = store.snapshot("x")
    opened.open().tree[2] = ["@pickle", 0]
    with pytest.raises(Corrupt, match=r"^'x', b was pickled and cannot be unpickled here"):
        store.load(opened, allow_pickle=True)


def test_a_value_that_cannot_be_pickled_either_is_refused_by_name(store: Store) -> None:
    with pytest.raises(Unsupported, match=r"^f: it cannot be pickled either"):
        store.save("x", {"f": lambda: 1}, allow_pickle=True)


def test_loading_twice_gives_memory_of_its_own(store: Store) -> None:
    store.save("x", {"w": torch.ones(3)})
    one, other = store.load("x"), store.load("x")
    one["w"].zero_()
    assert other["w"].tolist() == [1.0, 1.0, 1.0]


def test_a_snapshot_of_another_generation_is_loaded_as_it_was(store: Store) -> None:
    store.save("x", {"w": torch.ones(3)})
    before = store.snapshot("x")
    store.save("x", {"w": torch.zeros(3)}, overwrite=True)
    assert replace(before.record).generation == 0
    assert store.load(before)["w"].tolist() == [1.0, 1.0, 1.0]
