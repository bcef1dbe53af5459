"""Clients of object stores: made late, refused options, time limits, no secrets in texts."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import BadName
from holdfast.objects.cloud.client import RETRY_TIMEOUT_S, ClientOwner, make_client
from holdfast.objects.cloud.place import CloudPlace
from holdfast.objects.storage_options import StorageOptions

PLACE = CloudPlace("s3", "bucket", "prefix")
OPTIONS = {"access_key_id": "key", "secret_access_key": "hidden", "region": "us-east-1"}


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("s3", OPTIONS),
        ("gs", {"skip_signature": True}),
        ("az", {"account_name": "name", "account_key": "a2V5"}),
    ],
)
def test_each_service_has_a_client(scheme: str, options: dict[str, object]) -> None:
    place = CloudPlace(scheme, "bucket", "prefix")  # type: ignore[arg-type]  # one of the three

    client: Any = make_client(place, StorageOptions(options), timeout_s=1.0)

    assert client.prefix == "prefix"


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(BadName, match=r"storage_options of s3://bucket/prefix.*colour"):
        make_client(PLACE, StorageOptions({**OPTIONS, "colour": "red"}), timeout_s=1.0)


def test_a_refusal_has_no_secret_in_its_text_and_no_cause() -> None:
    with pytest.raises(BadName) as caught:
        make_client(PLACE, StorageOptions({**OPTIONS, "hidden": "hidden"}), timeout_s=1.0)

    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_every_request_is_bounded_in_time() -> None:
    client: Any = make_client(PLACE, StorageOptions(OPTIONS), timeout_s=7.0)

    assert client.client_options["timeout"] == "7s"
    assert client.client_options["connect_timeout"] == "10s"
    assert client.retry_config["retry_timeout"] == timedelta(seconds=RETRY_TIMEOUT_S)


def test_a_user_may_change_the_limits() -> None:
    options = {**OPTIONS, "client_options": {"timeout": "1s"}, "retry_config": {"max_retries": 1}}

    client: Any = make_client(PLACE, StorageOptions(options), timeout_s=7.0)

    assert client.client_options["timeout"] == "1s"
    assert client.retry_config["max_retries"] == 1
    assert client.retry_config["retry_timeout"] == timedelta(seconds=RETRY_TIMEOUT_S)


def test_one_client_serves_all_small_requests_and_another_one_all_large_ones() -> None:
    owner = ClientOwner(PLACE, StorageOptions(OPTIONS))
    clients: list[Any] = [owner.find(), owner.find("large")]
    small, large = clients

    assert [owner.find(), owner.find("large")] == [small, large]
    assert (small.client_options["timeout"], large.client_options["timeout"]) == ("30s", "5m")


def test_a_server_that_has_answered_is_waited_for_longer() -> None:
    owner = ClientOwner(PLACE, StorageOptions(OPTIONS))
    first: Any = owner.find()

    owner.has_answered = True
    later: Any = owner.find()

    assert (first.retry_config["max_retries"], later.retry_config["max_retries"]) == (8, 12)
    assert later.retry_config["backoff"]["max_backoff"] == timedelta(seconds=8)


def test_secrets_are_in_no_text_and_no_pickle() -> None:
    owner = ClientOwner(PLACE, StorageOptions(OPTIONS))
    owner.find()

    assert "hidden" not in repr(owner)
    assert b"hidden" not in pickle.dumps(owner)
