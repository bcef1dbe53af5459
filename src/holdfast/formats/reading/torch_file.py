"""Reads files of torch.save without unpickling them: the zip form of today, and the older form of one stream."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from holdfast.errors import BadFile, Untrusted
from holdfast.files.zip_records import PICKLE, ZIP_MAGIC, find_records
from holdfast.formats.reading.byte_ranges import FileBytes
from holdfast.formats.reading.pickle_reader import MAX_PICKLE_BYTES, FindGlobal, measure_pickle, read_pickle
from holdfast.formats.reading.placeholders import Placeholders
from holdfast.formats.reading.torch_objects import TorchObjects

LEGACY_MAGIC: Final = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""The pickle of the number that begins every file of torch.save before torch 1.6."""
_LEGACY_PICKLES: Final = 5
"""Magic number, version, system, object, keys of the storages."""
_LEGACY_HEAD_BYTES: Final = 16 << 20
"""How much of an older file its pickles may take: nothing but reading them shows where they end."""
_COUNT: Final = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Archive:
    """The records of one archive, by name without the folder that torch puts them in."""

    where: str
    records: Mapping[str, FileBytes]

    def find(self, name: str, *, size_bytes: int | None = None) -> FileBytes:
        """Return a record; raises BadFile if it is missing or, with `size_bytes`, has another size."""
        found = self.records.get(name)
        if found is None:
            raise BadFile(f"{self.where} has no record {name!r}: it is damaged, or torch.save did not write it")
        if size_bytes is not None and found.size_bytes != size_bytes:
            raise BadFile(f"{self.where}: record {name!r} has {found.size_bytes} bytes instead of {size_bytes}")
        return found


def read_archive(data: FileBytes, *, where: str) -> Archive:
    """Return the records of an archive; raises BadFile if it is not one that torch.save wrote."""
    records = find_records(data.read, data.size_bytes, where=where)
    return Archive(where, {name: data.narrow(start, stop) for name, (start, stop) in records.items()})


def is_torch_file(start: bytes) -> bool:
    """Return whether a file that begins like this was written by torch.save."""
    return start.startswith((ZIP_MAGIC, LEGACY_MAGIC))


def read_torch_object(
    data: FileBytes, placeholders: Placeholders, *, where: str, find_other: FindGlobal | None = None
) -> Any:
    """Return the object in a file of torch.save, with placeholders for its tensors.

    Raises Untrusted for anything but tensors and plain values, and BadFile if the file is damaged. `find_other` is
    asked for names that are neither.
    """
    start = bytes(data.read(0, min(len(LEGACY_MAGIC), data.size_bytes)))
    if start.startswith(LEGACY_MAGIC):
        return _read_legacy(data, placeholders, where)
    archive = read_archive(data, where=where)
    _verify_supported(archive)
    objects = TorchObjects(placeholders, partial(_locate, archive), where=where, find_other=find_other)
    pickled = archive.find(PICKLE)
    if pickled.size_bytes > MAX_PICKLE_BYTES:
        raise BadFile(f"{where} has a pickle of {pickled.size_bytes} bytes, more than {MAX_PICKLE_BYTES}")
    content = bytes(pickled.read(0, pickled.size_bytes))
    return read_pickle(content, objects.find_global, objects.load_persistent, where=where)


def _verify_supported(archive: Archive) -> None:
    if "constants.pkl" in archive.records:
        raise Untrusted(
            f"{archive.where} is a TorchScript program, which is code and not a checkpoint;"
            " save the state_dict() of its module by torch.save, and import that",
            name=archive.where,
        )
    order = archive.records.get("byteorder")
    if order is not None and bytes(order.read(0, min(order.size_bytes, 16))) != b"little":
        raise BadFile(f"{archive.where} was written on a big-endian machine; load and save it again with torch")


def _locate(archive: Archive, key: str, size_bytes: int) -> FileBytes:
    return archive.find(f"data/{key}", size_bytes=size_bytes)


def _read_legacy(data: FileBytes, placeholders: Placeholders, where: str) -> Any:
    """Read the older form: five pickles, then each storage as its number of items and its bytes."""
    spans = _find_pickles(bytes(data.read(0, min(data.size_bytes, _LEGACY_HEAD_BYTES))), where)
    *_, pickled, listed = (bytes(data.read(start, stop)) for start, stop in spans)
    sizes: dict[str, int] = {}

    def note_size(key: str, size_bytes: int) -> FileBytes:
        sizes[key] = size_bytes
        return FileBytes(data.file, data.source, 0, size_bytes)

    # The storages come last and do not state the size of their items, which the pickle does: so it is read twice.
    objects = TorchObjects(Placeholders(), note_size, where=where)
    read_pickle(pickled, objects.find_global, objects.load_persistent, where=where)
    keys = read_pickle(listed, objects.find_global, objects.load_persistent, where=where)
    places = _locate_legacy(data, spans[-1][1], keys, sizes, where)
    objects = TorchObjects(placeholders, lambda key, _: places[key], where=where)
    return read_pickle(pickled, objects.find_global, objects.load_persistent, where=where)


def _find_pickles(head: bytes, where: str) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    at = 0
    try:
        for _ in range(_LEGACY_PICKLES):
            spans.append((at, at + measure_pickle(head[at:])))
            at = spans[-1][1]
    except (ValueError, IndexError) as error:
        raise BadFile(
            f"{where} is a file of torch.save before torch 1.6 that is cut off, or whose values take more than"
            f" {_LEGACY_HEAD_BYTES} bytes; load it with torch, save it again, and import that",
            path=where,
        ) from error
    return spans


def _locate_legacy(data: FileBytes, at: int, keys: Any, sizes: dict[str, int], where: str) -> dict[str, FileBytes]:
    if not isinstance(keys, list) or set(map(str, keys)) != sizes.keys():
        raise BadFile(f"{where} is damaged: its list of storages does not fit its tensors", path=where)
    places: dict[str, FileBytes] = {}
    for key in map(str, keys):
        start = at + _COUNT.size
        at = start + sizes[key]
        if at > data.size_bytes:
            raise BadFile(f"{where} is cut off: it ends inside a tensor", path=where)
        (count,) = _COUNT.unpack(data.read(start - _COUNT.size, start))
        if (count and sizes[key] % count) or bool(count) != bool(sizes[key]):
            raise BadFile(f"{where} is damaged: a storage has another size than its tensors", path=where)
        places[key] = data.narrow(start, at)
    return places
