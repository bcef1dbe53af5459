"""One of many processes compiles: a lease for each key, which the others wait for a bounded time.

It is a lease as saves take it, so every store can hold one and every collector knows it; only its id is derived from
the key, and whoever takes it goes on where the last one ended. No rule of safety needs it: if two hold it after all,
both compile, and one saves.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from holdfast.digest import hash_kind
from holdfast.errors import HoldfastError, NotFound, ObjectExists, StoreError
from holdfast.repo.format.layout import generation_key, lease_stem
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import create_generation, list_generations, read_record
from holdfast.repo.names.leases import beating, describe_lease

WAIT_S: Final = 300.0
BEAT_S: Final = 5.0
"""How often who compiles shows that it lives."""
SILENT_S: Final = 6 * BEAT_S
"""Who has shown nothing for so long is taken for dead."""
_FIRST_POLL_S: Final = 0.05
_LAST_POLL_S: Final = 1.0
_LEASE_ID_BYTES: Final = 12

Result = TypeVar("Result")
CompileRole = Literal["first", "waited", "alone"]


@dataclass(frozen=True, slots=True)
class Turn(Generic[Result]):
    """What became of an attempt to let one compile for all."""

    found: Result | None
    """What another has left, if it is of use here."""
    role: CompileRole
    """The others wait for us; we waited for another; nobody could be told, or waiting took too long."""
    waited_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long to wait, and how."""

    wait_s: float = WAIT_S
    beat_s: float = BEAT_S
    silent_s: float = SILENT_S
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


@contextmanager
def single_flight(
    repo: Repository, key_digest: str, find: Callable[[], Result | None], waiting: Waiting | None = None
) -> Iterator[Turn[Result]]:
    """Be the one who compiles for a key, or wait for who does: then `find` looks for what that one has left.

    Compile and save within the `with` if nothing was found: only when it ends do the others look. Store trouble makes
    everybody compile for themselves; only what `find` raises is raised.
    """
    rules = waiting or Waiting()
    flight = _Flight(repo, key_digest, rules)
    turn = _take_turn(flight, find, rules)
    if turn.role != "first":
        yield turn
        return
    with flight.kept_alive():
        yield turn


def _take_turn(flight: _Flight, find: Callable[[], Result | None], rules: Waiting) -> Turn[Result]:
    started_s = rules.clock()
    waited_s, poll_s = 0.0, _FIRST_POLL_S
    has_waited = False
    while True:
        try:
            view = flight.look()
            is_ours = view.is_free and (view.is_dead or not has_waited) and flight.take(view)
        except HoldfastError:
            return Turn(None, "alone", waited_s)
        if is_ours:
            return _begin(flight, find, waited_s)
        # Whoever waited for one that has ended does not become the next: if that one has left nothing of use, nor will
        # we leave anything for the others, and one after the other would take longer than all at once.
        if not view.is_busy and has_waited:
            return Turn(find(), "waited", waited_s)
        if waited_s >= rules.wait_s:
            return Turn(find(), "alone", waited_s)
        has_waited = has_waited or view.is_busy
        rules.sleep(min(poll_s, rules.wait_s - waited_s))
        waited_s, poll_s = rules.clock() - started_s, min(2 * poll_s, _LAST_POLL_S)


def _begin(flight: _Flight, find: Callable[[], Result | None], waited_s: float) -> Turn[Result]:
    """Look once more, for between the caller's look and ours another may have come and gone."""
    try:
        found = find()
    except BaseException:
        flight.end()
        raise
    if found is None:
        return Turn(None, "first", waited_s)
    flight.end()
    return Turn(found, "waited", waited_s)


@dataclass(frozen=True, slots=True)
class _View:
    """What the files of a lease say at this moment."""

    newest: int
    """The highest generation; -1 if there is none."""
    is_busy: bool
    """Its owner compiles, as far as anybody can tell."""
    is_dead: bool = False
    """It was busy, and its owner is gone."""

    @property
    def is_free(self) -> bool:
        return self.is_dead or not self.is_busy


class _Flight:
    """The lease of one key, as one process sees it."""

    def __init__(self, repo: Repository, key_digest: str, rules: Waiting) -> None:
        self._repo = repo
        self._store = repo.store
        self._rules = rules
        self._lease_id = hash_kind("flight", [key_digest.encode()])[:_LEASE_ID_BYTES].hex()
        self._purpose = f"compile {key_digest[:12]}"
        self._generation = -1
        self._seen = -1
        self._seen_s = 0.0

    def look(self) -> _View:
        """Look who has the lease; raises StoreError."""
        stem = lease_stem(self._lease_id)
        generations = list_generations(self._store, stem)
        newest = generations[-1] if generations else -1
        if newest != self._seen:
            self._seen, self._seen_s = newest, self._rules.clock()
        if newest < 0:
            return _View(newest, is_busy=False)
        try:
            fields = read_record(self._store, generation_key(stem, newest))
        except NotFound:
            return _View(-1, is_busy=False)  # it has ended, and is being removed
        if fields and fields.text("state") != "live":
            return _View(newest, is_busy=False)
        is_silent = self._rules.clock() - self._seen_s >= self._rules.silent_s
        is_gone = fields is not None and _is_gone(fields.text("host"), fields.integer("pid"))
        return _View(newest, is_busy=True, is_dead=is_silent or is_gone)

    def take(self, view: _View) -> bool:
        """Take the lease after what was seen of it; False if another was faster. Raises StoreError."""
        self._generation = view.newest
        # Before the first lease: what holds one and no config would be taken for something else than a store.
        self._repo.verify_may_write()
        try:
            self._advance("live")
        except ObjectExists:
            return False
        return True

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Show life by a thread of its own until the work is done, then let the others go on."""

        def beat() -> bool:
            try:
                self._advance("live")
            except StoreError as error:
                # Another took us for dead: it compiles now, and so do we. Anything else may pass.
                return not isinstance(error, ObjectExists)
            return True

        try:
            with beating(beat, every_s=self._rules.beat_s, name="holdfast-flight"):
                yield
        finally:
            self.end()

    def end(self) -> None:
        """Tell that the work is done, and remove what told that it was not."""
        # A lease that another has taken over is that one's to end.
        with suppress(StoreError):
            self._advance("released")
            stem = lease_stem(self._lease_id)
            for generation in list_generations(self._store, stem):
                if generation <= self._generation:
                    self._store.delete(generation_key(stem, generation))

    def _advance(self, state: Literal["live", "released"]) -> None:
        fields = describe_lease(self._store, self._lease_id, state, purpose=self._purpose)
        create_generation(self._store, lease_stem(self._lease_id), self._generation + 1, fields, durable=False)
        self._generation += 1


def _is_gone(host: str, pid: int) -> bool:
    """Tell whether a process of this host has ended; of other hosts nobody can tell."""
    if host != socket.gethostname() or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it is there, and another user's
    return False
