"""Lazy snapshots: what opening reads, how names are found, and what each tensor reports."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.cli.main import main
from holdfast.errors import AmbiguousName, Corrupt, NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import PACKS
from holdfast.repo.upkeep.collect import Rules
from holdfast.snapshot.lazy import LazyTensor, View
from holdfast.store import Store
from holdfast.store import open as open_store
from tests.kit.loading import noise
from tests.kit.patience import measure_cpu_s
from tests.kit.saving import Watched, pack_of, rot


@pytest.fixture
def watched() -> Watched:
    return Watched(MemoryStore())


def read_bytes(watched: Watched) -> int:
    """Return how many bytes of packs were read."""
    return sum(size for key, _, size in watched.reads if key.startswith(PACKS))


@pytest.fixture(scope="module")
def many() -> MemoryStore:
    """A store with a snapshot of 10,000 tensors of 2 KiB each."""
    memory = MemoryStore()
    tensors = torch.arange(10_000 * 512, dtype=torch.float32).reshape(10_000, 512)
    tree = {f"layers.{number}.weight": tensor.clone() for number, tensor in enumerate(tensors)}
    Store(memory).save("many", {"model": tree, "step": 3})
    return memory


# What is read


def test_opening_reads_the_manifest_and_no_pack(many: MemoryStore) -> None:
    watched = Watched(many)
    snap = Store(watched).snapshot("many")
    assert not [key for key, _, _ in watched.reads if key.startswith("manifests/")]

    names = snap.keys()

    assert len(names) == len(snap) == 10_001
    assert snap["step"] == 3
    assert snap["model.layers.7.weight"].shape == (512,)
    assert read_bytes(watched) == 0
    assert len([key for key, _, _ in watched.reads if key.startswith("manifests/")]) == 1


def test_one_tensor_of_many_reads_less_than_a_hundredth(many: MemoryStore) -> None:
    watched = Watched(many)
    snap = Store(watched).snapshot("many")

    found = snap["model.layers.77.weight"].read()

    assert found.tolist() == list(range(77 * 512, 78 * 512))
    assert read_bytes(watched) <= snap.logical_bytes // 100
    assert read_bytes(watched) == 2048


def test_opening_and_listing_many_tensors_is_quick(many: MemoryStore) -> None:
    names: list[str] = []

    taken_s = measure_cpu_s(lambda: names.extend(Store(many).snapshot("many").keys()))

    assert len(names) == 10_001
    # About 0.1 s; another algorithm would take minutes.
    assert taken_s < 10.0


# Names


def test_names_lead_to_tensors_values_and_views(store: Store) -> None:
    store.save("x", {"model": {"layers.0.weight": noise(2), "layers": [noise(3)]}, "step": 5, "none": None})
    snap = store.snapshot("x")

    assert snap.keys() == ["model.layers.0.weight", "model.layers.0", "step", "none"]
    assert isinstance(snap["model"], View)
    assert snap["model"].keys() == ["layers.0.weight", "layers.0"]
    assert snap["model"]["layers.0.weight"].name == "model.layers.0.weight"
    assert torch.equal(snap["model"]["layers.0"].read(), noise(3))
    assert (snap["step"], snap["none"]) == (5, None)
    assert "model" in snap
    assert "model.layers.0" in snap
    assert "mod" not in snap
    assert "layers.0" in snap["model"]


def test_a_view_loads_what_is_below_it(store: Store) -> None:
    store.save("x", {"a": {"b": noise(2), "c": [1, 2]}, "d": 3})

    found = store.snapshot("x")["a"].load()

    assert torch.equal(found.pop("b"), noise(2))
    assert found == {"c.0": 1, "c.1": 2}


def test_an_unknown_name_is_not_found(store: Store) -> None:
    store.save("x", {"a": 1})

    with pytest.raises(NotFound, match="no leaf 'b' in 'x'; `holdfast show x` lists them"):
        store.snapshot("x")["b"]
    with pytest.raises(NotFound, match=r"nothing at path \('a', 'b'\) in 'x'"):
        store.snapshot("x")["a", "b"]


def test_a_name_that_two_leaves_share_is_ambiguous_and_a_path_is_not(store: Store) -> None:
    store.save("x", {"a": {"b": noise(1)}, "a.b": noise(2), 1: "int", "1": "text"})
    snap = store.snapshot("x")

    with pytest.raises(AmbiguousName, match=r"2 leaves of 'x' have the name 'a.b'; ask by path: .*'a', 'b'") as caught:
        snap["a.b"]

    assert len(caught.value.paths) == 2
    assert "a.b" in snap
    assert snap["a", "b"].shape == (1,)
    assert snap[("a.b",)].shape == (2,)
    assert (snap[(1,)], snap[("1",)]) == ("int", "text")
    assert snap[("a",)].keys() == ["b"]


def test_paths_begin_at_the_snapshot(store: Store) -> None:
    store.save("x", {"a": {"b": 1}})

    with pytest.raises(NotFound, match="paths begin at the snapshot itself"):
        store.snapshot("x")["a"]["b",]


def test_files_that_were_put_are_bytes_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"hello")
    assert main(["-s", str(tmp_path / "s"), "init"]) == 0
    assert main(["-s", str(tmp_path / "s"), "put", "files", str(tmp_path / "a.bin")]) == 0
    snap = open_store(tmp_path / "s").snapshot("files")

    assert snap.keys() == ["a.bin"]
    assert snap["a.bin"] == b"hello"


# What is known


def test_a_tensor_tells_what_it_is_without_being_read(watched: Watched) -> None:
    store = Store(watched)
    store.save("x", {"w": noise(300, 40, dtype=torch.bfloat16)})
    lazy = store.snapshot("x")["w"]

    assert isinstance(lazy, LazyTensor)
    assert (lazy.name, lazy.shape, lazy.dtype, lazy.size_bytes) == ("w", (300, 40), torch.bfloat16, 24_000)
    assert repr(lazy) == "<LazyTensor 'w' (300, 40) torch.bfloat16, 23.4 KiB>"
    assert len(lazy.digest) == 32
    assert read_bytes(watched) == 0


def test_equal_digests_mean_equal_tensors(store: Store) -> None:
    base = noise(4, 4)
    store.save("x", {"a": base, "b": base.clone(), "c": noise(2, 8), "d": base.t().clone(), "e": base + 1})
    store.save("y", {"other": {"name": base.clone()}})
    snap, other = store.snapshot("x"), store.snapshot("y")

    digests = {name: snap[name].digest for name in snap.keys()}  # noqa: SIM118  # no dict

    assert digests["a"] == digests["b"] == other["other.name"].digest
    assert len(set(digests.values())) == 4


def test_composite_tensors_are_read_whole(store: Store) -> None:
    value = noise(3, 3).to_sparse()
    store.save("x", {"s": value, "t": noise(3)})
    lazy = store.snapshot("x")["s"]

    assert repr(lazy) == f"<LazyTensor 's' sparse_coo (3, 3), {lazy.size_bytes} B>"
    assert lazy.shape == (3, 3)
    assert lazy.dtype == torch.float32
    assert torch.equal(lazy.read().to_dense(), value.to_dense())
    assert torch.equal(lazy[1].to_dense(), value[1].to_dense())
    assert lazy.size_bytes > 9 * 4
    assert lazy.digest != store.snapshot("x")["t"].digest


def test_a_snapshot_tells_what_it_is(store: Store) -> None:
    result = store.save("run/1", {"a": noise(2)}, metadata={"loss": 0.5})
    snap = store.snapshot("run/1")

    assert (snap.name, snap.digest, snap.logical_bytes) == ("run/1", result.digest, 8)
    assert snap.metadata == {"loss": 0.5}
    assert snap.environment["torch"] == str(torch.__version__)
    assert repr(snap) == f"<Snapshot 'run/1' {result.digest.hex()[:12]}, 8 B>"
    assert snap.time.tzinfo is not None


# Health


def test_verify_reads_every_byte_and_names_what_is_damaged(store: Store) -> None:
    store.save("x", {"a": noise(3000), "b": noise(3000, seed=1)})
    store.snapshot("x").verify()
    location = pack_of(store.repository, "x", "b")
    rot(store.repository.store, f"{PACKS}{location.pack_id}", location.offset)

    with pytest.raises(Corrupt, match=f"'x', entry 'b', chunk .*{location.pack_id}"):
        store.snapshot("x").verify()


def test_a_damaged_tensor_is_not_returned_and_its_neighbour_is(store: Store) -> None:
    store.save("x", {"a": noise(3000), "b": noise(3000, seed=1)})
    location = pack_of(store.repository, "x", "b")
    rot(store.repository.store, f"{PACKS}{location.pack_id}", location.offset)
    snap = store.snapshot("x")

    with pytest.raises(Corrupt, match="entry 'b'"):
        snap["b"].read()
    with pytest.raises(Corrupt, match="entry 'b'"):
        snap["b"][:10]
    assert torch.equal(snap["a"].read(), noise(3000))


# Maps


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return open_store(tmp_path / "s")


def test_writing_a_mapped_tensor_does_not_change_the_store(local: Store) -> None:
    local.save("x", {"a": noise(5000)})
    mapped = local.load("x", mmap=True)["a"]

    mapped.zero_()

    assert mapped.count_nonzero() == 0
    assert torch.equal(local.load("x")["a"], noise(5000))
    local.snapshot("x").verify()


def test_what_is_mapped_and_what_is_not_is_counted(local: Store) -> None:
    shared = noise(2000)
    tree = {"a": noise(5000), "b": noise(5000, seed=1), "gappy": noise(100, 100)[:, :50], "t": shared, "u": shared[:9]}
    local.save("x", tree)

    found: dict[str, torch.Tensor] = local.load("x", mmap=True)

    assert (local.statistics().mapped_entries, local.statistics().unmapped_entries) == (2, 3)
    assert all(torch.equal(found[name], value) for name, value in tree.items())


def test_a_store_that_cannot_map_reads_instead(store: Store) -> None:
    store.save("x", {"a": noise(5000)})

    found = store.load("x", mmap=True)

    assert torch.equal(found["a"], noise(5000))
    assert store.statistics().unmapped_entries == 1


def test_a_flipped_bit_shows_in_a_map_and_is_found_by_verify(local: Store, tmp_path: Path) -> None:
    local.save("x", {"a": torch.zeros(5000)})
    location = pack_of(local.repository, "x", "a")
    path = tmp_path / "s" / PACKS / location.pack_id
    os.chmod(path, 0o644)
    with path.open("r+b") as file:
        file.seek(location.offset + 3)
        file.write(b"\x40")

    mapped = local.load("x", mmap=True)["a"]

    assert mapped.count_nonzero() == 1
    with pytest.raises(Corrupt, match="entry 'a'"):
        local.snapshot("x").verify()


def test_a_mapped_tensor_outlives_its_snapshot(local: Store, tmp_path: Path) -> None:
    local.save("x", {"a": noise(5000)})
    mapped = local.load("x", mmap=True)["a"]
    local.delete("x")

    local.gc(Rules(min_age_s=0))

    assert list((tmp_path / "s" / PACKS).iterdir()) == []
    assert torch.equal(mapped, noise(5000))


def test_a_snapshot_that_is_deleted_while_it_is_open_is_not_found(local: Store) -> None:
    local.save("x", {"a": noise(5000)})
    snap = local.snapshot("x")
    lazy = snap["a"]
    local.delete("x")
    local.gc(Rules(min_age_s=0))

    with pytest.raises(NotFound, match="'x' was deleted or overwritten while it was read"):
        lazy.read()
    with pytest.raises(NotFound, match="no snapshot 'x'"):
        local.snapshot("x")


def test_snapshots_are_not_pickled_by_accident(store: Store) -> None:
    store.save("x", {"a": noise(5)})
    snap: Any = store.snapshot("x")

    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(snap)


def test_a_name_that_is_not_there_comes_with_the_one_that_was_meant(store: Store) -> None:
    store.save("x", {"model": {"weight": torch.ones(1), "bias": torch.ones(1)}})

    with pytest.raises(NotFound, match=r"no leaf 'model\.weigth' in 'x'; did you mean 'model\.weight'\?"):
        store.snapshot("x")["model.weigth"]
