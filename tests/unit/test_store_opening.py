"""holdfast.open writes nothing, refuses what is not a store, and can refuse to write."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from holdfast.errors import BadName, NotAStore, ReadOnlyStore
from holdfast.store import open as open_store


def test_opening_writes_nothing_and_the_first_save_creates(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "s"
    store = open_store(place)
    assert store.snapshots() == []
    assert store.latest() is None
    assert not place.exists()

    store.save("x", 1)

    assert open_store(str(place)).load("x") == 1
    assert repr(store) == f"<Store {place}>"


def test_a_place_with_other_files_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(NotAStore):
        open_store(tmp_path)


def test_a_store_opened_read_only_refuses_to_write(tmp_path: Path) -> None:
    open_store(tmp_path / "s").save("x", 1)
    store = open_store(tmp_path / "s", read_only=True)

    with pytest.raises(ReadOnlyStore, match="opened read-only"):
        store.save("y", 2)
    with pytest.raises(ReadOnlyStore, match="opened read-only"):
        store.save_async("y", 2).wait()

    assert store.load("x") == 1
    with pytest.raises(ReadOnlyStore):
        pickle.loads(pickle.dumps(store)).save("y", 2)


def test_a_store_in_a_directory_is_not_cached(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s", cache_dir=tmp_path / "cache")
    store.save("x", list(range(1000)))

    assert store.load("x") == list(range(1000))
    assert store.statistics().cache is None
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadName, match="s3://bucket/cache is a URL and not a local path"):
        open_store(tmp_path / "s", cache_dir="s3://bucket/cache")
    with pytest.raises(ValueError, match="at least one byte, not -1"):
        open_store(tmp_path / "s", cache_dir=tmp_path / "cache", cache_bytes=-1)
