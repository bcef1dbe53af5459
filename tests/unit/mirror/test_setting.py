"""What may be passed as a mirror."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from holdfast.errors import BadName
from holdfast.mirror.setting import MirrorSetting, make_setting
from holdfast.objects.storage_options import StorageOptions


def test_a_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_setting("there", store_url="here").url == str(tmp_path / "there")


def test_a_url_stays_one() -> None:
    assert make_setting("s3://bucket/mirror/", store_url="here").url == "s3://bucket/mirror"


@pytest.mark.parametrize("url", ["here", "./here", "file:///{here}"])
def test_a_store_is_not_its_own_mirror(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadName, match="is the store itself"):
        make_setting(url.format(here=str(tmp_path / "here").lstrip("/")), store_url="here")


def test_a_bucket_is_not_its_own_mirror() -> None:
    with pytest.raises(BadName, match="is the store itself"):
        make_setting("s3://bucket/a/", store_url="s3://bucket/a")


def test_a_store_in_memory_is_no_mirror() -> None:
    with pytest.raises(BadName, match="exists only while it is open"):
        make_setting("memory://", store_url="here")


def test_a_time_to_wait_is_not_negative() -> None:
    with pytest.raises(ValueError, match="mirror_wait"):
        make_setting("there", store_url="here", wait=-1.0)


def test_secrets_are_neither_pickled_nor_shown() -> None:
    options = StorageOptions({"secret_access_key": "hidden", "region": "eu-west-1"})
    setting = MirrorSetting("s3://b/m", 5.0, options, "named")
    again = pickle.loads(pickle.dumps(setting))
    assert (again.url, again.wait, again.scope) == ("s3://b/m", 5.0, "named")
    assert dict(again.options) == {"region": "eu-west-1"}
    assert b"hidden" not in pickle.dumps(setting)
    assert "hidden" not in repr(setting)
