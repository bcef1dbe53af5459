"""Credentials of AWS: options first, then the environment, then a profile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import BadName, StoreError
from holdfast.objects.cloud import client
from holdfast.objects.cloud.client import find_provider
from tests.kit.s3_server import S3Server
from tests.unit.objects.cloud.servers import open_cloud

PROFILES = """
[default]
aws_access_key_id = default-key
aws_secret_access_key = default-secret
[team]
aws_access_key_id = team-key
aws_secret_access_key = team-secret
region = eu-central-1
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials but those of the test, and no machine that is asked for a role."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture
def _profiles(tmp_path: Path) -> None:
    pytest.importorskip("boto3", reason="profiles need boto3")
    (tmp_path / "credentials").write_text(PROFILES)


@pytest.mark.usefixtures("_profiles")
@pytest.mark.parametrize(
    ("variable", "options", "key"),
    [(None, {}, "default-key"), ("team", {}, "team-key"), ("default", {"profile": "team"}, "team-key")],
)
def test_a_profile_is_that_of_the_options_or_of_the_environment_or_the_default_one(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, options: dict[str, Any], key: str
) -> None:
    if variable:
        monkeypatch.setenv("AWS_PROFILE", variable)

    assert find_provider(options)()["access_key_id"] == key


@pytest.mark.usefixtures("_profiles")
def test_the_region_of_a_profile_is_used() -> None:
    assert find_provider({"profile": "team"}).config == {"region": "eu-central-1"}


@pytest.mark.usefixtures("_profiles")
@pytest.mark.parametrize("options", [{"access_key_id": "own"}, {"credential_provider": dict}, {"skip_signature": True}])
def test_credentials_of_the_options_come_before_a_profile(options: dict[str, Any]) -> None:
    assert find_provider(options) is None


@pytest.mark.usefixtures("_profiles")
def test_credentials_of_the_environment_come_before_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key of the environment")

    assert find_provider({}) is None


@pytest.mark.usefixtures("_profiles")
def test_a_store_signs_its_requests_with_the_profile(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "team")
    options = {"endpoint": server.endpoint, "access_key_id": None, "secret_access_key": None}

    open_cloud(server, options=options).create("packs/one", b"1")

    assert all("Credential=team-key/" in request.authorization for request in server.requests)


@pytest.mark.usefixtures("_profiles")
def test_a_profile_that_does_not_exist_is_named() -> None:
    with pytest.raises(BadName, match=r"the AWS profile.*nobody"):
        find_provider({"profile": "nobody"})


def test_without_credentials_obstore_asks_the_machine() -> None:
    assert find_provider({}) is None


def test_a_profile_without_boto3_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "find_spec", lambda name: None)

    with pytest.raises(BadName, match="pip install boto3"):
        find_provider({"profile": "team"})
    assert find_provider({}) is None


def test_credentials_of_the_options_do_not_import_boto3() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "boto3"]:
        del sys.modules[name]

    find_provider({"access_key_id": "own"})

    assert "boto3" not in sys.modules


def test_a_machine_that_has_no_role_is_a_matter_of_credentials(server: S3Server) -> None:
    options = {"access_key_id": None, "secret_access_key": None, "metadata_endpoint": server.endpoint}

    with pytest.raises(StoreError, match="the credentials are missing"):
        open_cloud(server, options=options).list("")
