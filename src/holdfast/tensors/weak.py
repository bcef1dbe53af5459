"""Storages that are found again as long as somebody uses them: held weakly, by key and device."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class StorageCache:
    """Finds storages that are still in use; keeps none of them alive. Safe in any thread."""

    def __init__(self) -> None:
        """Know of nothing yet."""
        self._refs: dict[tuple[Hashable, str], StorageWeakRef] = {}
        self._lock = threading.Lock()

    def find(self, key: Hashable, device: torch.device) -> torch.UntypedStorage | None:
        """Return the storage that was kept under `key` for `device`, if it is in use."""
        with self._lock:
            ref = self._refs.get((key, str(device)))
            if ref is None:
                return None
            storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._refs[key, str(device)]
            return storage

    def keep(self, key: Hashable, storage: torch.UntypedStorage) -> None:
        """Remember a storage under `key` until nobody uses it any more."""
        with self._lock:
            self._refs[key, str(storage.device)] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch does not say
            if len(self._refs) % 256 == 0:
                live = {held: ref for held, ref in self._refs.items() if not ref.expired()}  # type: ignore[no-untyped-call]  # as above
                self._refs = live
