"""Commits a DCP checkpoint: the coordinator has a lease from before any rank writes until the snapshot exists."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from holdfast.errors import HoldfastError, NameInUse, NotFound, NotShared, StoreError
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.layout import PartRef, manifest_key
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState, read_name
from holdfast.repo.write.part_writer import end_lease
from holdfast.repo.write.transaction import Draft, ManifestPart, Transaction

_KEEP_EVERY_S: Final = 10.0
"""How often the keeper thread checks whether the lease must be renewed and whether the `Commit` still exists."""


class Gathered:
    """The ranks of a save whose parts were gathered by torch: each step runs on the coordinator only."""

    rank: Final = 0
    world_size: Final = 1
    is_coordinator: Final = True

    def __init__(self) -> None:
        self.parts: list[PartRef] = []
        """Set before the commit."""

    def broadcast(self, step: str, map: Callable[[], Any]) -> Any:
        """Return the value of `map`."""
        return map()

    def all_gather(self, step: str, map: Callable[[], Any]) -> list[Any]:
        """Return the value of `map` in a list; for the step "write", return the gathered parts."""
        own = map()
        return [[part.to_json() for part in self.parts]] if step == "write" else [own]

    def beat(self) -> None:
        """Do nothing: no other rank waits."""

    def check_failures(self) -> None:
        """Do nothing: torch reports failures to all ranks."""


class Commit:
    """One checkpoint, from planning to commit. If it is dropped before `finish`, the checkpoint is abandoned."""

    def __init__(self, repo: Repository, name: str, *, overwrite: bool) -> None:
        """Create the lease; raise NameInUse if the name is in use and `overwrite` is False."""
        self._repo = repo
        self._ranks = Gathered()
        repo.verify_may_write()
        self._state = verify_free(repo.store, name, overwrite=overwrite)
        self._transaction = Transaction(repo, purpose=f"save {name!r} for torch", ranks=self._ranks)
        self._transaction.__enter__()
        self._end = weakref.finalize(self, _end_transaction, self._transaction, os.getpid())
        self._stop = threading.Event()
        # Between steps the coordinator waits while other ranks write. The thread renews the lease during that time.
        keeper = threading.Thread(
            target=_keep_lease, args=(weakref.ref(self), self._stop), name="holdfast-keep-lease", daemon=True
        )
        self._keeper = keeper
        keeper.start()

    def keep_alive(self) -> None:
        """Renew the lease if that is due, so that collectors wait for this checkpoint."""
        with suppress(HoldfastError):  # the commit raises whatever is wrong with the lease
            self._transaction.keep_alive()

    def finish(
        self,
        root: ManifestPart,
        parts: Sequence[PartRef],
        *,
        leases: Sequence[str],
        metadata: Mapping[str, Json],
        environment: Mapping[str, Json],
    ) -> CommittedSnapshot:
        """Create the snapshot from the parts of all ranks; return when no collector can delete any of it."""
        self._stop_keeper()
        for rank, part in enumerate(parts):
            _verify_present(self._repo.store, part, rank)
        self._ranks.parts = list(parts)
        draft = Draft(self._state, metadata, environment, root=root)
        snapshot = self._transaction.commit(draft, list, rewrite=_rewrite_nothing)
        for lease_id in leases:
            end_lease(self._repo.store, lease_id)
        self._end()
        return snapshot

    def abandon(self) -> None:
        """Abandon the checkpoint unless it is finished; nothing of it becomes visible."""
        self._stop_keeper()
        with suppress(HoldfastError):
            self._end()

    def _stop_keeper(self) -> None:
        # Only one thread at a time may use a lease.
        self._stop.set()
        if threading.current_thread() is not self._keeper:
            self._keeper.join()


def verify_free(store: ObjectStore, name: str, *, overwrite: bool) -> NameState:
    """Return the state of a name; raise NameInUse if it has a snapshot and `overwrite` is False."""
    state = read_name(store, name)
    if state.snapshot and not overwrite:
        raise NameInUse(
            f"Checkpoint already exists: {name!r} is in use in {store.url}; nothing was written."
            " Choose another name, or pass overwrite=True",
            name=name,
        )
    return state


def _verify_present(store: ObjectStore, part: PartRef, rank: int) -> None:
    """Raise NotShared unless the manifest that a rank has written is visible to the coordinator."""
    try:
        is_there = store.stat(manifest_key(part.manifest.manifest_id)).size_bytes == part.manifest.size_bytes
    except NotFound:
        is_there = False
    if not is_there:
        raise NotShared(
            f"the coordinator does not find the manifest that rank {rank} wrote to {store.url}: the path is local to"
            " each node. Use a path that all ranks share"
        )


def _rewrite_nothing(stale: Sequence[ChunkRef]) -> list[ChunkRef]:
    raise AssertionError("the coordinator's transaction has no chunks of its own")


def _end_transaction(transaction: Transaction, pid: int) -> None:
    # A forked child also drops its copy of the Commit. It must not end the parent's save.
    if os.getpid() == pid:
        with suppress(StoreError):
            transaction.__exit__(None, None, None)


def _keep_lease(reference: weakref.ref[Commit], stop: threading.Event) -> None:
    while not stop.wait(_KEEP_EVERY_S):
        commit = reference()
        if commit is None:
            return
        commit.keep_alive()
        del commit
