"""Builds stores that a hostile writer could create: right digests, forged contents; see README.md."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zstandard

from holdfast.digest import hash_bytes
from holdfast.json_text import Json, canonical_json
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import new_write_id
from holdfast.repo.format.pack import TRAILER
from holdfast.repo.format.record import encode_record
from tests.kit import forging
from tests.kit.forging import forge_manifest, forge_pack, honest_table, row, seal_manifest, seal_pack
from tests.kit.saving import PACK_ID, inline_ref, misplaced_keys, new_repo, record_key, save_bytes

GOOD: Final = {"config.json": b'{"lr": 1}', "model.bin": bytes(range(256)) * 20}
MANIFEST_ID: Final = f"{'e' * 24}-{'e' * 16}"


@dataclass(frozen=True)
class Nest:
    """A store directory with the sound snapshot `good`, to which a hostile one, `evil`, is added."""

    root: Path

    def put(self, key: str, data: bytes) -> None:
        """Write these bytes as an object, unchecked."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def put_record(self, key: str, fields: dict[str, Json]) -> None:
        """Write a record with a valid header."""
        self.put(key, encode_record({"write_id": new_write_id(), **fields}))

    def put_manifest(self, data: bytes, **changes: Json) -> None:
        """Write a manifest, and the record of `evil` that refers to it."""
        self.put(f"manifests/{MANIFEST_ID}", data)
        fields = {
            "kind": "snapshot", "name": "evil", "state": "live", "lease": "", "time": 0, "manifest": MANIFEST_ID,
            "manifest_digest": hash_bytes(data).hex(), "manifest_bytes": len(data), "digest": "0" * 64,
            "entries": 1, "logical_bytes": 1, "metadata": {}, "generation": 0,
        }  # fmt: skip
        self.put_record(record_key("evil"), {**fields, **changes})

    def put_head(self, head: bytes) -> None:
        """Write a manifest whose JSON head is these bytes."""
        table = honest_table([])
        blank = forge_manifest(entries=[])[forging.MANIFEST_HEADER.size : -32]
        size = struct.unpack_from("<I", blank)[0]
        columns = 8 + 32 * len(table.columns)
        body = struct.pack("<I", len(head)) + blank[4:columns] + head + bytes(-len(head) % 8)
        self.put_manifest(seal_manifest(body + blank[columns + size + -size % 8 :]))


def build(root: Path) -> Nest:
    """Create a store with the snapshot `good`."""
    repo = new_repo(LocalStore(str(root)))
    save_bytes(repo, "good", GOOD)
    return Nest(root)


def _head(**changes: Json) -> bytes:
    return canonical_json({**honest_table([]).head, **changes})


def _nested(depth: int) -> bytes:
    return _head().replace(b'"spec":null', b'"spec":' + b"[" * depth + b"]" * depth)


def _entries(*names: str) -> bytes:
    return forge_manifest(entries=[Entry(name, 4, (inline_ref(b"evil"),)) for name in names])


def _bomb(nest: Nest) -> None:
    folded = zstandard.ZstdCompressor().compress(bytes(1 << 29))
    nest.put_manifest(seal_manifest(folded, codec=1, table_bytes=1 << 29))


def _lying_frame(nest: Nest) -> None:
    folded = zstandard.ZstdCompressor().compress(bytes(1 << 29))
    nest.put_manifest(seal_manifest(folded, codec=1, table_bytes=64))


def _stated(column: str, value: int) -> Callable[[Nest], None]:
    """A manifest in which every row of a column has the same value."""

    def plant(nest: Nest) -> None:
        # Without the inline column, which would be refused for another reason.
        entries = forging.HONEST[:2]
        rows = len(honest_table(entries).columns[column])
        nest.put_manifest(forge_manifest(changes={column: [value] * rows}, entries=entries))

    return plant


def _huge_column(nest: Nest) -> None:
    data = bytearray(forge_manifest()[forging.MANIFEST_HEADER.size : -32])
    struct.pack_into("<HQ", data, 8 + 22, 65535, 1 << 60)
    nest.put_manifest(seal_manifest(bytes(data)))


def _stored_beside_a_broken_pack(nest: Nest) -> None:
    _stated("chunk_stored", 0xFFFFFFFF)(nest)
    nest.put(f"packs/{PACK_ID}", b"HFPACK\r\n" + bytes(5000))


def _sparse(nest: Nest, data: bytes, size: int) -> None:
    """Write a sparse pack: large, but it takes no space on disk."""
    path = nest.root / f"packs/{PACK_ID}"
    with path.open("wb") as file:
        file.write(data[:64])
        file.truncate(size)
        file.seek(0, os.SEEK_END)
        file.write(data[64:])


def _sparse_codec(nest: Nest) -> None:
    stored = (4 << 30) - 64
    pack = forge_pack([row(64, raw=100, stored=stored, codec=7)], size=64)
    footer = pack[64 : -TRAILER.size]
    size = 64 + stored
    trailer = TRAILER.pack(size, len(footer), hash_bytes(footer), bytes(8), b"HFPKEND\n")
    _sparse(nest, pack[:64] + footer + trailer, size)


def _mark(*named: str) -> Callable[[Nest], None]:
    def plant(nest: Nest) -> None:
        for text in named:
            mark_id = hash_bytes(text.encode(errors="replace")).hex()[:24]
            nest.put_record(f"marks/{mark_id}@00000000", {"kind": "mark", "keys": [text], "generation": 0})

    return plant


def _wide_record(nest: Nest) -> None:
    body = b"[" + b"[]," * 200_000 + b"[]]"
    nest.put_record(record_key("evil"), {"kind": "snapshot", "name": "evil", "metadata": json.loads(body)})


def _pipe(nest: Nest) -> None:
    nest.put_manifest(_entries("x"))
    (nest.root / f"manifests/{MANIFEST_ID}").unlink()
    os.mkfifo(nest.root / f"manifests/{MANIFEST_ID}")


def _endless(nest: Nest) -> None:
    nest.put_manifest(_entries("x"))
    (nest.root / f"manifests/{MANIFEST_ID}").unlink()
    os.symlink("/dev/zero", nest.root / f"manifests/{MANIFEST_ID}")


ATTACKS: Final[dict[str, Callable[[Nest], None]]] = {
    "json nested 500 deep": lambda nest: nest.put_head(_nested(500)),
    "json nested 100,000 deep": lambda nest: nest.put_head(_nested(100_000)),
    "a number of 100,000 digits": lambda nest: nest.put_head(_head().replace(b"null", b"9" * 100_000)),
    "nan": lambda nest: nest.put_head(_head().replace(b"null", b"NaN")),
    "infinity by exponent": lambda nest: nest.put_head(_head().replace(b"null", b"1e999")),
    "half a surrogate": lambda nest: nest.put_head(_head().replace(b"null", b'"\\ud800"')),
    "wrong utf-8": lambda nest: nest.put_head(_head().replace(b"null", b'"\xff\xfe"')),
    "a head that is no object": lambda nest: nest.put_head(b"[]"),
    "names without entries": lambda nest: nest.put_head(_head(names=[str(i) for i in range(200_000)])),
    "packs outside": lambda nest: nest.put_head(_head(packs=["../../etc/passwd"])),
    "a zstd bomb": _bomb,
    "a zstd frame that states a false size": _lying_frame,
    "a column of 2^60 rows": _huge_column,
    "entries of 2^32 chunks": _stated("entry_chunks", 0xFFFFFFFF),
    "entries of 2^64 bytes": _stated("entry_bytes", 0xFFFFFFFFFFFFFFFF),
    "chunks of 4 GiB": _stated("chunk_bytes", 0xFFFFFFFF),
    "chunks at the end of the world": _stated("chunk_offset", 0xFFFFFFFFFFFFFFFF),
    "chunks at 2^61": _stated("chunk_offset", 1 << 61),
    "stored in 4 GiB": _stated("chunk_stored", 0xFFFFFFFF),
    "stored in 4 GiB of a broken pack": _stored_beside_a_broken_pack,
    "255 dimensions": _stated("entry_dims", 255),
    "names that climb out": lambda nest: nest.put_manifest(_entries("../evil.txt", "a/../../evil.txt")),
    "an absolute name": lambda nest: nest.put_manifest(_entries("/holdfast-evil.txt")),
    "names with control characters": lambda nest: nest.put_manifest(_entries("a\x1b[2Jb", "c\x00d", "e\nf")),
    "a file that is a directory as well": lambda nest: nest.put_manifest(_entries("a", "a/b")),
    "two entries of one name": lambda nest: nest.put_manifest(_entries("x", "x")),
    "overlapping chunks": lambda nest: nest.put(f"packs/{PACK_ID}", forge_pack([row(64), row(100)], size=256)),
    "chunks beyond the pack": lambda nest: nest.put(f"packs/{PACK_ID}", forge_pack([row(1 << 63)], size=256)),
    "a footer of 2^63 bytes": lambda nest: nest.put(
        f"packs/{PACK_ID}",
        seal_pack(b"x", size=64)[:65] + TRAILER.pack(64, 1 << 63, bytes(32), bytes(8), b"HFPKEND\n"),
    ),
    "a hole of 1 TiB": lambda nest: _sparse(nest, forge_pack([], size=64), 1 << 40),
    "4 GiB of an unknown codec": _sparse_codec,
    "an index of 2^60 rows": lambda nest: nest.put(
        "index/" + "0" * 64, struct.pack("<8sHHIQQ32s", b"HFINDEX\n", 1, 0, 72, 1 << 60, 1 << 63, bytes(32))
    ),
    "an index of noise": lambda nest: nest.put("index/" + "1" * 64, os.urandom(4096)),
    "a record of many lists": _wide_record,
    "a record that is somebody else's": lambda nest: nest.put(
        record_key("evil"), (nest.root / record_key("good")).read_bytes()
    ),
    "a record on the wrong shelf": lambda nest: nest.put(
        misplaced_keys("good")[0], (nest.root / record_key("good")).read_bytes()
    ),
    "a record in an unknown state": lambda nest: nest.put_manifest(_entries("x"), state="asleep"),
    "a time that is no date": lambda nest: nest.put_manifest(_entries("x"), time=1e299),
    "the last generation there is": lambda nest: nest.put_record(
        record_key("evil", 99_999_999),
        {"kind": "snapshot", "name": "evil", "state": "deleted", "time": 0, "generation": 99_999_999},
    ),
    "a lease at its last generation": lambda nest: nest.put(f"leases/{'d' * 24}@99999999", b""),
    "marks on what is no pack": _mark(
        record_key("good"), "config/00000000", "config/00000001", "../outside", "/etc/passwd", "", "packs/../x"
    ),
    "a pipe for a manifest": _pipe,
    "an endless manifest": _endless,
}
"""What each attack plants into a sound store, by the name of the attack."""
