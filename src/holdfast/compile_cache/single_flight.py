"""Lets one of many processes compile a graph while the others wait for a limited time. Uses a lease for each key.

Saves use the same kind of lease, so every store supports it and collectors treat it correctly. Only its id differs:
it is derived from the key, and each new owner creates the next generation. Correctness does not depend on the lease: if
two processes own it at once, both compile and one saves.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from holdfast.compile_cache.choices import WAIT_S
from holdfast.digest import hash_kind
from holdfast.errors import HoldfastError, NotFound, ObjectExists, StoreError
from holdfast.repo.format.layout import generation_key, lease_stem
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import create_generation, list_generations, read_record
from holdfast.repo.names.leases import beating, describe_lease

BEAT_S: Final = 5.0
"""How often the compiling process renews its lease."""
SILENT_S: Final = 6 * BEAT_S
"""A process that has not renewed its lease for this long is considered dead."""
_FIRST_POLL_S: Final = 0.05
_LAST_POLL_S: Final = 1.0
_LEASE_ID_BYTES: Final = 12

Result = TypeVar("Result")
CompileRole = Literal["first", "waited", "alone"]


@dataclass(frozen=True, slots=True)
class Turn(Generic[Result]):
    """The outcome of `single_flight` for this process."""

    found: Result | None
    """The graph that another process saved, if it is usable here; None if this process has to compile."""
    role: CompileRole
    """first: other processes wait for this one. waited: this one waited. alone: no lease, or the wait took too long."""
    waited_s: float


@dataclass(frozen=True, slots=True)
class WaitOptions:
    """Time limits of the wait, and the clock that measures them."""

    wait_s: float = WAIT_S
    """How long to wait for another process before compiling too."""
    beat_s: float = BEAT_S
    silent_s: float = SILENT_S
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


@contextmanager
def single_flight(
    repo: Repository, key_digest: str, find: Callable[[], Result | None], waiting: WaitOptions | None = None
) -> Iterator[Turn[Result]]:
    """Become the process that compiles a key, or wait for the one that does and then call `find` for its result.

    If `found` of the yielded turn is None, compile and save inside the `with` block: the other processes wait until
    the block ends. If the store fails, every process compiles for itself. Raises only what `find` raises.
    """
    rules = waiting or WaitOptions()
    lease = _CompileLease(repo, key_digest, rules)
    turn = _take_turn(lease, find, rules)
    if turn.role != "first":
        yield turn
        return
    with lease.kept_alive():
        yield turn


def _take_turn(lease: _CompileLease, find: Callable[[], Result | None], rules: WaitOptions) -> Turn[Result]:
    started_s = rules.clock()
    waited_s, poll_s = 0.0, _FIRST_POLL_S
    has_waited = False
    while True:
        try:
            state = lease.read()
            is_ours = state.is_free and (state.is_dead or not has_waited) and lease.take(state)
        except HoldfastError:
            return Turn(None, "alone", waited_s)
        if is_ours:
            return _begin(lease, find, waited_s)
        # A process that waited does not take the lease after the owner has ended. If the owner left nothing usable,
        # this process would not leave anything for the others either, and compiling one after another would take
        # longer than compiling all at once.
        if not state.is_busy and has_waited:
            return Turn(find(), "waited", waited_s)
        if waited_s >= rules.wait_s:
            return Turn(find(), "alone", waited_s)
        has_waited = has_waited or state.is_busy
        rules.sleep(min(poll_s, rules.wait_s - waited_s))
        waited_s, poll_s = rules.clock() - started_s, min(2 * poll_s, _LAST_POLL_S)


def _begin(lease: _CompileLease, find: Callable[[], Result | None], waited_s: float) -> Turn[Result]:
    """Call `find` again: another process may have compiled and saved between the caller's search and the lease."""
    try:
        found = find()
    except BaseException:
        lease.end()
        raise
    if found is None:
        return Turn(None, "first", waited_s)
    lease.end()
    return Turn(found, "waited", waited_s)


@dataclass(frozen=True, slots=True)
class _LeaseState:
    """The state of a lease at one moment."""

    newest: int
    """The highest generation; -1 if there is none."""
    is_busy: bool
    """A process owns it and has not released it."""
    is_dead: bool = False
    """It is busy, but its owner has ended or stopped renewing it."""

    @property
    def is_free(self) -> bool:
        return self.is_dead or not self.is_busy


class _CompileLease:
    """The lease of one key, as seen by this process."""

    def __init__(self, repo: Repository, key_digest: str, rules: WaitOptions) -> None:
        self._repo = repo
        self._store = repo.store
        self._rules = rules
        self._lease_id = hash_kind("flight", [key_digest.encode()])[:_LEASE_ID_BYTES].hex()
        self._purpose = f"compile {key_digest[:12]}"
        self._generation = -1
        self._newest = -1
        self._newest_since_s = 0.0

    def read(self) -> _LeaseState:
        """Read the state of the lease. Raises StoreError."""
        stem = lease_stem(self._lease_id)
        generations = list_generations(self._store, stem)
        newest = generations[-1] if generations else -1
        if newest != self._newest:
            self._newest, self._newest_since_s = newest, self._rules.clock()
        if newest < 0:
            return _LeaseState(newest, is_busy=False)
        try:
            fields = read_record(self._store, generation_key(stem, newest))
        except NotFound:
            return _LeaseState(-1, is_busy=False)  # released, and its files are being deleted
        if fields and fields.text("state") != "live":
            return _LeaseState(newest, is_busy=False)
        is_silent = self._rules.clock() - self._newest_since_s >= self._rules.silent_s
        is_gone = fields is not None and _is_gone(fields.text("host"), fields.integer("pid"))
        return _LeaseState(newest, is_busy=True, is_dead=is_silent or is_gone)

    def take(self, state: _LeaseState) -> bool:
        """Create the generation after `state.newest`; False if another process created it first. Raises StoreError."""
        self._generation = state.newest
        # Writes the config before the first lease: a directory with a lease and no config is not recognised as a store.
        self._repo.verify_may_write()
        try:
            self._advance("live")
        except ObjectExists:
            return False
        return True

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Renew the lease in a background thread until the block ends, then release it."""

        def renew() -> bool:
            try:
                self._advance("live")
            except StoreError as error:
                # ObjectExists: another process considers this one dead and compiles too. Other errors may be temporary.
                return not isinstance(error, ObjectExists)
            return True

        try:
            with beating(renew, every_s=self._rules.beat_s, name="holdfast-flight"):
                yield
        finally:
            self.end()

    def end(self) -> None:
        """Release the lease and delete its generations."""
        # If another process has taken the lease over, creating the next generation fails here and nothing is deleted.
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
    """Return whether a process has ended; False for processes of other hosts, which cannot be checked."""
    if host != socket.gethostname() or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it exists and belongs to another user
    return False
