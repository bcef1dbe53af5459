"""The list of mirrors in a store."""

from __future__ import annotations

import pytest

from holdfast.errors import Corrupt
from holdfast.json_text import Json
from holdfast.mirror.setting import MIRRORS, RecordedMirror, forget_mirror, read_mirrors, record_mirror
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.listed import list_user_names
from holdfast.repo.upkeep.check import Checker
from tests.kit.saving import save_bytes, snapshot_of


def test_a_store_has_no_mirrors_at_first(local: Repository) -> None:
    assert read_mirrors(local.store) == {}


def test_a_mirror_is_recorded_once(local: Repository) -> None:
    assert record_mirror(local, "s3://b/m", "named")
    assert not record_mirror(local, "s3://b/m", "named")
    assert record_mirror(local, "s3://b/m", "all")
    assert not record_mirror(local, "s3://b/m", "named")
    assert record_mirror(open_repository(local.store), "gs://b/n", "named")
    assert read_mirrors(local.store) == {"s3://b/m": RecordedMirror("all"), "gs://b/n": RecordedMirror("named")}


def test_what_is_learned_of_a_mirror_is_added(local: Repository) -> None:
    record_mirror(local, "s3://b/m", "named", options=("region", "endpoint"))
    assert record_mirror(local, "s3://b/m", "all", store_id="first")
    assert not record_mirror(local, "s3://b/m", "named")
    assert read_mirrors(local.store) == {"s3://b/m": RecordedMirror("all", "first", ("endpoint", "region"))}
    assert record_mirror(local, "s3://b/m", "all", store_id="second")
    assert read_mirrors(local.store)["s3://b/m"].store_id == "second"


def test_a_list_without_places_is_read(local: Repository) -> None:
    save_bytes(local, MIRRORS, {}, metadata={"mirrors": {"s3://b/m": "all", "gs://b/n": "named"}})
    assert read_mirrors(local.store) == {"s3://b/m": RecordedMirror("all"), "gs://b/n": RecordedMirror("named")}
    assert record_mirror(local, "s3://b/m", "all", store_id="first")


def test_the_urls_and_scopes_stay_where_older_lists_have_them(local: Repository) -> None:
    record_mirror(local, "s3://b/m", "all", store_id="first", options=("endpoint",))
    assert snapshot_of(local, MIRRORS).metadata["mirrors"] == {"s3://b/m": "all"}


def test_a_mirror_can_be_forgotten(local: Repository) -> None:
    record_mirror(local, "s3://b/m", "all")
    assert forget_mirror(local, "s3://b/m")
    assert not forget_mirror(local, "s3://b/m")
    assert read_mirrors(local.store) == {}


def test_the_list_is_no_snapshot_of_the_user_and_passes_a_check(local: Repository) -> None:
    record_mirror(local, "s3://b/m", "all")
    assert list_user_names(local.store, "", local.records) == []
    assert all(finding.severity == "note" for finding in Checker(local.store, read=True).iter_findings())


@pytest.mark.parametrize("metadata", [{"mirrors": 3}, {"mirrors": {}, "places": 3}])
def test_a_list_that_is_none_is_refused(local: Repository, metadata: dict[str, Json]) -> None:
    save_bytes(local, MIRRORS, {}, metadata=metadata)
    with pytest.raises(Corrupt, match="holdfast rm @mirrors"):
        read_mirrors(local.store)


@pytest.mark.parametrize("place", [3, {}, {"store_id": 1, "options": []}, {"store_id": "x", "options": [1]}])
def test_a_place_that_is_none_is_refused(local: Repository, place: Json) -> None:
    save_bytes(local, MIRRORS, {}, metadata={"mirrors": {"s3://b/m": "all"}, "places": {"s3://b/m": place}})
    with pytest.raises(Corrupt, match="@mirrors"):
        read_mirrors(local.store)
