"""Clients of object stores: made late, refused options, no secrets in texts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from holdfast.errors import BadName
from holdfast.objects.cloud.client import ClientOwner, make_client
from holdfast.objects.cloud.place import CloudPlace

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

    client: Any = make_client(place, options)

    assert client.prefix == "prefix"


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(BadName, match=r"storage_options of s3://bucket/prefix.*colour"):
        make_client(PLACE, {**OPTIONS, "colour": "red"})


def test_one_client_serves_all_requests() -> None:
    owner = ClientOwner(PLACE, OPTIONS)

    assert owner.find() is owner.find()


def test_secrets_are_in_no_text_and_no_pickle() -> None:
    owner = ClientOwner(PLACE, OPTIONS)
    owner.find()

    assert "hidden" not in repr(owner)
    assert b"hidden" not in pickle.dumps(owner)
