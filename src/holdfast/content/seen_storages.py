"""The storages that were seen, as long as they live: whether what was seen of one has changed since.

A version counter does not tell: writes through `.data`, numpy or another library leave it alone. So the ledger keeps
fingerprints of what it saw, in cells, and looks again where a later tensor lies over an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.digest import fingerprint
from holdfast.tensors.memory import view_bytes, view_storage

_CELL_BYTES: Final = 256 << 10
_MAX_PIECES: Final = 32
"""A cell that was seen in more pieces than this is looked at as one from then on."""
_SWEEP_EVERY: Final = 1024


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of one cell as they were when they were seen."""

    start: int
    stop: int
    mark: bytes

    def is_unchanged(self, storage: torch.UntypedStorage) -> bool:
        return _mark(storage, self.start, self.stop) == self.mark


@dataclass(slots=True)
class _Seen:
    """A storage, and what its current content is called."""

    ref: StorageWeakRef
    group: str
    cells: dict[int, list[_Piece]] = field(default_factory=dict)


class SeenStorages:
    """Gives the content of a storage a name that lasts until it changes or the storage dies. One thread at a time."""

    def __init__(self, prefix: str) -> None:
        """Have seen nothing; all names will begin with `prefix`."""
        self._prefix = prefix
        self._count = 0
        # By address, which stays taken as long as the weak reference is there.
        self._seen: dict[int, _Seen] = {}

    def find_group(self, storage: torch.UntypedStorage, start: int, stop: int) -> str:
        """Return the name for bytes of a storage: the one that overlapping bytes got, unless those have changed."""
        seen = self._seen.get(storage._cdata)
        if seen is None or seen.ref.expired():  # type: ignore[no-untyped-call]  # torch does not say
            seen = self._begin(storage)
        elif not self._is_unchanged(seen, storage, start, stop):
            self._renew(seen)
        if not self._take_all_down(seen, storage, start, stop):
            self._renew(seen)
            self._take_all_down(seen, storage, start, stop)
        return seen.group

    def _renew(self, seen: _Seen) -> None:
        """Begin anew with what is there now; what was stored under the old name stays as it was."""
        seen.group, seen.cells = self._new_name(), {}

    def _begin(self, storage: torch.UntypedStorage) -> _Seen:
        if len(self._seen) % _SWEEP_EVERY == _SWEEP_EVERY - 1:
            live = {key: seen for key, seen in self._seen.items() if not seen.ref.expired()}  # type: ignore[no-untyped-call]  # as above
            self._seen = live
        seen = _Seen(StorageWeakRef(storage), self._new_name())  # type: ignore[no-untyped-call]  # as above
        self._seen[storage._cdata] = seen
        return seen

    def _new_name(self) -> str:
        self._count += 1
        return f"{self._prefix}.{self._count}"

    def _is_unchanged(self, seen: _Seen, storage: torch.UntypedStorage, start: int, stop: int) -> bool:
        return all(
            piece.is_unchanged(storage)
            for cell in _iter_cells(start, stop)
            for piece in seen.cells.get(cell, ())
            if piece.start < stop and start < piece.stop
        )

    def _take_all_down(self, seen: _Seen, storage: torch.UntypedStorage, start: int, stop: int) -> bool:
        """Remember bytes, having compared them with what overlaps; tell whether all is as it was, as far as looked."""
        return all(
            _take_down(
                seen.cells.setdefault(cell, []),
                storage,
                max(start, cell * _CELL_BYTES),
                min(stop, (cell + 1) * _CELL_BYTES),
            )
            for cell in _iter_cells(start, stop)
        )


def _take_down(pieces: list[_Piece], storage: torch.UntypedStorage, start: int, stop: int) -> bool:
    """Remember a piece of a cell; when these become many, look at them all, and at the cell as one from then on."""
    if not any(piece.start <= start and stop <= piece.stop for piece in pieces):
        pieces[:] = [piece for piece in pieces if not (start <= piece.start and piece.stop <= stop)]
        pieces.append(_Piece(start, stop, _mark(storage, start, stop)))
    if len(pieces) <= _MAX_PIECES:
        return True
    # To look at changed bytes as if they had been so before would give two contents one name.
    if not all(piece.is_unchanged(storage) for piece in pieces):
        return False
    low, high = min(piece.start for piece in pieces), max(piece.stop for piece in pieces)
    pieces[:] = [_Piece(low, high, _mark(storage, low, high))]
    return True


def _iter_cells(start: int, stop: int) -> range:
    return range(start // _CELL_BYTES, -(-stop // _CELL_BYTES))


def _mark(storage: torch.UntypedStorage, start: int, stop: int) -> bytes:
    return fingerprint(view_bytes(view_storage(storage, start, stop).cpu()))
