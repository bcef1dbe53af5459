"""A store in a bucket: one folder at a time, and many deletes with one request."""

from __future__ import annotations

from typing import Any

import obstore
import pytest

from holdfast.errors import BadName, NotFound, ReadOnlyStore, StoreError
from holdfast.objects.cloud import cloud_store
from holdfast.objects.cloud.cloud_store import CloudStore
from tests.kit.hooking import Hook
from tests.kit.s3_server import S3Server
from tests.unit.objects.cloud.servers import open_cloud


def fill(store: CloudStore, *keys: str) -> None:
    for key in keys:
        store.create(key, key.encode())


def test_a_folder_is_listed_without_the_folders_in_it(server: S3Server) -> None:
    store = open_cloud(server)
    fill(store, "snapshots/00/a", "snapshots/00/b", "snapshots/1f/c", "snapshots/stray", "packs/p")

    found = store.list_folder("snapshots/")

    assert [info.key for info in found.objects] == ["snapshots/stray"]
    assert found.objects[0] == store.stat("snapshots/stray")
    assert list(found.folders) == ["snapshots/00/", "snapshots/1f/"]
    assert list(store.list_folder("").folders) == ["packs/", "snapshots/"]
    assert not store.list_folder("marks/").folders


def test_all_folders_are_listed_at_once_with_what_is_beside_them(server: S3Server) -> None:
    store = open_cloud(server)
    keys = ["a/00/x", "a/00/y", "a/01/z", "a/0stray", "a/ff/unexpected", "a/stray"]
    fill(store, *keys, "b/other")
    server.requests.clear()

    assert [info.key for info in store.iter_folders("a/", ("a/00/", "a/01/", "a/02/"))] == keys
    assert len(server.requests) == 5
    assert [info.key for info in store.iter_folders("", ("a/",))] == [*keys, "b/other"]


def test_the_names_in_a_folder_are_found_with_one_listing(server: S3Server) -> None:
    store = open_cloud(server)
    fill(store, "packs/p", "packs/q", "snapshots/00/a", "stray")
    server.requests.clear()
    assert list(store.iter_names("")) == ["packs/", "snapshots/", "stray"]
    assert len(server.requests) == 1


def test_many_objects_are_found_with_a_listing_of_each_folder(server: S3Server) -> None:
    store = open_cloud(server)
    keys = [f"packs/{number}" for number in range(80)]
    fill(store, *keys[:70], "manifests/a", "manifests/b")
    server.requests.clear()
    found = store.stat_many([*keys, "manifests/a"])
    assert sorted(found) == sorted([*keys[:70], "manifests/a"])
    assert found["packs/3"] == store.stat("packs/3")
    assert len(server.requests) == 3


def test_many_objects_are_deleted_with_one_request(server: S3Server) -> None:
    store = open_cloud(server)
    fill(store, *(f"packs/{number}" for number in range(40)))
    server.requests.clear()

    store.delete_many([f"packs/{number}" for number in range(1, 50)])

    assert [request.kind for request in server.requests] == ["DELETE"]
    assert [info.key for info in store.list("")] == ["packs/0"]


def test_a_request_deletes_as_many_objects_as_the_service_allows(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_cloud(server)
    fill(store, *(f"packs/{number}" for number in range(10)))
    server.requests.clear()
    monkeypatch.setattr(cloud_store, "DELETE_LIMIT", 3)

    store.delete_many([f"packs/{number}" for number in range(10)])

    assert [request.kind for request in server.requests] == ["DELETE"] * 4
    assert list(store.list("")) == []


def test_objects_are_deleted_one_by_one_if_the_service_reports_an_absent_one(server: S3Server, hook: Hook) -> None:
    """Azure does: the answer of the small server is replaced by what obstore then raises."""
    store = open_cloud(server)
    fill(store, "packs/a", "packs/b", "packs/c")
    delete = obstore.delete

    def refuse_many(client: Any, paths: Any) -> None:
        if not isinstance(paths, str):
            raise FileNotFoundError("the second object is absent")
        delete(client, paths)

    hook(obstore, "delete", refuse_many)
    store.delete_many(["packs/a", "packs/absent", "packs/b"])
    assert [info.key for info in store.list("")] == ["packs/c"]


def test_deletes_that_are_not_allowed_raise_and_name_an_object(server: S3Server) -> None:
    store = open_cloud(server)
    fill(store, "packs/a", "packs/b")
    server.fault_of = lambda request: "403" if request.kind == "DELETE" else None
    with pytest.raises(StoreError, match=r"cannot delete .*packs/a and 1 more"):
        store.delete_many(["packs/a", "packs/b"])


def test_a_bad_key_or_a_read_only_store_deletes_nothing(server: S3Server) -> None:
    store = open_cloud(server)
    fill(store, "packs/a")
    with pytest.raises(BadName):
        store.delete_many(["packs/a", "../escape"])
    with pytest.raises(ReadOnlyStore):
        open_cloud(server, read_only=True).delete_many(["packs/a"])
    assert store.read("packs/a", limit_bytes=100) == b"packs/a"
    store.delete("packs/a")
    with pytest.raises(NotFound):
        store.stat("packs/a")
