"""An upload keeps blocks as they are and copies everything else, and reuses no memory that a request may still read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from holdfast.errors import StoreError
from holdfast.objects.blocks import LentBlock
from holdfast.objects.cloud.cloud_store import CloudUpload


class Puts:
    """Records what is sent; fails if it is told to."""

    def __init__(self, error: StoreError | None = None) -> None:
        self.parts: Sequence[memoryview] = ()
        self.released: list[int] = []
        self._error = error

    def send(self, key: str, parts: Sequence[memoryview]) -> None:
        self.parts = parts
        assert not self.released
        if self._error:
            raise self._error

    def fill(self, upload: CloudUpload) -> list[memoryview]:
        blocks = [memoryview(bytearray(letter * 5000)) for letter in (b"b", b"c")]
        buffer = bytearray(b"aaaa")
        upload.append(buffer, b"")
        for number, block in enumerate(blocks):
            upload.append_block(LentBlock(block, partial(self.released.append, number)))
        upload.append(b"d", b"e")
        buffer[:] = b"zzzz"
        return blocks


def test_blocks_are_sent_from_where_they_are_and_other_bytes_as_copies() -> None:
    puts = Puts()
    with CloudUpload("packs/one", commit=puts.send) as upload:
        blocks = puts.fill(upload)
        upload.commit()

    assert b"".join(puts.parts) == b"aaaa" + b"b" * 5000 + b"c" * 5000 + b"de"
    assert [part.obj for part in puts.parts[1:3]] == [block.obj for block in blocks]
    assert puts.released == [0, 1]


def test_blocks_of_an_upload_that_was_aborted_are_released_once() -> None:
    puts = Puts()
    with CloudUpload("packs/one", commit=puts.send) as upload:
        puts.fill(upload)
        upload.abort()

    assert puts.released == [0, 1]
    assert not puts.parts


def test_blocks_of_a_commit_that_failed_are_never_reused() -> None:
    puts = Puts(StoreError("the reply was lost", fate="unknown"))
    with CloudUpload("packs/one", commit=puts.send) as upload:
        puts.fill(upload)
        with pytest.raises(StoreError, match="the reply was lost"):
            upload.commit()

    assert puts.released == []


def test_an_upload_without_bytes_is_an_empty_object() -> None:
    puts = Puts()
    upload = CloudUpload("packs/one", commit=puts.send)
    upload.append(b"")
    upload.commit()

    assert [bytes(part) for part in puts.parts] == [b""]
    with pytest.raises(StoreError, match="has ended"):
        upload.append(b"a")
