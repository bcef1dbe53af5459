"""Finds what the server of a bucket can do, by reading alone or by tests with scratch objects."""

from __future__ import annotations

import hashlib
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import obstore
from obstore import exceptions

from holdfast.errors import HoldfastError, ObjectExists, StoreError
from holdfast.objects.cloud.client import TIMEOUTS_S, make_client
from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.cloud.failures import find_cause

_REQUESTS: Final = 5
_DATA: Final = b"a scratch object of holdfast doctor"


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """Facts about a bucket and its server; None if something was not tested or could not be."""

    url: str
    service: str
    """The scheme of the URL: s3, gs or az."""
    request_ms: float
    """Median time of a small request."""
    tried: bool = False
    """It was tested with scratch objects."""
    writable: bool | None = None
    """Objects can be created."""
    refusal: str = ""
    """Why no object can be created."""
    conditional_create: bool | None = None
    """The server refuses to create an object that exists."""
    ranges: bool | None = None
    """A part of an object can be read."""
    checksums: bool | None = None
    """The server refuses bytes that do not fit their checksum."""
    listed: bool | None = None
    """An object is listed as soon as it was created."""
    deletable: bool | None = None
    """Objects can be deleted."""
    skew_s: float | None = None
    """How far the clock of the server is ahead of this host's; less than two seconds count as 0."""


def probe_bucket(store: CloudStore, *, write: bool = False) -> BucketFacts:
    """Return facts about a bucket; raises StoreError if it cannot be listed.

    With `write`, also test what only a write can show, with scratch objects that are deleted again.
    """
    known = BucketFacts(store.url, store.place.scheme, _measure(lambda: store.list("", limit=1)), tried=write)
    if not write:
        return known
    try:
        key = store.create_scratch(_DATA)
    except StoreError as error:
        return replace(known, writable=False, refusal=str(error))
    tested = _test(replace(known, writable=True), store, key)
    return replace(tested, deletable=_succeeds(lambda: _delete(store, key)))


def _test(known: BucketFacts, store: CloudStore, key: str) -> BucketFacts:
    client = store.clients.find()
    return replace(
        known,
        # Right after it was created, and before anything else: the listing also shows the clock of the server.
        listed=_succeeds(lambda: key in [info.key for info in store.list_scratch()]),
        skew_s=store.skew_s,
        request_ms=_measure(lambda: obstore.head(client, key)),
        conditional_create=_refuses_existing(store, key),
        ranges=_succeeds(lambda: bytes(obstore.get_range(client, key, start=2, length=7)) == _DATA[2:9]),
        checksums=_verifies_checksums(store, key),
    )


def _measure(request: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_REQUESTS):
        began = time.perf_counter()
        request()
        times_s.append(time.perf_counter() - began)
    return 1000 * median(times_s)


def _refuses_existing(store: CloudStore, key: str) -> bool | None:
    """Create an object that exists; None if the server neither accepts nor refuses that."""
    try:
        store.put_once(key, [memoryview(_DATA)])
    except ObjectExists:
        return True
    except StoreError:
        return None
    return False


def _succeeds(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except (exceptions.BaseError, HoldfastError):
        return False


def _verifies_checksums(store: CloudStore, key: str) -> bool | None:
    """Send bytes with the MD5 of others; every service knows that header."""
    wrong = b64encode(hashlib.md5(b"other bytes", usedforsecurity=False).digest()).decode()
    timeout_s = TIMEOUTS_S["small"]
    client = make_client(store.place, store.clients.options, timeout_s=timeout_s, headers={"Content-MD5": wrong})
    other = f"{key}-checksum"
    try:
        obstore.put(client, other, _DATA, use_multipart=False)
    except exceptions.BaseError as error:
        return True if find_cause(error) in ("checksum", "other") else None
    store.delete_scratch(other)
    return False


def _delete(store: CloudStore, key: str) -> bool:
    store.delete_scratch(key)
    return key not in [info.key for info in store.list_scratch()]
