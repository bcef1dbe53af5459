"""Stale handles: what NFS says of a file that another host has removed or replaced while it is open here."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import NotFound, StoreError
from holdfast.objects.local.local_store import LocalStore
from tests.kit.scripted_files import Scripted

READS: dict[str, Callable[[LocalStore], bytes]] = {
    "read": lambda store: store.read("packs/one", limit_bytes=100),
    "read_into": lambda store: _read_into(store),  # noqa: PLW0108 - defined below
}


def _read_into(store: LocalStore) -> bytes:
    buffer = bytearray(5)
    store.read_into("packs/one", 0, memoryview(buffer))
    return bytes(buffer)


def _stale_once(then: Callable[[], None]) -> Callable[[], None]:
    calls = iter(range(1 << 20))

    def fail() -> None:
        if next(calls) == 0:
            then()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    return fail


def _always_stale() -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_file_whose_handle_is_stale_is_opened_again(tmp_path: Path, read: Callable[[LocalStore], bytes]) -> None:
    LocalStore(tmp_path).create("packs/one", b"first")
    store = LocalStore(tmp_path, files=Scripted(before={"read_into": _stale_once(lambda: None)}))

    assert read(store) == b"first"


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_file_that_another_host_has_removed_is_not_found(tmp_path: Path, read: Callable[[LocalStore], bytes]) -> None:
    LocalStore(tmp_path).create("packs/one", b"first")
    removed = _stale_once(lambda: LocalStore(tmp_path).delete("packs/one"))
    store = LocalStore(tmp_path, files=Scripted(before={"read_into": removed}))

    with pytest.raises(NotFound):
        read(store)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_handle_that_stays_stale_is_an_error_of_the_store(
    tmp_path: Path, read: Callable[[LocalStore], bytes]
) -> None:
    LocalStore(tmp_path).create("packs/one", b"first")
    store = LocalStore(tmp_path, files=Scripted(before={"read_into": _always_stale}))

    with pytest.raises(StoreError) as caught:
        read(store)
    assert caught.value.errno == errno.ESTALE


def test_a_listing_that_is_stale_is_an_error_and_not_empty(tmp_path: Path) -> None:
    """Whoever took it for empty would collect everything."""
    LocalStore(tmp_path).create("packs/one", b"first")
    store = LocalStore(tmp_path, files=Scripted(before={"list_directory": _always_stale}))

    with pytest.raises(StoreError) as caught:
        store.list("packs/")
    assert caught.value.errno == errno.ESTALE
