"""Remembers which chunks memory holds after a load, as long as nothing has written to it since."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.repo.format.boxes import Box
from holdfast.repo.format.entry import ChunkTable

NOTED_BYTES: Final = 16 << 10
"""Smaller tensors are not remembered: hashing one takes no longer than a note of it."""


class Since(NamedTuple):
    """What the caller believes of the target, and whether to hash memory that this handle has filled itself."""

    name: str
    """The snapshot that the target holds."""
    check: bool = False


class NamedSnapshot(Protocol):
    """Anything that knows the name of a snapshot."""

    @property
    def name(self) -> str:
        """The name."""


def make_since(since: str | NamedSnapshot | None, *, check: bool) -> Since | None:
    """Return the belief that the caller has stated; raises ValueError for a check without one."""
    if since is None:
        if check:
            raise ValueError("check_target=True needs since=, the snapshot that the tree is believed to hold")
        return None
    return Since(since if isinstance(since, str) else since.name, check)


class HeldContent(NamedTuple):
    """The chunks that memory was filled from."""

    table: ChunkTable
    box: Box | None
    """The part of the tensor, if the memory is a rank's part of it."""


class _StorageRef:
    """A weak reference to a storage."""

    __slots__ = ("_ref",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @property
    def is_gone(self) -> bool:
        return bool(self._ref.expired())  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether this is the storage of a tensor: another one may have the address of one that was freed."""
        return not self.is_gone and bool(self._ref.cdata == tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class _Note:
    storage: _StorageRef
    version: int
    """The version counter after the load; every operation of torch that writes in place changes it."""
    content: HeldContent


_Key = tuple[torch.device, int, int]


class HeldMemory:
    """The content of memory that this handle has filled with verified bytes. Safe in any thread.

    A note is valid while the storage exists and its version counter is unchanged. Writes that torch does not count go
    unnoticed: through `.data`, numpy, other processes, or code outside torch.
    """

    def __init__(self) -> None:
        self._notes: dict[_Key, _Note] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many notes there are."""
        return len(self._notes)

    def find(self, tensor: torch.Tensor, size_bytes: int) -> HeldContent | None:
        """Return what the memory of a tensor, from its first item on, holds; None if that is not known."""
        note = self._notes.get(_find_key(tensor, size_bytes))
        if note is None or find_version(tensor) != note.version or not note.storage.is_of(tensor):
            return None
        return note.content

    def note(self, contents: Iterable[tuple[torch.Tensor, int, HeldContent]]) -> None:
        """Remember what memory holds: tensors, how many bytes from their first items on, and contents."""
        made: dict[_Key, _Note] = {}
        for tensor, size_bytes, content in contents:
            version = find_version(tensor)
            if version is not None:
                made[_find_key(tensor, size_bytes)] = _Note(_StorageRef(tensor), version, content)
        with self._lock:
            kept = {key: note for key, note in self._notes.items() if not note.storage.is_gone}
            self._notes = kept | made


def find_version(tensor: torch.Tensor) -> int | None:
    """Return the version counter of a tensor; None for one that was made in inference mode, which has none."""
    return None if tensor.is_inference() else int(tensor._version)


def _find_key(tensor: torch.Tensor, size_bytes: int) -> _Key:
    return tensor.device, tensor.data_ptr(), size_bytes
