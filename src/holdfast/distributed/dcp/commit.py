"""The commit of a checkpoint: one lease, the coordinator's, from before any rank writes until the snapshot is there."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from holdfast.errors import HoldfastError, NameInUse, NotFound, NotShared, StoreError
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.layout import PartRef, manifest_key
from holdfast.repo.format.record import Json
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import NameState, Snapshot, read_name
from holdfast.repo.write.part_writer import end_lease
from holdfast.repo.write.transaction import Draft, Part, Transaction

_LOOK_S: Final = 10.0
"""How often the keeper looks whether the lease has to be renewed, and whether anybody still wants it."""


class Gathered:
    """The ranks of a save whose parts were gathered by somebody else: the coordinator takes each step alone."""

    rank: Final = 0
    world_size: Final = 1
    is_coordinator: Final = True

    def __init__(self) -> None:
        """Begin without parts; they are there when it comes to the commit."""
        self.parts: list[PartRef] = []

    def broadcast(self, step: str, map: Callable[[], Any]) -> Any:
        """Return the value."""
        return map()

    def all_gather(self, step: str, map: Callable[[], Any]) -> list[Any]:
        """Return the value in a list; what was written is what was gathered."""
        own = map()
        return [[part.to_json() for part in self.parts]] if step == "write" else [own]

    def beat(self) -> None:
        """Do nothing: nobody waits here."""

    def check_failures(self) -> None:
        """Do nothing: torch tells everybody itself."""


class Commit:
    """One checkpoint from the moment at which it is planned; what is dropped before it is finished is given up."""

    def __init__(self, repo: Repository, name: str, *, overwrite: bool) -> None:
        """Take the lease; raises NameInUse if there is something under the name that must not be replaced."""
        self._repo = repo
        self._ranks = Gathered()
        repo.verify_may_write()
        self._state = verify_free(repo.store, name, overwrite=overwrite)
        self._transaction = Transaction(repo, purpose=f"save {name!r} for torch", ranks=self._ranks)
        self._transaction.__enter__()
        self._end = weakref.finalize(self, _leave, self._transaction, os.getpid())
        self._stop = threading.Event()
        # The coordinator waits for other ranks between steps, for as long as those take to write.
        keeper = threading.Thread(
            target=_keep, args=(weakref.ref(self), self._stop), name="holdfast-keep-lease", daemon=True
        )
        self._keeper = keeper
        keeper.start()

    def keep_alive(self) -> None:
        """Show collectors that this checkpoint is under way, if it is time to."""
        with suppress(HoldfastError):  # what is wrong is found out, and said, at the commit
            self._transaction.keep_alive()

    def finish(
        self,
        root: Part,
        parts: Sequence[PartRef],
        *,
        leases: Sequence[str],
        metadata: Mapping[str, Json],
        environment: Mapping[str, Json],
    ) -> Snapshot:
        """Create the snapshot of what all ranks have written; return when no collector can take it away."""
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
        """Give it up, if it is not finished: nothing of it becomes visible."""
        self._stop_keeper()
        with suppress(HoldfastError):
            self._end()

    def _stop_keeper(self) -> None:
        # A lease is used by one thread at a time.
        self._stop.set()
        if threading.current_thread() is not self._keeper:
            self._keeper.join()


def verify_free(store: ObjectStore, name: str, *, overwrite: bool) -> NameState:
    """Return what a name holds; raises NameInUse if that is something, and is not to be overwritten."""
    state = read_name(store, name)
    if state.snapshot and not overwrite:
        raise NameInUse(
            f"Checkpoint already exists: {name!r} is in use in {store.url}; nothing was written."
            " Choose another name, or pass overwrite=True",
            name=name,
        )
    return state


def _verify_present(store: ObjectStore, part: PartRef, rank: int) -> None:
    """Raise NotShared unless the coordinator sees what a rank has written."""
    try:
        is_there = store.stat(manifest_key(part.manifest.manifest_id)).size_bytes == part.manifest.size_bytes
    except NotFound:
        is_there = False
    if not is_there:
        raise NotShared(
            f"the coordinator does not find in {store.url} what rank {rank} has written there: the path is local to"
            " each node. Use one that all ranks share"
        )


def _rewrite_nothing(stale: Sequence[ChunkRef]) -> list[ChunkRef]:
    raise AssertionError("the coordinator's transaction has no chunks of its own")


def _leave(transaction: Transaction, pid: int) -> None:
    # A forked child drops its copy of this as well, and the save is none of its business.
    if os.getpid() == pid:
        with suppress(StoreError):
            transaction.__exit__(None, None, None)


def _keep(reference: weakref.ref[Commit], stop: threading.Event) -> None:
    while not stop.wait(_LOOK_S):
        commit = reference()
        if commit is None:
            return
        commit.keep_alive()
        del commit
