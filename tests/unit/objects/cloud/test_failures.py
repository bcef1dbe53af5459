"""Errors of object stores: four different sentences for four different mistakes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.errors import StoreError
from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.cloud.place import parse_place
from tests.kit.s3_server import S3Server
from tests.unit.objects.cloud.servers import QUICK, open_cloud

ACTS: dict[str, Callable[[CloudStore], object]] = {
    "create": lambda store: store.create("leases/one", b"x"),
    "read": lambda store: store.read("leases/one", limit_bytes=9),
    "list": lambda store: store.list("leases/"),
    "list all": lambda store: store.list_all("leases/"),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_missing_bucket_is_named(server: S3Server, act: Callable[[CloudStore], object]) -> None:
    store = CloudStore(parse_place("s3://elsewhere/store"), options={**server.options, "retry_config": QUICK})

    with pytest.raises(StoreError, match=r"s3://elsewhere/store.*the bucket does not exist") as caught:
        act(store)

    assert caught.value.fate == "absent"


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_wrong_credentials_are_named(server: S3Server, act: Callable[[CloudStore], object]) -> None:
    server.fault_of = lambda request: "bad signature"

    with pytest.raises(StoreError, match="credentials are missing, wrong or expired") as caught:
        act(open_cloud(server))

    assert caught.value.fate == "absent"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_missing_permission_is_named(server: S3Server, act: Callable[[CloudStore], object]) -> None:
    server.fault_of = lambda request: "403"

    with pytest.raises(StoreError, match="credentials do not allow this") as caught:
        act(open_cloud(server))

    assert caught.value.fate == "absent"


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_no_network_is_named_with_the_time(server: S3Server, act: Callable[[CloudStore], object]) -> None:
    # Nothing listens on port 1.
    store = open_cloud(server, options={"endpoint": "http://127.0.0.1:1"})

    with pytest.raises(StoreError, match=r"the server did not answer.*after \d+\.\d s"):
        act(store)


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_busy_server_is_asked_again_and_then_named(server: S3Server, act: Callable[[CloudStore], object]) -> None:
    server.fault_of = lambda request: "503 before"

    with pytest.raises(StoreError, match="overloaded or failing"):
        act(open_cloud(server))

    assert len(server.requests) == 3


def test_a_create_without_an_answer_has_an_unknown_fate(server: S3Server) -> None:
    server.fault_of = lambda request: "lose request"

    with pytest.raises(StoreError) as caught:
        open_cloud(server).create("leases/one", b"x")

    assert caught.value.fate == "unknown"
