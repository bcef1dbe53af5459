"""Writes tensors one by one as snapshots of many: gathers them, commits a batch when it is full, in order, or behind.

What is not committed is lost with the process, and nobody sees a part of a batch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

import torch

from holdfast.content.batch import Batch
from holdfast.content.seen_storages import SeenStorages
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import verify_name
from holdfast.repo.handle.repository import Repository
from holdfast.repo.write.writer import save
from holdfast.snapshot.save.environment import describe_environment
from holdfast.tensors.memory import view_storage
from holdfast.trees.registered import Types

PREFIX: Final = "content/"
"""What the names of all batches begin with."""
_MAX_NAMES: Final = 10_000
"""How many names a batch takes, however small they are."""


class BatchWriter:
    """Gathers and commits. Safe in any thread; in a forked child it begins anew, with nothing gathered."""

    def __init__(self, reopen: Callable[[], Repository], *, budget_bytes: int, types: Types) -> None:
        """Open the repository; at most `budget_bytes` of copies wait at any time, in two batches."""
        self._reopen = reopen
        self._limit_bytes = budget_bytes // 2
        self._types = types
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._repo = self._reopen()
        self.id = os.urandom(12).hex()
        self._digests: set[str] = set()
        self._ledger = SeenStorages(self.id)
        self._num_batches = 0
        self._pending = self._new_batch()
        self._sealed: list[Batch] = []
        self._error: BaseException | None = None
        self._worker: threading.Thread | None = None
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._commit_lock = threading.Lock()
        self._committer: int | None = None
        self.num_changes = 0
        """How often something was gathered; whoever has seen less has not seen it all."""

    @property
    def store(self) -> ObjectStore:
        """Where it writes to."""
        return self._repo.store

    def write(self, name: str, tensor: torch.Tensor, *, behind: bool = False) -> None:
        """Take a tensor up; a full batch is committed before this returns, or `behind` the caller's back."""
        self._restart_after_fork()
        name = verify_name(name, what="tensor")
        size_bytes = _measure(tensor)

        def add(batch: Batch, *, copy: bool) -> None:
            batch.add_tensor(name, tensor, self._ledger, self._types, copy=copy)

        self._take_up(add, size_bytes, behind=behind)

    def write_storage(self, digest: str, storage: torch.UntypedStorage) -> None:
        """Take a whole storage up under its digest, unless that was done before."""
        self._restart_after_fork()
        if digest in self._digests:
            return
        memory = view_storage(storage, 0, storage.nbytes())

        def add(batch: Batch, *, copy: bool) -> None:
            batch.add_storage(digest, memory, self._ledger, copy=copy)

        self._take_up(add, storage.nbytes(), behind=False)
        self._digests.add(digest)

    def flush(self) -> None:
        """Commit all that was taken up: durable and visible once this returns.

        Raises what went wrong, also behind the caller's back. What could not be committed is kept; flush again to try
        again.
        """
        self._restart_after_fork()
        with self._lock:
            self._seal()
            worker = self._worker
            # Within a commit of this very thread, when a writer is collected as garbage: the commit goes on to this.
            if self._committer == threading.get_ident():
                return
        if worker is not None:
            worker.join()
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error
        self._drain()

    def _take_up(self, add: Callable[..., None], size_bytes: int, *, behind: bool) -> None:
        if size_bytes > self._limit_bytes:
            self._commit_alone(add)
            return
        if behind:
            self._wait_for_room(size_bytes)
        elif self._sealed:
            # What could not be committed before comes first; if it still cannot, nothing more is taken up.
            self.flush()
        with self._lock:
            self.num_changes += 1
            add(self._pending, copy=True)
            is_full = not self._has_room(1)
            if is_full:
                self._seal()
                if behind:
                    self._start_worker()
        if is_full and not behind:
            self._drain()

    def _has_room(self, size_bytes: int) -> bool:
        return self._pending.size_bytes + size_bytes <= self._limit_bytes and len(self._pending) < _MAX_NAMES

    def _wait_for_room(self, size_bytes: int) -> None:
        """Wait while a full batch is being committed and the next one is full, too; raises if that has failed."""
        with self._room:
            if self._sealed:
                self._start_worker()
            self._room.wait_for(lambda: not self._sealed or self._has_room(size_bytes) or self._error is not None)
            if self._error is not None and not self._has_room(size_bytes):
                raise self._error

    def _start_worker(self) -> None:
        if self._worker is None and self._error is None:
            # Not a daemon, and waited for by `flush`: a script that ends has written.
            self._worker = threading.Thread(target=self._drain_behind, name="holdfast-batches")
            self._worker.start()

    def _commit_alone(self, add: Callable[..., None]) -> None:
        """Commit what is too large to be copied straight from its own memory, while the caller waits."""
        self.flush()
        with self._lock:
            self.num_changes += 1
            batch = self._new_batch()
            # A batch that fails is not kept: its memory may change once the caller goes on.
            add(batch, copy=False)
        with self._commit_lock:
            self._commit(batch)

    def _new_batch(self) -> Batch:
        self._num_batches += 1
        return Batch(f"{PREFIX}{self.id}-{self._num_batches:08}")

    def _seal(self) -> None:
        if len(self._pending):
            self._sealed.append(self._pending)
            self._pending = self._new_batch()

    def _drain(self) -> None:
        """Commit full batches in order; one that fails stays, and so do those behind it."""
        with self._commit_lock:
            while self._sealed:
                self._commit(self._sealed[0])
                with self._room:
                    self._sealed.pop(0)
                    self._room.notify_all()

    def _commit(self, batch: Batch) -> None:
        self._committer = threading.get_ident()
        try:
            # If it was committed and only the reply was lost, it has the same name and content: to repeat it is safe.
            save(self._repo, batch.make_request(describe_environment()))
        finally:
            self._committer = None

    def _drain_behind(self) -> None:
        try:
            while True:
                self._drain()
                with self._lock:
                    if not self._sealed:
                        self._worker = None
                        return
        except BaseException as error:  # noqa: BLE001  # whatever it is, `flush` raises it
            with self._room:
                self._error = error
                self._worker = None
                self._room.notify_all()

    def _restart_after_fork(self) -> None:
        # What was gathered before the fork is the parent's to commit; its locks may have been held.
        if os.getpid() != self._pid:
            self._start()

    def end(self) -> None:
        """Commit what is left, unless this is a forked child that never used it."""
        if os.getpid() == self._pid:
            self.flush()


def _measure(tensor: torch.Tensor) -> int:
    """Return how many bytes a copy may take; what is made of others is copied, however large."""
    if tensor.layout != torch.strided or tensor.is_nested or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return 0
    if tensor.is_meta or tensor.numel() == 0 or not tensor.untyped_storage().data_ptr():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
