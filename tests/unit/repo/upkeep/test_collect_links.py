"""Symbolic links in the directory of a store: what a collector and a check make of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import Corrupt, StoreError
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.layout import MANIFESTS, PACKS
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot, iter_names
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import collect
from tests.kit.saving import keys, new_repo, noise, save_bytes


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    """A store in a directory, with a snapshot and the remains of one that was deleted."""
    repo = new_repo(LocalStore(tmp_path / "store"))
    save_bytes(repo, "kept", {"x": noise(5000, 1)})
    save_bytes(repo, "gone", {"x": noise(5000, 2)})
    delete_snapshot(repo.store, "gone")
    return repo


PLACES = ["index/" + "a" * 64, f"bad/{'b' * 24}-{'b' * 16}@00000000", "tags/x@00000000", "snapshots/1f/x", "unknown"]


@pytest.mark.parametrize("place", PLACES)
def test_a_collector_deletes_nothing_beside_a_link(repo: Repository, tmp_path: Path, place: str) -> None:
    (tmp_path / "store" / place).symlink_to("nowhere")
    before = keys(repo.store, PACKS) + keys(repo.store, MANIFESTS)

    with pytest.raises(
        Corrupt, match=f"contains the symbolic link {place}, which is not followed; nothing is collected"
    ):
        collect(repo.store)

    assert keys(repo.store, PACKS) + keys(repo.store, MANIFESTS) == before
    (tmp_path / "store" / place).unlink()
    assert collect(repo.store).freed_bytes > 5000


def test_a_link_that_no_key_can_name_does_not_stop_a_collector(repo: Repository, tmp_path: Path) -> None:
    (tmp_path / "store/packs/.#lock").symlink_to("nowhere")

    assert collect(repo.store).freed_bytes > 5000


def test_a_check_reports_each_link_and_goes_on(repo: Repository, tmp_path: Path) -> None:
    for place in [*PLACES, "packs/.#lock"]:
        (tmp_path / "store" / place).symlink_to("..")
    checker = Checker(repo.store, read=True)

    findings = [finding for finding in checker.iter_findings() if finding.code == "link"]

    assert {(finding.key, finding.severity) for finding in findings} == {
        *((place, "error") for place in PLACES),
        ("packs/.#lock", "warning"),
    }
    assert (checker.tally.snapshots, checker.tally.packs) == (1, 2)


def test_names_on_a_shelf_that_is_a_link_are_not_taken_for_absent(repo: Repository, tmp_path: Path) -> None:
    shelf = next((tmp_path / "store/snapshots").glob("*/kept@*")).parent
    shelf.rename(tmp_path / "elsewhere")
    shelf.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(StoreError, match=f"{shelf.name} is a symbolic link"):
        list(iter_names(repo.store))
