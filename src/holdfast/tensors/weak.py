"""A cache of weak references to storages, by key and device."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class StorageCache:
    """Finds storages that are still in use, without keeping them alive. Thread-safe."""

    def __init__(self) -> None:
        self._refs: dict[tuple[Hashable, str], StorageWeakRef] = {}
        self._lock = threading.Lock()

    def find(self, key: Hashable, device: torch.device) -> torch.UntypedStorage | None:
        """Return the storage that was added under `key` for `device`, or None if it is not in use any more."""
        with self._lock:
            ref = self._refs.get((key, str(device)))
            if ref is None:
                return None
            storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._refs[key, str(device)]
            return storage

    def keep(self, key: Hashable, storage: torch.UntypedStorage) -> None:
        """Add a storage under `key`, for as long as it is in use elsewhere."""
        with self._lock:
            self._refs[key, str(storage.device)] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch does not say
            if len(self._refs) % 256 == 0:
                live = {known: ref for known, ref in self._refs.items() if not ref.expired()}  # type: ignore[no-untyped-call]  # as above
                self._refs = live
