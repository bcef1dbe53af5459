"""The records of a zip archive as torch.save writes it: stored without compression, each a range of the file."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.errors import BadFile
from holdfast.formats.reading.byte_ranges import FileBytes

ZIP_MAGIC: Final = b"PK\x03\x04"
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_PICKLE: Final = "data.pkl"


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


class _RangeStream(io.RawIOBase):
    """A range of a file as a stream, for `zipfile`."""

    def __init__(self, data: FileBytes) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._data.size_bytes}[whence]
        if start + offset < 0:
            raise ValueError("before the start")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._data.size_bytes - self._at)
        count = rest if size < 0 else min(size, rest)
        data = self._data.read(self._at, self._at + count)
        self._at += count
        return bytes(data)


def read_archive(data: FileBytes, *, where: str) -> Archive:
    """Return the records of an archive; raises BadFile if it is not one that torch.save wrote."""
    try:
        with zipfile.ZipFile(_RangeStream(data)) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, struct.error) as error:
        raise BadFile(f"{where} is cut off or damaged: it begins as a zip archive and has no valid end") from error
    folder = next((info.filename.removesuffix(_PICKLE) for info in infos if _is_pickle(info.filename)), None)
    if folder is None:
        raise BadFile(f"{where} is a zip archive, and no file of torch.save: it has no {_PICKLE}")
    records: dict[str, FileBytes] = {}
    for info in infos:
        name = info.filename.removeprefix(folder)
        if name in records:
            raise BadFile(f"{where} has the record {name!r} twice")
        if not info.is_dir():
            records[name] = _locate(data, info, where)
    return Archive(where, records)


def _is_pickle(name: str) -> bool:
    return name.rpartition("/")[2] == _PICKLE and name.count("/") <= 1


def _locate(data: FileBytes, info: zipfile.ZipInfo, where: str) -> FileBytes:
    what = f"{where}: record {info.filename!r}"
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
        raise BadFile(f"{what} is compressed or encrypted, which torch.save never does")
    header_end = info.header_offset + _LOCAL_HEADER.size
    if header_end > data.size_bytes:
        raise BadFile(f"{what} begins beyond the end of the file")
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(data.read(info.header_offset, header_end))
    start = header_end + name_bytes + extra_bytes
    if magic != ZIP_MAGIC or start + info.file_size > data.size_bytes:
        raise BadFile(f"{what} ends beyond the end of the file: the file is cut off or damaged")
    return data.narrow(start, start + info.file_size)
