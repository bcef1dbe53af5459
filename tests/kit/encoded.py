"""Saves whose chunks are encoded, and what is stored of them, for tests of codecs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache

import numpy as np

from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.compression import Compression
from holdfast.repo.handle.repository import Repository
from holdfast.repo.write.writer import Request, SaveResult, WriteOptions, save
from tests.kit.saving import new_repo, read_entries

CONFIGS = ["config/00000000", "config/00000001", "config/00000002"]
"""The records of a store that declares the codec: created, confirmed, declared."""


@cache
def halves(size_bytes: int, seed: int = 0) -> bytes:
    """Return items of two bytes, of which the upper one takes four values: they shrink by about a third."""
    low = np.frombuffer(random.Random(seed).randbytes(-(-size_bytes // 2)), np.uint8)
    high = np.array([60, 61, 188, 189], np.uint8)[low & 3][::-1]
    return np.stack([low, high], axis=1).tobytes()[:size_bytes]


def save_encoded(
    repo: Repository, name: str, entries: Mapping[str, bytes], compression: Compression = "fast"
) -> SaveResult:
    """Save entries as items of two bytes."""
    sources = [BytesSource(entry, data, item_bytes=2) for entry, data in entries.items()]
    return save(repo, Request(name, sources, options=WriteOptions(compression=compression)))


def encoded_repo(store: ObjectStore, name: str, entries: Mapping[str, bytes]) -> Repository:
    """Return a repository with one snapshot, whose chunks are encoded."""
    repo = new_repo(store)
    save_encoded(repo, name, entries)
    return repo


def codecs(repo: Repository, name: str, entry: str) -> list[int]:
    """Return the codec of each chunk of an entry."""
    return [chunk.location.codec for chunk in read_entries(repo, name)[entry].chunks if chunk.location]
