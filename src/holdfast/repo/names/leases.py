"""Leases: how a save tells collectors that it is alive; taking the next generation of one is how it is fenced."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Final, Literal, Protocol

from holdfast.errors import LeaseLost, ObjectExists, StoreError
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.thread_pool import BackgroundThread
from holdfast.repo.format.layout import generation_key, lease_stem, new_lease_id, new_write_id
from holdfast.repo.format.record import Json
from holdfast.repo.names.generations import create_generation, list_generations

_log = logging.getLogger(__name__)

RENEW_S: Final = 60.0
"""A save that moves bytes shows a new generation this often."""
EXPIRE_S: Final = 900.0
"""A lease that has shown no new generation for so long may be fenced."""
_NO_MEMORY_S: Final = 1.0
"""How long to wait before the next try, if there was no memory for one."""

LeaseState = Literal["live", "released", "fenced"]

_NO_LOCK: Final = " (no lock)"
"""Ends the host in the lease of a save without the store's lock: so it equals no host's name, and a collector that gets
the lock for itself waits for that save as for one on another host."""


@contextmanager
def beating(beat: Callable[[], bool], *, every_s: float, name: str) -> Iterator[None]:
    """Call `beat` again and again by a thread of its own, until the `with` ends or it returns False."""
    # A bare lock, because to release it takes no memory; an Event may fail and leave the thread waiting.
    over = threading.Lock()
    over.acquire()

    def go_on() -> None:
        has_more = True
        while has_more:
            try:
                has_more = not over.acquire(timeout=every_s) and beat()
            except MemoryError:
                sleep(_NO_MEMORY_S)  # the next beat may get some

    thread = BackgroundThread(go_on, name)
    thread.start()
    try:
        yield
    finally:
        over.release()
        thread.join()
        if thread.error is not None:
            _log.warning("%s ended too early: %r", name, thread.error)


@contextmanager
def kept_alive(lease: Lease, *, every_s: float = RENEW_S / 2) -> Iterator[None]:
    """Renew a lease by a thread of its own: its owner may have to wait for others. Being fenced is found out later."""

    def keep() -> bool:
        with suppress(StoreError, LeaseLost):  # whoever commits will be told
            lease.keep_alive()
        return True

    with beating(keep, every_s=every_s, name="holdfast-lease"):
        yield


def describe_lease(
    store: ObjectStore, lease_id: str, state: LeaseState, *, purpose: str, is_locked: bool = True
) -> dict[str, Json]:
    """Return what the record of a lease says; each one is unlike any other."""
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


class KeptAlive(Protocol):
    """The lease under which packs are written, as those see it who write them."""

    @property
    def lease_id(self) -> str:
        """Its id, with which the names of all files begin that are written under it."""

    def keep_alive(self) -> None:
        """Show that the save lives, if it is time to."""


class Lease:
    """One save's lease. Safe in any thread."""

    def __init__(self, store: ObjectStore, *, purpose: str, is_locked: bool = True) -> None:
        """Take a new lease: from now on, collectors wait for it. Without the store's lock, say so (`is_locked`)."""
        self.lease_id = new_lease_id()
        self._store = store
        self._purpose = purpose
        self._is_locked = is_locked
        self._generation = -1
        self._shown_s = 0.0
        self._shown_monotonic_s = 0.0
        self._turn = threading.Lock()
        self._is_over = False
        try:
            self._advance("live")
        except BaseException:
            self.forget()  # it may be there, and nobody else knows of it
            raise

    def keep_alive(self) -> None:
        """Renew if it is time to; cheap enough to be called for every bit of work."""
        # By two clocks: the store's may be set back, by hours, and this process's does not count while it is suspended.
        is_new = 0.0 <= self._store.clock() - self._shown_s < RENEW_S
        if not is_new or monotonic() - self._shown_monotonic_s >= RENEW_S:
            self.renew()

    def renew(self) -> None:
        """Show that the save is alive; raises LeaseLost if it has been fenced."""
        self._advance("live")

    def release(self) -> None:
        """End the lease; raises LeaseLost if it has been fenced before."""
        self._advance("released")

    def forget(self) -> None:
        """Remove the files of a lease that has ended: the last one last, so that it never seems alive again."""
        try:
            for generation in list_generations(self._store, lease_stem(self.lease_id)):
                self._store.delete(generation_key(lease_stem(self.lease_id), generation))
        except StoreError:
            return  # a collector removes them in time

    def _advance(self, state: LeaseState) -> None:
        with self._turn:
            # Whoever keeps it alive must not bring it back.
            if not self._is_over:
                self._is_over = state == "released"
                self._create_next(state)

    def _create_next(self, state: LeaseState) -> None:
        fields = describe_lease(self._store, self.lease_id, state, purpose=self._purpose, is_locked=self._is_locked)
        try:
            create_generation(
                self._store,
                lease_stem(self.lease_id),
                self._generation + 1,
                fields,
                durable=False,
                # A collector that sees a release removes the lease at once, perhaps before we have looked again.
                may_vanish=state == "released",
            )
        except ObjectExists as error:
            raise LeaseLost(
                f"{self._purpose}: a collector took this save for dead and fenced its lease {self.lease_id};"
                " nothing of it is visible. Save again"
            ) from error
        self._generation += 1
        self._shown_s = self._store.clock()
        self._shown_monotonic_s = monotonic()
