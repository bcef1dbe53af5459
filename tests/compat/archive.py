"""Stores as compressed archives that are checked in: how one is packed, laid out again, and never replaced."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from holdfast.digest import hash_bytes

HERE: Final = Path(__file__).parent
FROZEN: Final = HERE / "frozen.json"
"""The digest of every archive: one that is there is never made again."""
TIME_S: Final = 1_000_000_000


def pack(contents: Mapping[str, bytes]) -> bytes:
    """Return the objects of a store as an archive, the same bytes for the same objects."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as folded, tarfile.open(fileobj=folded, mode="w") as archive:
        for key, data in sorted(contents.items()):
            info = tarfile.TarInfo(key)
            info.size, info.mtime = len(data), TIME_S
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def unpack(path: Path, place: Path) -> Path:
    """Lay a store out in a directory, and return that."""
    with tarfile.open(path) as archive:
        archive.extractall(place, filter="data")
    return place


def read_frozen() -> dict[str, str]:
    """Return the digests of all archives, by their paths."""
    frozen: dict[str, str] = json.loads(FROZEN.read_text(encoding="utf-8"))
    return frozen


def add(path: Path, make: Callable[[], bytes]) -> None:
    """Make an archive and freeze it; one that is there stays as it is."""
    frozen = read_frozen()
    name = path.relative_to(HERE).as_posix()
    if name in frozen:
        return
    data = make()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    frozen[name] = hash_bytes(data).hex()
    FROZEN.write_text(json.dumps(frozen, indent=2, sort_keys=True) + "\n", encoding="utf-8")
