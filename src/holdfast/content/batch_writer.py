"""Collects tensors into batches, and commits each full batch as one snapshot, in order, also in the background.

A batch is visible to readers as a whole or not at all. Tensors that are not committed are lost if the process dies.
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
from holdfast.snapshot.save.save import describe_environment
from holdfast.tensors.composite import has_own_bytes
from holdfast.tensors.memory import view_storage
from holdfast.tensors.spec import find_span
from holdfast.trees.registered import Types

PREFIX: Final = "content/"
"""Prefix of the snapshot names of all batches."""
_MAX_NAMES: Final = 10_000
"""The most names in a batch, however small their tensors are."""


class BatchWriter:
    """Collects tensors and commits them in batches. Safe to use from any thread; a forked child starts empty."""

    def __init__(self, reopen: Callable[[], Repository], *, budget_bytes: int, types: Types) -> None:
        """Open the repository with `reopen`; up to `budget_bytes` of copies wait to be committed, in two batches."""
        self._reopen = reopen
        self._limit_bytes = budget_bytes // 2
        self._types = types
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._repo = self._reopen()
        self.id = os.urandom(12).hex()
        self._digests: set[str] = set()
        self._seen = SeenStorages(self.id)
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
        """How many tensors and storages were added. A reader compares it to notice that it must refresh."""

    @property
    def store(self) -> ObjectStore:
        """The store that it writes to."""
        return self._repo.store

    def write(self, name: str, tensor: torch.Tensor, *, in_background: bool = False) -> None:
        """Add a tensor; a full batch is committed before this returns, or on a background thread."""
        self._restart_after_fork()
        name = verify_name(name, what="tensor")
        size_bytes = _measure(tensor)

        def add(batch: Batch, *, copy: bool) -> None:
            batch.add_tensor(name, tensor, self._seen, self._types, copy=copy)

        self._add(add, size_bytes, in_background=in_background)

    def write_storage(self, digest: str, storage: torch.UntypedStorage) -> None:
        """Add a whole storage under its digest, unless this writer has written that digest before."""
        self._restart_after_fork()
        if digest in self._digests:
            return
        memory = view_storage(storage, 0, storage.nbytes())

        def add(batch: Batch, *, copy: bool) -> None:
            batch.add_storage(digest, memory, self._seen, copy=copy)

        self._add(add, storage.nbytes(), in_background=False)
        self._digests.add(digest)

    def flush(self) -> None:
        """Commit everything added so far; it is durable and visible once this returns.

        Raises errors of this commit and of commits in the background. Batches that could not be committed are kept:
        call flush again to retry.
        """
        self._restart_after_fork()
        with self._lock:
            self._seal()
            worker = self._worker
            # Called within a commit on this thread, because the garbage collector finalised the writer. That commit
            # also commits the batch that was just sealed.
            if self._committer == threading.get_ident():
                return
        if worker is not None:
            worker.join()
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error
        self._drain()

    def _add(self, add: Callable[..., None], size_bytes: int, *, in_background: bool) -> None:
        if size_bytes > self._limit_bytes:
            self._commit_uncopied(add)
            return
        if in_background:
            self._wait_for_room(size_bytes)
        elif self._sealed:
            # Commit batches that failed before. If they fail again, nothing more is added.
            self.flush()
        with self._lock:
            self.num_changes += 1
            add(self._pending, copy=True)
            is_full = not self._has_room(1)
            if is_full:
                self._seal()
                if in_background:
                    self._start_worker()
        if is_full and not in_background:
            self._drain()

    def _has_room(self, size_bytes: int) -> bool:
        return self._pending.size_bytes + size_bytes <= self._limit_bytes and len(self._pending) < _MAX_NAMES

    def _wait_for_room(self, size_bytes: int) -> None:
        """Wait while one full batch is being committed and the next one is full, too; raise if the commit failed."""
        with self._room:
            if self._sealed:
                self._start_worker()
            self._room.wait_for(lambda: not self._sealed or self._has_room(size_bytes) or self._error is not None)
            if self._error is not None and not self._has_room(size_bytes):
                raise self._error

    def _start_worker(self) -> None:
        if self._worker is None and self._error is None:
            # Not a daemon thread, so that the interpreter waits for it at exit.
            self._worker = threading.Thread(target=self._drain_in_background, name="holdfast-batches")
            self._worker.start()

    def _commit_uncopied(self, add: Callable[..., None]) -> None:
        """Commit a tensor that is too large to be copied directly from its own memory, while the caller waits."""
        self.flush()
        with self._lock:
            self.num_changes += 1
            batch = self._new_batch()
            # If the commit fails, the batch is dropped: the caller may change its memory afterwards.
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
        """Commit full batches in order; a batch that fails is kept, and so are those after it."""
        with self._commit_lock:
            while self._sealed:
                self._commit(self._sealed[0])
                with self._room:
                    self._sealed.pop(0)
                    self._room.notify_all()

    def _commit(self, batch: Batch) -> None:
        self._committer = threading.get_ident()
        try:
            # Safe to repeat: if an earlier attempt was committed and only its reply was lost, name and content are
            # the same.
            save(self._repo, batch.make_request(describe_environment()))
        finally:
            self._committer = None

    def _drain_in_background(self) -> None:
        try:
            while True:
                self._drain()
                with self._lock:
                    if not self._sealed:
                        self._worker = None
                        return
        except BaseException as error:  # noqa: BLE001  # `flush` raises it
            with self._room:
                self._error = error
                self._worker = None
                self._room.notify_all()

    def _restart_after_fork(self) -> None:
        # The parent commits what was added before the fork. Its locks may be locked in the child for ever.
        if os.getpid() != self._pid:
            self._start()

    def end(self) -> None:
        """Commit what is left, unless this is a forked child that has not used the writer."""
        if os.getpid() == self._pid:
            self.flush()


def _measure(tensor: torch.Tensor) -> int:
    """Return how many bytes a copy takes; 0 for tensors made of other tensors, which are always copied."""
    if not has_own_bytes(tensor) or tensor.is_meta or tensor.numel() == 0 or not tensor.untyped_storage().data_ptr():
        return 0
    return find_span(tensor.shape, tensor.stride()) * tensor.element_size()
