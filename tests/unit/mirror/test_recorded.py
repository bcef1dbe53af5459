"""The list of mirrors in a store."""

from __future__ import annotations

import pytest

from holdfast.errors import Corrupt
from holdfast.mirror.recorded import MIRRORS, forget_mirror, read_mirrors, record_mirror
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.listed import list_user_names
from holdfast.repo.upkeep.check import Checker
from tests.kit.saving import save_bytes


def test_a_store_has_no_mirrors_at_first(local: Repository) -> None:
    assert read_mirrors(local.store) == {}


def test_a_mirror_is_recorded_once(local: Repository) -> None:
    assert record_mirror(local, "s3://b/m", "named")
    assert not record_mirror(local, "s3://b/m", "named")
    assert record_mirror(local, "s3://b/m", "all")
    assert not record_mirror(local, "s3://b/m", "named")
    assert record_mirror(open_repository(local.store), "gs://b/n", "named")
    assert read_mirrors(local.store) == {"s3://b/m": "all", "gs://b/n": "named"}


def test_a_mirror_can_be_forgotten(local: Repository) -> None:
    record_mirror(local, "s3://b/m", "all")
    assert forget_mirror(local, "s3://b/m")
    assert not forget_mirror(local, "s3://b/m")
    assert read_mirrors(local.store) == {}


def test_the_list_is_no_snapshot_of_the_user_and_passes_a_check(local: Repository) -> None:
    record_mirror(local, "s3://b/m", "all")
    assert list_user_names(local.store, "", local.records) == []
    assert all(finding.severity == "note" for finding in Checker(local.store, read=True).iter_findings())


def test_a_list_that_is_none_is_refused(local: Repository) -> None:
    save_bytes(local, MIRRORS, {}, metadata={"mirrors": 3})
    with pytest.raises(Corrupt, match="holdfast rm @mirrors"):
        read_mirrors(local.store)
