"""What a save copies from a device: what the store lacks. `test_accelerator.py` runs this beside a fake one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_state

import holdfast
import holdfast.dcp
from holdfast.digest import Digest, hash_bytes
from holdfast.errors import DeviceFault, SourceChanged
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.layout import PACKS
from holdfast.repo.handle.repository import MIN_BUDGET_BYTES
from holdfast.repo.upkeep.collect import Rules
from holdfast.snapshot import save as device_digests
from holdfast.store import Store
from holdfast.tensors.device_digest import choice
from holdfast.tensors.device_digest.pieces import DevicePiece
from tests.integration.accelerator import ACCELERATOR, DEVICE, digest_quickly
from tests.kit.dcp_calls import ALONE

MIB: Final = 1 << 20
SaveTree = Callable[[Store, str, Any], object]


def save(store: Store, name: str, tree: Any) -> object:
    return store.save(name, tree)


def save_in_background(store: Store, name: str, tree: Any) -> object:
    return store.save_async(name, tree).wait()


def save_within_budget(store: Store, name: str, tree: Any) -> object:
    return store.save_async(name, tree, staging="budget").wait()


WAYS: Final = [save, save_in_background, save_within_budget]
ways = pytest.mark.parametrize("save_tree", WAYS, ids=lambda way: way.__name__)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_backend", lambda *_: digest_quickly)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with holdfast.open(tmp_path / "ckpts") as store:
        yield store


def make_model(rows: int = 64) -> dict[str, Any]:
    """Make 64 matrices of 64 KiB in each of two dtypes, a view, a gappy one, values for the manifest, a CPU tensor."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"w{at}": torch.randn(128, 128, generator=generator).to(DEVICE) for at in range(rows)}
    halves = {f"h{at}": torch.randn(256, 128, generator=generator).bfloat16().to(DEVICE) for at in range(rows)}
    base = torch.randn(600, 512, generator=generator).to(DEVICE)
    return {
        "weights": weights,
        "halves": halves,
        "base": base,
        "view": base[100:200],
        "gappy": torch.randn(300, 200, generator=generator).to(DEVICE)[:, ::2],
        "transposed": torch.randn(300, 200, generator=generator).to(DEVICE).t(),
        "large": torch.randn(700_000, generator=generator).to(DEVICE),
        "step": torch.tensor(7.0, device=DEVICE),
        "host": torch.arange(5000),
    }


INLINE_BYTES: Final = 4
"""What has to be copied of the model, because it is stored in the manifest: the step."""


def count_digests(tree: Any) -> int:
    """Return how many digests of a tree are computed on the device: of chunks, and of random bytes beside them."""
    from holdfast.snapshot.save import SaveOptions, make_request
    from holdfast.trees.registered import Types

    request = device_digests.add_digests(make_request("count", tree, SaveOptions(), Types()))
    return 1 + sum(digest is not None for some in request.digests.values() for digest in some)


def copied_bytes(act: Callable[[], object]) -> int:
    ACCELERATOR.bytes_to_host = 0
    act()
    return ACCELERATOR.bytes_to_host


def size_of(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in torch.utils._pytree.tree_leaves(tree) if tensor.device == DEVICE)


def on_host(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda tensor: tensor.cpu().clone(), tree)


def list_packs(folder: Path) -> set[Path]:
    return {path for path in (folder / PACKS).rglob("*") if path.is_file()}


def assert_saved(store: Store, name: str, expected: Any) -> None:
    found = torch.utils._pytree.tree_leaves(store.load(name))
    for one, other in zip(found, torch.utils._pytree.tree_leaves(expected), strict=True):
        assert torch.equal(one, other)


@ways
def test_an_unchanged_tree_is_not_copied_to_the_host(store: Store, save_tree: SaveTree) -> None:
    tree = make_model()
    save_tree(store, "run/1", tree)
    chunks = count_digests(tree)

    copied = copied_bytes(lambda: save_tree(store, "run/2", tree))

    assert copied == 32 * chunks + INLINE_BYTES
    assert_saved(store, "run/2", on_host(tree))


@ways
def test_of_a_tree_that_changed_a_little_little_is_copied(store: Store, save_tree: SaveTree) -> None:
    tree = make_model()
    save_tree(store, "run/1", tree)
    tree["weights"]["w3"][5, 7] += 1
    tree["halves"]["h9"].add_(1)
    chunks = count_digests(tree)

    copied = copied_bytes(lambda: save_tree(store, "run/2", tree))

    changed = tree["weights"]["w3"].nbytes + tree["halves"]["h9"].nbytes
    assert changed <= 0.012 * size_of(tree)
    assert copied == 32 * chunks + INLINE_BYTES + changed
    assert copied <= 0.02 * size_of(tree)
    assert_saved(store, "run/2", on_host(tree))


@ways
def test_a_first_save_copies_each_byte_once(store: Store, save_tree: SaveTree) -> None:
    tree = make_model()
    chunks = count_digests(tree)

    copied = copied_bytes(lambda: save_tree(store, "run/1", tree))

    # The view is a part of the base, and its chunks are those of the base.
    stored = size_of(tree) - tree["view"].nbytes
    assert copied == 32 * chunks + stored
    assert_saved(store, "run/1", on_host(tree))


def test_another_process_finds_the_chunks_as_well(store: Store, tmp_path: Path) -> None:
    tree = make_model()
    store.save("run/1", tree)

    with holdfast.open(tmp_path / "ckpts") as other:
        copied = copied_bytes(lambda: other.save_async("run/2", tree).wait())

    assert copied == 32 * count_digests(tree) + INLINE_BYTES


@ways
def test_a_name_that_has_this_content_is_found_without_a_copy(store: Store, save_tree: SaveTree) -> None:
    tree = make_model()
    store.save("x", tree)

    copied = copied_bytes(lambda: save_tree(store, "x", tree))

    assert copied == 32 * count_digests(tree) + INLINE_BYTES


@pytest.mark.parametrize("staging", ["full", "budget"])
def test_the_caller_may_change_what_was_and_was_not_copied(store: Store, staging: Any) -> None:
    tree = make_model()
    store.save("run/1", tree)
    tree["large"].mul_(2)
    expected = on_host(tree)

    handle = store.save_async("run/2", tree, staging=staging)
    for tensor in torch.utils._pytree.tree_leaves(tree):
        tensor.fill_(1)
    handle.wait()

    assert_saved(store, "run/2", expected)


def test_a_budget_is_kept(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "small", budget_bytes=MIN_BUDGET_BYTES)
    tree = {str(at): torch.full((3 * MIB // 4,), float(at), device=DEVICE) for at in range(8)}
    store.save_async("a", tree, staging="budget").wait()
    tree["5"].add_(0.5)

    copied = copied_bytes(lambda: store.save_async("b", tree, staging="budget").wait())

    assert copied < 3 * MIB + 5000
    assert_saved(store, "b", on_host(tree))


def test_when_most_is_new_everything_is_copied_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def note(pieces: Sequence[DevicePiece]) -> list[Digest]:
        calls.append(len(pieces))
        return digest_quickly(pieces)

    monkeypatch.setattr(choice, "find_backend", lambda *_: note)
    tree = {str(at): torch.randn(100_000).to(DEVICE) for at in range(8)}
    counts = []
    for number in range(5):
        store.save_async(f"run/{number}", tree).wait()
        counts.append(len(calls))
        if number < 2:
            for tensor in tree.values():
                tensor.add_(1)
    # Two saves find that all is new. The next two do not look; the last one follows one of which nothing was new.
    assert counts == [1, 2, 2, 2, 3]
    assert_saved(store, "run/4", on_host(tree))


def test_a_kernel_that_is_wrong_once_fails_the_save_and_stores_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_model()
    store.save("run/1", tree)
    tree["large"].add_(1)

    def break_new(pieces: Sequence[DevicePiece]) -> list[Digest]:
        found = digest_quickly(pieces)
        return [*found[:-1], hash_bytes(b"wrong")]

    monkeypatch.setattr(choice, "find_backend", lambda *_: break_new)
    for save_tree in WAYS:
        with pytest.raises(SourceChanged, match="its device computes wrong digests"):
            save_tree(store, "run/2", tree)

    assert [snapshot.name for snapshot in store.snapshots()] == ["run/1"]


@ways
def test_a_stored_chunk_that_is_damaged_is_copied_again(store: Store, tmp_path: Path, save_tree: SaveTree) -> None:
    tree = make_model()
    store.save("run/1", tree)
    for path in list_packs(tmp_path / "ckpts"):
        path.chmod(0o600)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    with holdfast.open(tmp_path / "ckpts") as other:
        save_tree(other, "run/2", tree)
        assert_saved(other, "run/2", on_host(tree))


def test_a_collection_during_a_save_in_the_background_takes_nothing_from_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_model()
    store.save("run/1", tree)
    expected = on_host(tree)
    old_packs = list_packs(tmp_path / "ckpts")
    create = LocalStore.create
    collected: list[object] = []

    def collect_first(self: LocalStore, key: str, *args: Any, **kwargs: Any) -> Any:
        if key.startswith("manifests/") and not collected:
            with holdfast.open(tmp_path / "ckpts") as other:
                other.delete("run/1")
                collected.append(other.gc(Rules(min_age_s=0.0)))
        return create(self, key, *args, **kwargs)

    monkeypatch.setattr(LocalStore, "create", collect_first)
    handle = store.save_async("other/1", tree)
    for tensor in torch.utils._pytree.tree_leaves(tree):
        tensor.fill_(1)
    handle.wait()
    store.gc(Rules(min_age_s=0.0))

    # What the save used was marked, so it was written again, from the stored copies, and the old packs are gone.
    assert collected
    assert old_packs.isdisjoint(list_packs(tmp_path / "ckpts"))
    assert_saved(store, "other/1", expected)
    assert not [finding for finding in store.check(read=True) if finding.severity != "note"]


def test_a_device_without_memory_for_digests_saves_all_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> list[Digest]:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(choice, "find_backend", lambda *_: fail)
    tree = make_model(4)

    store.save("a", tree)

    assert_saved(store, "a", on_host(tree))


@pytest.mark.parametrize("save_tree", [save, save_in_background])
def test_a_device_that_returns_a_wrong_digest_is_copied(
    store: Store, monkeypatch: pytest.MonkeyPatch, save_tree: SaveTree
) -> None:
    def fail(_: object) -> list[Digest]:
        raise DeviceFault("a wrong digest of random bytes")

    monkeypatch.setattr(choice, "find_backend", lambda *_: fail)
    tree = make_model(4)

    with pytest.warns(UserWarning, match="saved from copies in host memory"):
        save_tree(store, "a", tree)

    assert_saved(store, "a", on_host(tree))


def test_compressed_chunks_and_deltas_are_found_by_their_digests(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "packed", compression="fast", delta=3)
    tree = {"w": torch.arange(600_000, dtype=torch.float32).to(DEVICE), "h": torch.zeros(300_000).to(DEVICE)}
    store.save("run/1", tree)
    tree["w"][3] += 1
    store.save("run/2", tree)

    copied = copied_bytes(lambda: store.save_async("run/3", tree).wait())

    assert copied == 32 * count_digests(tree)
    shutil.copytree(tmp_path / "packed", tmp_path / "copy")
    assert_saved(holdfast.open(tmp_path / "copy"), "run/3", on_host(tree))


def test_torchs_own_operations_give_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the quick kernel
    tree = {"w": torch.randn(700).to(DEVICE), "gappy": torch.randn(30, 20).to(DEVICE)[:, ::2]}
    store.save("run/1", tree)
    tree["w"][3] += 1

    copied = copied_bytes(lambda: store.save_async("run/2", tree).wait())

    assert copied == 32 * count_digests(tree) + tree["w"].nbytes
    assert_saved(store, "run/2", on_host(tree))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_copies_only_what_the_store_lacks(tmp_path: Path) -> None:
    state = {f"w{at}": torch.randn(100, 100).to(DEVICE) for at in range(20)}
    url = str(tmp_path / "dcp")

    def save_by_dcp(name: str) -> None:
        save_state(state, storage_writer=holdfast.dcp.StorageWriter(url, name), **ALONE)

    save_by_dcp("run/1")
    state["w3"].add_(1)
    copied = copied_bytes(lambda: save_by_dcp("run/2"))

    assert state["w3"].nbytes <= copied <= state["w3"].nbytes + 32 * 30
    with holdfast.open(url) as store:
        assert torch.equal(store.load("run/2")["w3"], state["w3"].cpu())


# --- comparing with what is in memory


def test_an_equal_tree_is_compared_by_digests_and_no_tensor_is_copied(store: Store) -> None:
    tree = make_model()
    store.save("x", tree)

    copied = copied_bytes(lambda: store.diff("x", tree))

    assert store.diff("x", tree).is_equal
    assert copied == 32 * count_digests(tree) + INLINE_BYTES


def test_of_an_unequal_tree_only_tensors_that_differ_are_copied_and_only_to_be_measured(store: Store) -> None:
    tree = make_model()
    store.save("x", tree)
    tree["weights"]["w3"][5, 7] += 1

    by_digests = copied_bytes(lambda: store.diff("x", tree))
    measured = copied_bytes(lambda: store.diff("x", tree, values=True))

    (change,) = store.diff("x", tree, values=True).changes
    assert (change.name, change.distances[0].at) == ("weights.w3", (5, 7))
    assert by_digests == 32 * count_digests(tree) + INLINE_BYTES
    assert measured == by_digests + tree["weights"]["w3"].nbytes
