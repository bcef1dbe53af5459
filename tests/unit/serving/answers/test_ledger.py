"""The ledger of chunks: sums that agree with du, one reading of each manifest, and bounded memory."""

from __future__ import annotations

import random

import pytest

from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format import rank_manifests
from holdfast.repo.format.layout import ManifestRef
from holdfast.repo.format.manifest import Manifest, read_manifest
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.usage import read_freed_bytes, read_usage
from holdfast.serving.answers.sharing import ChunkLedger, LedgerReader
from tests.kit.saving import new_repo, save_bytes


def noise(seed: int, size: int = 3 << 20) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture(scope="module")
def repo() -> Repository:
    """Snapshots that each share one entry with the one before."""
    made = new_repo(MemoryStore())
    for step in range(6):
        save_bytes(made, f"run/{step}", {"x": noise(step), "y": noise(step + 1), "z": noise(9, 5000)})
    return made


def read(repo: Repository, **limits: int) -> ChunkLedger:
    return LedgerReader(repo, **limits).read(sorted(read_live(repo.store).current, key=lambda each: each.name))


def test_sums_are_those_of_du(repo: Repository) -> None:
    ledger = read(repo)
    usage = read_usage(repo.store, ledger.snapshots)

    assert ledger.rate == 1
    assert ledger.sum_stored().tolist() == [each.stored_bytes for each in usage.snapshots]
    assert ledger.sum_own().tolist() == [each.own_bytes for each in usage.snapshots]
    assert ledger.sum_saved() == usage.saved_bytes
    live = ledger.sum_live()
    assert {pack.pack_id.rpartition("/")[2]: pack.live_bytes for pack in usage.packs} == live


@pytest.mark.parametrize("doomed", [[0], [0, 1], [1, 3, 5], [0, 1, 2, 3, 4, 5], []])
def test_what_is_freed_is_what_rm_says(repo: Repository, doomed: list[int]) -> None:
    ledger = read(repo)

    expected = read_freed_bytes(repo.store, ledger.snapshots, [ledger.snapshots[at] for at in doomed])
    assert ledger.sum_freed(doomed) == expected


def test_snapshots_are_compared_with_each_other(repo: Repository) -> None:
    ledger = read(repo)
    all_of_one, one, common = (6 << 20) + 5000, (3 << 20) + 5000, 5000

    assert ledger.sum_shared_with(2).tolist() == [common, one, all_of_one, one, common, common]
    assert ledger.compare([[0], [1], [2, 3]]) == [
        [all_of_one, one, common],
        [one, all_of_one, one],
        [common, one, (9 << 20) + 5000],
    ]


def test_manifests_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = new_repo(MemoryStore())
    for step in range(3):
        save_bytes(repo, f"run/{step}", {"x": noise(step)})
    reads: list[str] = []

    def read_one(store: ObjectStore, ref: ManifestRef) -> Manifest:
        reads.append(ref.manifest_id)
        return read_manifest(store, ref)

    def read_counted() -> ChunkLedger:
        with monkeypatch.context() as patch:
            patch.setattr(rank_manifests, "read_manifest", read_one)
            return reader.read(read_live(repo.store).current)

    reader = LedgerReader(repo)
    assert len(read_counted().snapshots) == 3
    save_bytes(repo, "run/3", {"x": noise(0)})
    delete_snapshot(repo.store, "run/1")
    ledger = read_counted()

    assert len(reads) == len(set(reads)) == 4
    assert {each.name for each in ledger.snapshots} == {"run/0", "run/2", "run/3"}


def test_with_too_many_chunks_some_of_them_stand_for_all(repo: Repository) -> None:
    exact, sampled = read(repo), read(repo, max_uses=20)

    assert sampled.rate > 1
    assert len(sampled.chunks) <= 20
    assert sampled.sum_own().sum() % 1 == 0
    whole = int(exact.sum_stored().sum())
    assert whole / 4 < int(sampled.sum_stored().sum()) < 4 * whole


def test_an_empty_store_has_an_empty_ledger() -> None:
    ledger = read(new_repo(MemoryStore()))

    assert ledger.sum_stored().tolist() == []
    assert ledger.compare([]) == []
    assert ledger.sum_freed([]) == 0


def test_when_most_snapshots_are_deleted_sizes_are_exact_again(repo: Repository) -> None:
    snapshots = sorted(read_live(repo.store).current, key=lambda each: each.name)
    reader = LedgerReader(repo, max_uses=30)
    assert reader.read(snapshots).rate > 1

    left = reader.read(snapshots[:1])

    assert left.rate == 1
    assert left.sum_stored().tolist() == LedgerReader(repo).read(snapshots[:1]).sum_stored().tolist()
