from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import BadName, ReadOnlyStore
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.url import is_url, locate_store_root, open_store


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/data/ckpts", "/data/ckpts"),
        ("/data/../ckpts", "/ckpts"),
        ("file:///data/ckpts", "/data/ckpts"),
        ("FILE:///data/ckpts", "/data/ckpts"),
        ("file://localhost/data/ckpts", "/data/ckpts"),
        ("file:///data/my%20ckpts%2f%C3%A4", "/data/my ckpts/ä"),
        ("/data/a%20b", "/data/a%20b"),
        ("/data/we://ird", "/data/we:/ird"),
        ("/data/s3:/x", "/data/s3:/x"),
    ],
)
def test_a_path_or_file_url_is_a_directory(url: str, path: str) -> None:
    store = open_store(url)

    assert isinstance(store, LocalStore)
    assert store.url == path


def test_a_relative_path_starts_at_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert open_store("ckpts").url == str(tmp_path / "ckpts")


def test_opening_touches_nothing(tmp_path: Path) -> None:
    open_store(str(tmp_path / "ckpts"))

    assert list(tmp_path.iterdir()) == []


def test_memory_stores_are_strangers_to_each_other() -> None:
    first, second = open_store("memory://"), open_store("memory://")
    first.create("packs/a", b"x")

    assert isinstance(first, MemoryStore)
    assert second.list("") == []
    assert first.clock() > 1_600_000_000


@pytest.mark.parametrize("url", ["memory://", "here"])
def test_read_only_is_passed_on(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ReadOnlyStore):
        open_store(url, read_only=True).create("packs/a", b"x")


@pytest.mark.parametrize("url", ["s3://bucket/ckpts", "gs://bucket", "az://container/x"])
def test_cloud_urls_open_without_a_request(url: str) -> None:
    assert open_store(url).url == url


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://host/x", "the scheme 'ftp' is not supported"),
        ("file://host/x", "three slashes"),
        ("file://relative", "three slashes"),
        ("file://", "three slashes"),
        ("file:///a%00b", "zero byte"),
        ("foo://bucket/x", "the scheme 'foo' is not supported"),
        ("simplecache::s3://bucket/x", "two slashes; a directory of that name is ./simplecache::s3://bucket/x"),
        ("1s3://bucket/x", "two slashes"),
        ("s3:/bucket/x", "two slashes; a directory of that name is ./s3:/bucket/x"),
        ("file:/data/ckpts", "two slashes"),
        ("", "not a path of a store"),
        ("a\0b", "not a path of a store"),
    ],
)
def test_what_cannot_be_a_store_is_refused(url: str, reason: str) -> None:
    with pytest.raises(BadName, match=reason):
        open_store(url)


@pytest.mark.parametrize("path", ["./s3:/x", "C:/x", "run:1/x", "a/b:/c", "10:/x", "s3:", "../memory://x"])
def test_a_path_with_a_colon_is_still_a_path(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert not is_url(path)
    assert open_store(path).url == os.path.normpath(tmp_path / path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory that looks like a store."""
    (tmp_path / "ckpts/config").mkdir(parents=True)
    (tmp_path / "ckpts/config/00000000").write_bytes(b"damaged or not")
    (tmp_path / "ckpts/packs/deep").mkdir(parents=True)
    return tmp_path / "ckpts"


@pytest.mark.parametrize("below", ["", "packs", "packs/deep", "not/there"])
def test_the_nearest_store_is_at_or_above(root: Path, below: str) -> None:
    assert locate_store_root(root / below) == str(root)


def test_the_inner_of_two_nested_stores_is_nearest(root: Path) -> None:
    inner = root / "packs/deep/config"
    inner.mkdir()
    (inner / "00000007").touch()

    assert locate_store_root(inner) == str(inner.parent)


@pytest.mark.parametrize("name", ["settings.json", "0000000", "00000000.bak", ".tmp-00000000"])
def test_a_config_directory_of_others_is_no_store(tmp_path: Path, name: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / name).touch()

    # Nothing above a temporary directory is a store either, or no test of this kind could work.
    assert locate_store_root(tmp_path) is None


def test_the_root_of_the_filesystem_ends_the_search() -> None:
    assert locate_store_root(os.sep) is None
