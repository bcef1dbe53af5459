"""Finds the records of a zip archive as torch.save writes it: stored without compression, each a range of the file."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.errors import BadFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

ZIP_MAGIC: Final = b"PK\x03\x04"
PICKLE: Final = "data.pkl"
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")

ReadBytes = Callable[[int, int], "Buffer"]
"""Returns the bytes of the archive from one offset to another."""
Span = tuple[int, int]
"""Where the bytes of a record begin and end."""


class _Stream(io.RawIOBase):
    """The archive as a stream, for `zipfile`, which reads as much as the end of the file says the directory has."""

    def __init__(self, read: ReadBytes, size_bytes: int, limit_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._limit_bytes = limit_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        if start + offset < 0:
            raise ValueError("before the start")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._size_bytes - self._at)
        count = rest if size < 0 else min(size, rest)
        if count > self._limit_bytes:
            raise zipfile.BadZipFile("the directory is too long")
        data = self._read(self._at, self._at + count)
        self._at += count
        return bytes(data)


def find_records(
    read: ReadBytes, size_bytes: int, *, where: str, max_directory_bytes: int | None = None
) -> dict[str, Span]:
    """Return the records by their names, without the folder that torch puts them in.

    Raises BadFile if torch.save did not write the archive, or if its directory is longer than `max_directory_bytes`.
    """
    stream = _Stream(read, size_bytes, size_bytes if max_directory_bytes is None else max_directory_bytes)
    try:
        with zipfile.ZipFile(stream) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OverflowError, OSError, NotImplementedError, struct.error) as error:
        raise BadFile(f"{where} is cut off or damaged: it begins as a zip archive and has no valid end") from error
    folder = next((info.filename.removesuffix(PICKLE) for info in infos if _is_pickle(info.filename)), None)
    if folder is None:
        raise BadFile(f"{where} is a zip archive, and no file of torch.save: it has no {PICKLE}")
    records: dict[str, Span] = {}
    for info in infos:
        name = info.filename.removeprefix(folder)
        if name in records:
            raise BadFile(f"{where} has the record {name!r} twice")
        if not info.is_dir():
            records[name] = _locate(read, size_bytes, info, where)
    return records


def _is_pickle(name: str) -> bool:
    return name.rpartition("/")[2] == PICKLE and name.count("/") <= 1


def _locate(read: ReadBytes, size_bytes: int, info: zipfile.ZipInfo, where: str) -> Span:
    what = f"{where}: record {info.filename!r}"
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
        raise BadFile(f"{what} is compressed or encrypted, which torch.save never does")
    header_end = info.header_offset + _LOCAL_HEADER.size
    if not 0 <= info.header_offset <= size_bytes - _LOCAL_HEADER.size:
        raise BadFile(f"{what} begins beyond the end of the file")
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(read(info.header_offset, header_end))
    start = header_end + name_bytes + extra_bytes
    if magic != ZIP_MAGIC or start + info.file_size > size_bytes:
        raise BadFile(f"{what} ends beyond the end of the file: the file is cut off or damaged")
    return start, start + info.file_size
