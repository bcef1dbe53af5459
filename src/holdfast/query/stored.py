"""Keeps a record cache in a file of the user's cache folder, from one process to the next.

The file may be deleted at any time. One that is damaged, of another store or of another version is ignored, and
replaced when the next listing has read enough records to be worth it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from holdfast.digest import Digest, fingerprint
from holdfast.json_text import Json, canonical_json
from holdfast.repo.format.layout import ManifestRef
from holdfast.repo.names.listed import CachedRecord, RecordCache
from holdfast.repo.names.snapshots import CommittedSnapshot

MAX_FILE_BYTES: Final = 256 << 20
"""Larger files are not read."""
MIN_NEW: Final = 64
"""So many records must have been read from the store before the file is written again."""
_MAX_FILES: Final = 32
"""Files of the stores that were listed most recently are kept."""
_VERSION: Final = b"holdfast-records 1 "
_STORE_ID: Final = re.compile(r"[0-9a-zA-Z-]{1,64}\Z")
_SUFFIX: Final = ".records"
_TOMBSTONE_ITEMS: Final = 3
"""The row of a deleted name has a key, a size and a version, and no snapshot."""


class CacheFile:
    """The file of one store in a cache folder; errors of the filesystem only mean that nothing is remembered."""

    def __init__(self, folder: str, store_id: str) -> None:
        """Use the file of the store `store_id`; nothing is read yet."""
        self._folder = folder
        self._path = os.path.join(folder, store_id + _SUFFIX) if folder and _STORE_ID.match(store_id) else ""

    def read_into(self, cache: RecordCache) -> None:
        """Add the records of the file to a cache."""
        data = self._read()
        body = data[len(_VERSION) + 32 + 1 :]
        if data[: len(_VERSION) + 32] != _VERSION + fingerprint(body).hex().encode():
            return
        try:
            records = _decode(body)
        except (ValueError, TypeError, IndexError, RecursionError):
            return  # another version of Holdfast wrote it
        cache.put_records(records)

    def write_from(self, cache: RecordCache) -> bool:
        """Replace the file if the cache has enough new records; return whether it was written."""
        if not self._path or cache.num_new < MIN_NEW:
            return False
        body = _encode(cache)
        data = _VERSION + fingerprint(body).hex().encode() + b"\n" + body
        try:
            self._replace(data)
            self._delete_old()
        except OSError:
            return False
        return True

    def _read(self) -> bytes:
        if not self._path:
            return b""
        try:
            with open(self._path, "rb") as file:
                return b"" if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES else file.read()
        except OSError:
            return b""

    def _replace(self, data: bytes) -> None:
        """Write a file of this process, and give it the name in one step: another process may do the same."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        temporary = f"{self._path}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            os.replace(temporary, self._path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _delete_old(self) -> None:
        """Delete the files of stores that were not listed for longest, and those that a killed process left."""
        with os.scandir(self._folder) as entries:
            files = [(entry.stat().st_mtime, entry.path) for entry in entries if _SUFFIX in entry.name]
        for _, path in sorted(files, reverse=True)[_MAX_FILES:]:
            with suppress(OSError):
                os.unlink(path)


def _encode(cache: RecordCache) -> bytes:
    """Encode all records; environments, of which there are few, are stored once."""
    environments: dict[bytes, int] = {}
    rows: list[list[Json]] = []
    for key, record in cache.iter_records():
        row: list[Json] = [key, record.size_bytes, record.version]
        if record.snapshot is not None:
            text = canonical_json(record.snapshot.environment)
            row += [*_encode_snapshot(record.snapshot), environments.setdefault(text, len(environments))]
        rows.append(row)
    return canonical_json([[json.loads(text) for text in environments], rows])


def _encode_snapshot(snapshot: CommittedSnapshot) -> list[Json]:
    manifest = snapshot.manifest
    return [
        snapshot.name,
        *(manifest.manifest_id, manifest.digest.hex(), manifest.size_bytes),
        *(snapshot.digest.hex(), snapshot.time_s, snapshot.num_entries, snapshot.logical_bytes, snapshot.metadata),
        *(snapshot.lease_id, snapshot.generation, snapshot.write_id),
    ]


def _decode(body: bytes) -> dict[str, CachedRecord]:
    """Decode what `_encode` returned; raises ValueError, TypeError or IndexError for anything else."""
    environments, rows = json.loads(body)
    return {row[0]: CachedRecord(row[1], row[2], _decode_snapshot(row, environments)) for row in rows}


def _decode_snapshot(row: Sequence[Json], environments: Sequence[dict[str, Json]]) -> CommittedSnapshot | None:
    if len(row) == _TOMBSTONE_ITEMS:
        return None
    _, _, _, name, manifest_id, manifest_digest, manifest_bytes, digest, *plain, lease_id, generation, write_id, at = (
        row
    )
    manifest = ManifestRef(manifest_id, Digest(bytes.fromhex(manifest_digest)), manifest_bytes)
    time_s, num_entries, logical_bytes, metadata = plain
    return CommittedSnapshot(
        name=name,
        manifest=manifest,
        digest=Digest(bytes.fromhex(digest)),
        time_s=time_s,
        num_entries=num_entries,
        logical_bytes=logical_bytes,
        metadata=metadata,
        lease_id=lease_id,
        generation=generation,
        write_id=write_id,
        environment=environments[at],
    )
