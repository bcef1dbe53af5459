"""Leases and marks: a save renews its lease while it is alive; a collector fences leases and marks files."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import Final, Literal, Protocol

from holdfast.errors import Corrupt, LeaseLost, NotFound, ObjectExists, StoreError
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.objects.thread_pool import BackgroundThread
from holdfast.repo.format.layout import (
    BAD,
    MANIFESTS,
    MARKS,
    PACKS,
    generation_key,
    is_file_id,
    lease_stem,
    new_lease_id,
    new_write_id,
)
from holdfast.repo.names.generations import RELISTS, create_unlisted, read_record

_log = logging.getLogger(__name__)

RENEW_S: Final = 60.0
"""How often a save that makes progress renews its lease."""
EXPIRE_S: Final = 900.0
"""A lease that was not renewed for so long may be fenced."""
_NO_MEMORY_S: Final = 1.0
"""The wait before the next attempt after a MemoryError."""

LeaseState = Literal["live", "released", "fenced"]

_NO_LOCK: Final = " (no lock)"
"""Appended to the host in the lease of a save that runs without the store's lock. The host then equals no real host
name, so a collector that gets the exclusive lock waits for that save as for one on another host."""


@contextmanager
def beating(beat: Callable[[], bool], *, every_s: float, name: str) -> Iterator[None]:
    """Call `beat` every `every_s` seconds on a background thread, until the `with` block ends or it returns False."""
    # A plain lock, because releasing it allocates no memory; setting an Event may fail and leave the thread waiting.
    over = threading.Lock()
    over.acquire()

    def run() -> None:
        has_more = True
        while has_more:
            try:
                has_more = not over.acquire(timeout=every_s) and beat()
            except MemoryError:
                sleep(_NO_MEMORY_S)  # the next beat may get some

    thread = BackgroundThread(run, name)
    thread.start()
    try:
        yield
    finally:
        over.release()
        thread.join()
        if thread.error is not None:
            _log.warning("background thread %s stopped early: %r", name, thread.error)


@contextmanager
def kept_alive(lease: Lease, *, every_s: float = RENEW_S / 2) -> Iterator[None]:
    """Renew a lease on a background thread while the caller waits for others; a lost lease is not reported here."""

    def keep() -> bool:
        with suppress(StoreError, LeaseLost):  # the commit renews the lease again, and raises
            lease.keep_alive()
        return True

    with beating(keep, every_s=every_s, name="holdfast-lease"):
        yield


def describe_lease(
    store: ObjectStore, lease_id: str, state: LeaseState, *, purpose: str, is_locked: bool = True
) -> dict[str, Json]:
    """Return the fields of a lease record; a random write id makes each one unique."""
    return {
        "kind": "lease",
        "lease": lease_id,
        "state": state,
        "write_id": new_write_id(),
        "purpose": purpose,
        "host": socket.gethostname() + ("" if is_locked else _NO_LOCK),
        "pid": os.getpid(),
        "time": store.clock(),
    }


def delete_lease(store: ObjectStore, lease_id: str, generations: Sequence[int]) -> None:
    """Delete the files of an ended lease, the highest generation last; what cannot be deleted, a collector deletes."""
    keys = [generation_key(lease_stem(lease_id), generation) for generation in generations]
    with suppress(StoreError):
        store.run_together([partial(store.delete, key) for key in keys[:-1]])
        store.run_together([partial(store.delete, key) for key in keys[-1:]])


class KeptAlive(Protocol):
    """The part of a lease that code which writes packs needs."""

    @property
    def lease_id(self) -> str:
        """The lease's id; the names of all files written under it begin with it."""

    def keep_alive(self) -> None:
        """Renew the lease if it is due."""


class Lease:
    """One save's lease. Thread-safe."""

    def __init__(self, store: ObjectStore, *, purpose: str, is_locked: bool = True) -> None:
        """Create a new lease: from now on, collectors wait for it. Pass `is_locked=False` without the store's lock."""
        self.lease_id = new_lease_id()
        self._store = store
        self._purpose = purpose
        self._is_locked = is_locked
        self._generation = -1
        self._renewed_s = 0.0
        self._renewed_monotonic_s = 0.0
        self._lock = threading.Lock()
        self._is_released = False
        self._has_ended = False
        try:
            self._advance("live")
        except BaseException:
            self.forget()  # its record may exist, and no caller could release it
            raise

    def keep_alive(self) -> None:
        """Renew the lease if it is due; cheap enough to call for every piece of work."""
        # Two clocks: the store's may be set back by hours, and the monotonic one stops while the machine is suspended.
        is_recent = 0.0 <= self._store.clock() - self._renewed_s < RENEW_S
        if not is_recent or monotonic() - self._renewed_monotonic_s >= RENEW_S:
            self.renew()

    def renew(self) -> None:
        """Create the next generation of the lease; raises LeaseLost if it was fenced."""
        self._advance("live")

    def release(self) -> None:
        """End the lease; raises LeaseLost if it was fenced."""
        self._advance("released")

    def forget(self) -> None:
        """Delete the files of an ended lease, the highest generation last, so that it never seems alive again."""
        # Unless it was released, the generation after the last may exist: a fence, or a release that got no answer.
        delete_lease(self._store, self.lease_id, range(self._generation + (1 if self._has_ended else 2)))

    def _advance(self, state: LeaseState) -> None:
        with self._lock:
            # A background thread that renews must not revive a released lease.
            if not self._is_released:
                self._is_released = state == "released"
                self._create_next(state)

    def _create_next(self, state: LeaseState) -> None:
        fields = describe_lease(self._store, self.lease_id, state, purpose=self._purpose, is_locked=self._is_locked)
        began_s, began_monotonic_s = self._store.clock(), monotonic()
        try:
            # Not listed again: a collector fences by creating the generation after the one that it has seen, so a
            # fence from before this renewal has the number of this renewal.
            create_unlisted(self._store, lease_stem(self.lease_id), self._generation + 1, fields, durable=False)
        except ObjectExists as error:
            raise LeaseLost(
                f"{self._purpose}: a collector considered this save dead and fenced its lease {self.lease_id};"
                " nothing of it is visible. Save again"
            ) from error
        self._generation += 1
        self._has_ended = state == "released"
        self._renewed_s, self._renewed_monotonic_s = began_s, began_monotonic_s


ABANDONED_S: Final = 6 * 3600.0
"""A mark of this age was probably left by an interrupted collection."""


@dataclass(frozen=True, slots=True)
class MarksView:
    """All marks, as read at one time."""

    keys: frozenset[str]
    """The packs and manifests that some collector has marked."""
    abandoned: Sequence[str]
    """The keys of marks older than ABANDONED_S, whose collection was probably interrupted. Until another one finishes
    it, saves write the marked chunks again."""


def read_marks(store: ObjectStore) -> MarksView:
    """Read all marks.

    A damaged mark may have named any pack or manifest, so then all count as marked: a save still works, but reuses
    nothing that is stored. Marks are not fsynced, so a power loss can damage one.
    """
    for _ in range(RELISTS):
        listed = list(store.iter_objects(MARKS))
        try:
            named = store.run_together([partial(_read_keys, store, info.key) for info in listed])
        except NotFound:
            continue  # its collector has finished and deleted it, so the listing is out of date
        return MarksView(frozenset(key for keys in named for key in keys), _find_abandoned(store, listed))
    raise Corrupt(f"{store.url}: marks keep disappearing while they are read; try again", key=MARKS)


def read_marked(store: ObjectStore) -> frozenset[str]:
    """Return the keys of all packs and manifests that some collector has marked; see `read_marks`."""
    return read_marks(store).keys


def _read_keys(store: ObjectStore, key: str) -> list[str]:
    try:
        fields = read_record(store, key)
        if fields is None:
            return []
        fields.expect(kind="mark")
        return list(fields.texts("keys"))
    except Corrupt:
        return [info.key for prefix in (PACKS, MANIFESTS) for info in store.iter_objects(prefix)]


def read_abandoned(store: ObjectStore) -> list[str]:
    """Return the keys of abandoned marks, without reading any; see `MarksView`."""
    return _find_abandoned(store, list(store.iter_objects(MARKS)))


def _find_abandoned(store: ObjectStore, listed: Sequence[ObjectInfo]) -> list[str]:
    oldest_s = store.clock() - ABANDONED_S
    return [info.key for info in listed if info.modified_s < oldest_s]


def read_bad_packs(store: ObjectStore) -> frozenset[str]:
    """Return the keys of packs known to contain damaged chunks; new saves do not refer to them."""
    found = (info.key.removeprefix(BAD).partition("@")[0] for info in store.iter_objects(BAD))
    return frozenset(PACKS + pack_id for pack_id in found if is_file_id(pack_id))
