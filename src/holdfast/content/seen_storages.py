"""Remembers fingerprints of live storages, to detect whether their content has changed since it was written.

Version counters are not enough: writes through `.data`, numpy or another library do not increase them. So fingerprints
of the bytes are kept, in cells. They are compared again when a later tensor overlaps an earlier one.
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
"""If a cell has more pieces than this, they are joined into one."""
_SWEEP_EVERY: Final = 1024


@dataclass(frozen=True, slots=True)
class _Piece:
    """The fingerprint of a byte range within one cell."""

    start: int
    stop: int
    fingerprint: bytes

    def is_unchanged(self, storage: torch.UntypedStorage) -> bool:
        return _fingerprint(storage, self.start, self.stop) == self.fingerprint


@dataclass(slots=True)
class _Seen:
    """A storage, the name of its current content, and fingerprints of its bytes by cell."""

    ref: StorageWeakRef
    group: str
    cells: dict[int, list[_Piece]] = field(default_factory=dict)


class SeenStorages:
    """Names the content of storages. A name is valid until the content changes or the storage dies. Not thread-safe."""

    def __init__(self, prefix: str) -> None:
        """Start without storages; all names begin with `prefix`."""
        self._prefix = prefix
        self._count = 0
        # By address, which is not reused while the weak reference exists.
        self._seen: dict[int, _Seen] = {}

    def find_group(self, storage: torch.UntypedStorage, start: int, stop: int) -> str:
        """Return the name of a storage's content, and remember these bytes; a new name if remembered ones changed."""
        seen = self._seen.get(storage._cdata)
        if seen is None or seen.ref.expired():  # type: ignore[no-untyped-call]  # not typed in torch
            seen = self._begin(storage)
        elif not self._is_unchanged(seen, storage, start, stop):
            self._renew(seen)
        if not self._remember(seen, storage, start, stop):
            self._renew(seen)
            self._remember(seen, storage, start, stop)
        return seen.group

    def _renew(self, seen: _Seen) -> None:
        """Give the current content a new name; tensors stored under the old name are not affected."""
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

    def _remember(self, seen: _Seen, storage: torch.UntypedStorage, start: int, stop: int) -> bool:
        """Remember the fingerprints of bytes; return False if a change of other bytes in these cells was found."""
        return all(
            _remember_piece(
                seen.cells.setdefault(cell, []),
                storage,
                max(start, cell * _CELL_BYTES),
                min(stop, (cell + 1) * _CELL_BYTES),
            )
            for cell in _iter_cells(start, stop)
        )


def _remember_piece(pieces: list[_Piece], storage: torch.UntypedStorage, start: int, stop: int) -> bool:
    """Remember a piece of a cell; if the cell has too many pieces, check all and join them. False if one changed."""
    if not any(piece.start <= start and stop <= piece.stop for piece in pieces):
        pieces[:] = [piece for piece in pieces if not (start <= piece.start and piece.stop <= stop)]
        pieces.append(_Piece(start, stop, _fingerprint(storage, start, stop)))
    if len(pieces) <= _MAX_PIECES:
        return True
    # Joining takes a new fingerprint. If bytes have changed, that would give two contents the same name.
    if not all(piece.is_unchanged(storage) for piece in pieces):
        return False
    low, high = min(piece.start for piece in pieces), max(piece.stop for piece in pieces)
    pieces[:] = [_Piece(low, high, _fingerprint(storage, low, high))]
    return True


def _iter_cells(start: int, stop: int) -> range:
    return range(start // _CELL_BYTES, -(-stop // _CELL_BYTES))


def _fingerprint(storage: torch.UntypedStorage, start: int, stop: int) -> bytes:
    return fingerprint(view_bytes(view_storage(storage, start, stop).cpu()))
