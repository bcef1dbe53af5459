"""A load with `since`: only chunks that the target lacks are read, whatever the caller believes of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
import holdfast.snapshot.into.in_place
from holdfast.digest import hash_bytes
from holdfast.errors import Corrupt, Mismatch, OutOfMemory
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import PACKS
from holdfast.snapshot.into.load_into import hash_memory
from holdfast.store import Store
from tests.kit.tensors import raw_bytes

CHUNK = 1 << 20
ITEMS = CHUNK // 4


class CountingStore(MemoryStore):
    """Counts the bytes that are read from packs."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0
        self._count_lock = threading.Lock()

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        if key.startswith(PACKS):
            with self._count_lock:
                self.read_bytes += buffer.nbytes
        super().read_into(key, start, buffer)

    def take(self) -> int:
        """Return how many bytes were read since the last call."""
        found, self.read_bytes = self.read_bytes, 0
        return found


@pytest.fixture
def objects() -> CountingStore:
    return CountingStore()


@pytest.fixture
def store(objects: CountingStore) -> Store:
    return Store(objects)


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def make_tree(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a tensor of four chunks, and a small one."""
    return {"large": noise(4 * ITEMS, seed), "small": noise(6000, seed + 1)}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in make_tree().items()}


def are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(raw_bytes(one[name]) == raw_bytes(other[name]) for name in one)


def test_only_the_changed_chunk_of_a_large_tensor_is_read(store: Store, objects: CountingStore) -> None:
    tree, target = make_tree(), zeros()
    store.save("v/1", tree)
    store.load_into("v/1", target)
    tree["large"][2 * ITEMS + 7] += 1
    store.save("v/2", tree)
    objects.take()

    assert store.load_into("v/2", target, since="v/1") is target

    assert are_equal(target, tree)
    assert objects.take() == CHUNK


def test_adjacent_and_separate_changes_are_both_found(store: Store, objects: CountingStore) -> None:
    tree, target = {"a": noise(7 * ITEMS + 5)}, {"a": torch.zeros(7 * ITEMS + 5)}
    store.save("v/1", tree)
    store.load_into("v/1", target)
    for chunk in (0, 1, 4, 7):
        tree["a"][chunk * ITEMS] += 1
    store.save("v/2", tree)
    objects.take()

    store.load_into("v/2", target, since="v/1")

    assert are_equal(target, tree)
    assert objects.take() < 4 * CHUNK


def test_nothing_is_read_if_nothing_changed(store: Store, objects: CountingStore) -> None:
    tree, target = make_tree(), zeros()
    store.save("v/1", tree)
    store.save("v/2", tree)
    store.load_into("v/1", target)
    version = target["large"]._version
    objects.take()

    store.load_into("v/2", target, since="v/1")

    assert objects.take() == 0
    assert target["large"]._version == version, "nothing was written"


def test_a_leaf_that_torch_has_changed_is_noticed(store: Store, objects: CountingStore) -> None:
    tree, target = make_tree(), zeros()
    store.save("v/1", tree)
    store.load_into("v/1", target)
    target["large"][5] = 7
    target["small"].mul_(2)

    store.load_into("v/1", target, since="v/1")

    assert are_equal(target, tree)


def test_a_wrong_belief_changes_nothing_but_the_speed(store: Store) -> None:
    """The tree holds neither what is said nor anything that was saved."""
    store.save("v/1", make_tree(1))
    store.save("v/2", make_tree(2))
    target = make_tree(3)

    store.load_into("v/2", target, since="v/1")

    assert are_equal(target, make_tree(2))


def test_a_tree_that_was_filled_elsewhere_is_hashed_and_not_read(store: Store, objects: CountingStore) -> None:
    tree = make_tree()
    store.save("v/1", tree)
    target = {name: tensor.clone() for name, tensor in tree.items()}
    objects.take()

    store.load_into("v/1", target, since="never saved")

    assert objects.take() == 0
    assert are_equal(target, tree)


def test_a_write_that_torch_does_not_count_is_found_only_by_a_check(store: Store) -> None:
    tree, target = make_tree(), zeros()
    store.save("v/1", tree)
    store.load_into("v/1", target)
    target["large"].data[3] = 5.0

    store.load_into("v/1", target, since="v/1")
    assert target["large"][3] == 5.0, "as documented"
    store.load_into("v/1", target, since="v/1", check_target=True)

    assert are_equal(target, tree)


def test_unverified_bytes_are_not_remembered(store: Store, objects: CountingStore) -> None:
    tree, target = make_tree(), zeros()
    store.save("v/1", tree)
    store.load_into("v/1", target, verify=False)

    assert len(store._held) == 0
    store.load_into("v/1", target, since="v/1")
    assert are_equal(target, tree)


def test_a_check_needs_a_belief(store: Store) -> None:
    store.save("v/1", make_tree())

    with pytest.raises(ValueError, match="check_target=True needs since="):
        store.load_into("v/1", zeros(), check_target=True)


def test_a_damaged_chunk_leaves_the_tree_as_it_was(store: Store, objects: CountingStore) -> None:
    old, target = make_tree(), zeros()
    store.save("v/1", old)
    store.load_into("v/1", target)
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["large"][0] += 1
    new["large"][3 * ITEMS] += 1
    new["small"][0] += 1
    packs = {info.key for info in objects.list(PACKS)}
    store.save("v/2", new)
    (pack,) = {info.key for info in objects.list(PACKS)} - packs
    data = bytearray(objects.read(pack, limit_bytes=1 << 30))
    data[len(data) // 2] ^= 1
    objects.delete(pack)
    objects.create(pack, bytes(data))

    with pytest.raises(Corrupt) as caught:
        store.load_into("v/2", target, since="v/1")

    assert are_equal(target, old)
    assert caught.value.overwritten == ()


def test_a_snapshot_that_does_not_fit_is_refused_as_ever(store: Store) -> None:
    store.save("v/1", {"a": noise(9)})
    store.save("v/2", {"a": noise(8)})
    target = {"a": torch.zeros(9)}
    store.load_into("v/1", target)

    with pytest.raises(Mismatch, match="shape"):
        store.load_into("v/2", target, since="v/1")

    assert are_equal(target, {"a": noise(9)})


def test_leaves_may_be_added_removed_and_replaced(store: Store) -> None:
    store.save("v/1", {"a": noise(5000), "n": 1, "gone": noise(3)})
    store.save("v/2", {"a": noise(5000, 2), "n": 2, "new": noise(4)})
    target: dict[str, Any] = {"a": torch.zeros(5000), "n": 0}
    store.load_into("v/1", target, strict=False)
    target["new"] = torch.zeros(4)

    store.load_into("v/2", target, since="v/1")

    assert target["n"] == 2
    assert raw_bytes(target["a"]) == raw_bytes(noise(5000, 2))
    assert raw_bytes(target["new"]) == raw_bytes(noise(4))


def test_tied_and_overlapping_tensors_get_the_new_values(store: Store) -> None:
    def make(seed: int) -> dict[str, torch.Tensor]:
        base = noise(3 * ITEMS, seed)
        return {"a": base, "tied": base, "view": base[100 : ITEMS + 100]}

    target = make(9)
    store.save("v/1", make(1))
    store.save("v/2", make(2))
    store.load_into("v/1", target)

    store.load_into("v/2", target, since="v/1")

    assert are_equal(target, make(2))
    assert target["view"].data_ptr() == target["a"].data_ptr() + 400


@pytest.mark.parametrize("options", [{"cast": True}, {"rename": {"model": "policy"}}])
def test_casts_and_renames_work(store: Store, options: dict[str, Any]) -> None:
    dtype = torch.float64 if "cast" in options else torch.float32
    key = "policy" if "rename" in options else "model"
    target = {key: torch.zeros(3 * ITEMS, dtype=dtype)}
    for version in (1, 2):
        store.save(f"v/{version}", {"model": noise(3 * ITEMS, version)})
    store.load_into("v/1", target, **options)

    store.load_into("v/2", target, since="v/1", **options)

    assert torch.equal(target[key], noise(3 * ITEMS, 2).to(dtype))


class Scaled(nn.Linear):
    """A module whose own code changes its weights after a load."""

    def _rescale(self, module: nn.Module, incompatible: object) -> None:
        with torch.no_grad():
            self.weight.mul_(2)


def test_a_module_that_changes_what_it_loads_is_loaded_in_full(store: Store) -> None:
    source, target = nn.Linear(300, 300), Scaled(300, 300)
    target.register_load_state_dict_post_hook(target._rescale)  # type: ignore[no-untyped-call]  # torch's
    store.save("v/1", source)
    store.load_into("v/1", target)
    assert torch.equal(target.weight, 2 * source.weight)

    store.load_into("v/1", target, since="v/1")

    assert torch.equal(target.weight, 2 * source.weight), "not four times"


def test_modules_and_optimizers_follow(store: Store) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()

    def make() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    source, target = make(), make()
    train(**source)
    store.save("v/1", source)
    store.load_into("v/1", target)
    train(**source)
    store.save("v/2", source)

    store.load_into("v/2", target, since="v/1")

    for name in source:
        assert store.save("check", {name: source[name].state_dict()}, overwrite=True).digest == (
            store.save("check", {name: target[name].state_dict()}, overwrite=True).digest
        )


def test_tensors_of_inference_mode_have_no_counter_and_are_hashed(store: Store) -> None:
    tree = make_tree()
    store.save("v/1", tree)
    with torch.inference_mode():
        target = zeros()
        store.load_into("v/1", target)
        target["large"][4] = 9
        store.load_into("v/1", target, since="v/1")

        assert are_equal(target, tree)


def test_memory_for_the_changes_is_checked_before_anything_changes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, target = make_tree(), zeros()
    store.save("v/1", old)
    store.load_into("v/1", target)
    store.save("v/2", make_tree(5))
    monkeypatch.setattr(holdfast.snapshot.into.in_place, "read_memory_facts", lambda path: {"MemAvailable": 3000})

    with pytest.raises(OutOfMemory, match=r"since= needs \d+ bytes of new memory for a second copy of what changes: 3"):
        store.load_into("v/2", target, since="v/1")

    assert are_equal(target, old)


def test_a_freed_tensor_is_not_mistaken_for_a_new_one_at_its_address(store: Store) -> None:
    store.save("v/1", make_tree())
    target = zeros()
    store.load_into("v/1", target)
    assert len(store._held) == 2
    del target

    for _ in range(3):
        fresh = zeros()
        store.load_into("v/1", fresh, since="v/1")
        assert are_equal(fresh, make_tree())
        del fresh
    assert len(store._held) <= 2, "notes of freed memory are dropped"


def test_a_local_store_reads_the_same(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "store")
    tree, target = make_tree(), zeros()
    store.save("v/1", tree)
    store.load_into("v/1", target)
    tree["large"][ITEMS] += 1
    store.save("v/2", tree)
    before = store.statistics().stages["read"].size_bytes

    store.load_into("v/2", target, since="v/1")

    assert are_equal(target, tree)
    assert store.statistics().stages["read"].size_bytes - before == CHUNK


@pytest.mark.parametrize("rows", [1, 700, 3000])
def test_a_copy_of_memory_with_gaps_lives_until_it_is_hashed(rows: int) -> None:
    memory = torch.arange(rows * 400, dtype=torch.int32).view(rows, 400)[:, ::2]

    assert hash_memory(memory) == hash_bytes(memory.numpy().tobytes())
