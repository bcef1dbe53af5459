"""Options of stores in the cloud: secrets are in no text and in no pickle."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest

from holdfast.errors import BadName
from holdfast.objects.storage_options import StorageOptions

SECRETS: dict[str, Any] = {
    "access_key_id": "hidden-1",
    "aws_secret_access_key": "hidden-2",
    "SESSION_TOKEN": "hidden-3",
    "account_key": "hidden-4",
    "sas_token": "hidden-5",
    "service_account_key": "hidden-6",
    "sse_customer_key_base64": "hidden-7",
    "an option of the future": "hidden-8",
}
PLAIN: dict[str, Any] = {
    "endpoint": "http://127.0.0.1:9000",
    "google_base_url": "http://127.0.0.1:9001",
    "AWS_REGION": "eu-west-1",
    "profile": "team",
}


def test_options_are_a_mapping() -> None:
    options = StorageOptions(PLAIN)

    assert dict(options) == PLAIN
    assert len(options) == 4


def test_a_pickle_has_the_options_that_are_no_secrets() -> None:
    data = pickle.dumps(StorageOptions(PLAIN | SECRETS))
    found = pickle.loads(data)

    assert b"hidden" not in data
    assert dict(found) == PLAIN
    assert found.withheld == tuple(sorted(SECRETS))


def test_a_pickle_of_a_pickle_still_names_what_was_left_out() -> None:
    found = pickle.loads(pickle.dumps(StorageOptions(SECRETS)))

    assert pickle.loads(pickle.dumps(found)).withheld == tuple(sorted(SECRETS))


def test_a_copy_within_the_process_has_all_options() -> None:
    assert dict(deepcopy({"options": StorageOptions(SECRETS)})["options"]) == SECRETS


def test_the_settings_of_the_client_are_pickled_without_headers_and_proxies() -> None:
    client = {"timeout": "10s", "default_headers": {"authorization": "hidden"}, "proxy_url": "http://u:hidden@host"}

    data = pickle.dumps(StorageOptions({"client_options": client}))

    assert b"hidden" not in data
    assert dict(pickle.loads(data)) == {"client_options": {"timeout": "10s"}}


def test_an_endpoint_with_a_password_is_a_secret() -> None:
    assert b"hidden" not in pickle.dumps(StorageOptions({"endpoint": "https://user:hidden@host"}))


def test_texts_have_names_and_no_values() -> None:
    text = repr(StorageOptions(SECRETS))

    assert "hidden" not in text
    assert "access_key_id" in text


@pytest.mark.parametrize("wrong", ["endpoint=x", [("endpoint", "x")], {1: "x"}])
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(BadName, match="storage_options is a mapping"):
        StorageOptions(wrong)
