"""Damages what is saved to a store within a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.repo.format.layout import PACKS


@contextmanager
def damaging_new_packs(store: Path) -> Iterator[None]:
    """Overwrite bytes in every pack that is written to the store at a path within the block."""
    folder = store / PACKS
    before = set(folder.rglob("*"))
    yield
    for path in set(folder.rglob("*")) - before:
        if path.is_file():
            path.chmod(0o600)
            data = bytearray(path.read_bytes())
            data[100:200] = bytes(100)
            path.write_bytes(data)
