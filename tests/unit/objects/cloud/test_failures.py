"""Errors of object stores: four different sentences for four different mistakes."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from obstore.exceptions import GenericError

from holdfast.errors import NotFound, StoreError, StoreFull
from holdfast.objects.cloud.client import ClientOwner
from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.cloud.failures import Attempt, translate
from holdfast.objects.cloud.place import parse_place
from holdfast.objects.storage_options import StorageOptions
from tests.kit.s3_server import Fault, S3Server
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

    with pytest.raises(StoreError, match=r"the server did not answer.*3 tries in \d+\.\d s"):
        act(store)


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_busy_server_is_asked_again_and_then_named(server: S3Server, act: Callable[[CloudStore], object]) -> None:
    server.fault_of = lambda request: "503 before"

    with pytest.raises(StoreError, match=r"overloaded or failing.*3 tries in \d+\.\d s; HTTP 503"):
        act(open_cloud(server))

    assert len(server.requests) == 3


def test_a_create_without_an_answer_has_an_unknown_fate(server: S3Server) -> None:
    server.fault_of = lambda request: "lose request"

    with pytest.raises(StoreError) as caught:
        open_cloud(server).create("leases/one", b"x")

    assert caught.value.fate == "unknown"


def test_a_create_that_was_repeated_has_an_unknown_fate_whatever_the_last_answer(server: S3Server) -> None:
    answers: list[Fault] = ["lose reply", "403"]
    server.fault_of = lambda request: answers.pop(0) if answers else None

    with pytest.raises(StoreError, match="do not allow this") as caught:
        open_cloud(server).create("leases/one", b"x")

    assert caught.value.fate == "unknown"
    assert "store/leases/one" in server.objects


@pytest.mark.parametrize(
    ("code", "status", "sentence"),
    [
        ("ExpiredToken", 400, "missing, wrong or expired"),
        ("PermanentRedirect", 301, "in another region"),
        ("AuthorizationHeaderMalformed", 400, "in another region"),
        ("RequestTimeTooSkewed", 403, "the clock of this host is wrong"),
        ("InvalidObjectState", 403, "a lifecycle rule has moved the object"),
        ("BadDigest", 400, "changed on their way"),
        ("NoSuchUpload", 404, "no object leases/one"),
        ("EntityTooLarge", 400, "refused the request"),
    ],
)
def test_other_answers_have_their_own_sentences(server: S3Server, code: str, status: int, sentence: str) -> None:
    server.fault_of = lambda request: (status, code)

    with pytest.raises((StoreError, NotFound), match=sentence):
        ACTS["read"](open_cloud(server))


@pytest.mark.parametrize(("code", "status"), [("QuotaExceeded", 403), ("InsufficientStorage", 507)])
def test_a_server_without_room_is_full(server: S3Server, code: str, status: int) -> None:
    server.fault_of = lambda request: (status, code)

    with pytest.raises(StoreFull, match="no room left"):
        ACTS["create"](open_cloud(server))


def test_an_error_names_the_options_that_another_process_did_not_send(server: S3Server) -> None:
    store = pickle.loads(pickle.dumps(open_cloud(server)))
    server.fault_of = lambda request: "bad signature"
    # The credentials of this process, which are wrong.
    store.clients = ClientOwner(
        store.place, StorageOptions({**dict(store.clients.options), **server.options}, store.clients.options.withheld)
    )

    with pytest.raises(StoreError, match="access_key_id, secret_access_key of storage_options are not sent"):
        store.list("")


def test_no_text_of_an_error_has_a_signature_in_it() -> None:
    text = "Error performing GET https://host/c/b?sv=1&sig=hidden - HTTP error: timed out\n\nDebug source:\nhidden"

    failure = translate(GenericError(text), Attempt("read", "packs/one", "az://c", 1.5))

    assert "hidden" not in str(failure)
    assert "https://host/c/b" in str(failure)


def test_an_error_keeps_no_error_of_the_client_library(server: S3Server) -> None:
    server.fault_of = lambda request: "403"

    with pytest.raises(StoreError) as caught:
        ACTS["read"](open_cloud(server))

    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_a_server_that_accepts_a_request_and_says_nothing_is_left(server: S3Server) -> None:
    server.latency_s = 1.0
    store = open_cloud(server, options={"client_options": {"timeout": "20ms"}})

    with pytest.raises(StoreError, match=r"the server did not answer.*3 tries in \d+\.\d s"):
        ACTS["read"](store)
    with pytest.raises(StoreError, match=r"the server did not answer.*1 try in \d+\.\d s") as caught:
        ACTS["create"](store)

    assert caught.value.fate == "unknown"


def test_a_test_of_conditions_that_fails_does_not_undo_the_creation(server: S3Server) -> None:
    store = open_cloud(server)
    faults: list[Fault | None] = ["403", None]
    server.fault_of = lambda request: faults.pop() if faults else None

    store.create("tags/one", b"x")

    assert store.read("tags/one", limit_bytes=1) == b"x"
    store.create("tags/two", b"x")
    assert [request.key for request in server.requests if request.kind == "PUT"] == [
        "store/tags/one", "store/tags/one", "store/tags/two", "store/tags/two",
    ]  # fmt: skip
