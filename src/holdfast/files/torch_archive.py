"""Finds where the tensors of a file of `torch.save` are, by its zip directory and the shapes in its pickle."""

from __future__ import annotations

import io
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, BinaryIO, Final
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from holdfast.files.pickle_shapes import PickledTensor, parse_tensors
from holdfast.repo.format.grid import ITEM_BYTES, Extent

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_DIRECTORY_BYTES: Final = 2 << 20
"""A longer directory is not read. 2 MiB list about 30,000 storages."""
MAX_PICKLE_BYTES: Final = 8 << 20
"""A longer pickle is not read; each storage is then cut without regard to rows."""
_PICKLE: Final = "data.pkl"
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_LOCAL_MAGIC: Final = b"PK\x03\x04"
# What the zip module raises for bytes that are no zip file, depending on its version.
_MALFORMED: Final = (BadZipFile, ValueError, OverflowError, NotImplementedError, OSError, struct.error)


def read_torch_archive(file: BinaryIO, size_bytes: int) -> list[Extent]:
    """Return the tensors of a file that has `size_bytes`, and the storages whose tensors are not known; [] if none."""
    try:
        with ZipFile(_LimitedReader(file)) as archive:
            members = archive.infolist()
    except _MALFORMED:
        return []
    pickle = next((each for each in members if each.filename.partition("/")[2] == _PICKLE), None)
    if pickle is None:
        return []
    folder = f"{pickle.filename.removesuffix(_PICKLE)}data/"
    storages = {
        each.filename.removeprefix(folder): extent
        for each in members
        if each.filename.startswith(folder) and (extent := _read_extent(file, each, size_bytes))
    }
    if not _are_disjoint(storages.values()):
        return []
    tensors = _read_tensors(file, _read_extent(file, pickle, size_bytes))
    return [extent for key, storage in storages.items() for extent in _place(tensors.get(key, ()), storage)]


class _LimitedReader(io.RawIOBase):
    """A file for the zip module, which may claim any size for the directory: a long read is refused."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1, /) -> bytes:
        limit = MAX_DIRECTORY_BYTES + 1
        data = self._file.read(min(size, limit) if size >= 0 else limit)
        if len(data) == limit:
            raise BadZipFile("the directory is too long")
        return data

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        raise io.UnsupportedOperation("readinto")


def _read_extent(file: BinaryIO, member: ZipInfo, size_bytes: int) -> Extent | None:
    """Return where the bytes of a member are; None if it is compressed, empty or not inside the file."""
    if member.compress_type != ZIP_STORED or not 0 < member.file_size == member.compress_size:
        return None
    try:
        file.seek(member.header_offset)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    except _MALFORMED:
        return None
    start = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    stop = start + member.file_size
    return Extent(start, stop) if magic == _LOCAL_MAGIC and stop <= size_bytes else None


def _read_tensors(file: BinaryIO, pickle: Extent | None) -> Mapping[str, Sequence[PickledTensor]]:
    """Return the tensors that the pickle describes, by the key of their storage; none if it cannot be parsed."""
    by_key: dict[str, list[PickledTensor]] = defaultdict(list)
    if pickle is None or pickle.stop - pickle.start > MAX_PICKLE_BYTES:
        return by_key
    file.seek(pickle.start)
    try:
        for tensor in parse_tensors(file.read(pickle.stop - pickle.start)):
            by_key[tensor.key].append(tensor)
    except ValueError:
        return {}
    return by_key


def _place(tensors: Sequence[PickledTensor], storage: Extent) -> list[Extent]:
    """Return the tensors in a storage; the storage itself if one does not fit into it, or some overlap in part."""
    try:
        found = list(_iter_placed(tensors, storage))
    except ValueError:
        return [storage]
    # Tensors of the same bytes, such as tied weights, are cut as the first of them.
    distinct = {(each.start, each.stop): each for each in reversed(found)}.values()
    return [*distinct] if distinct and _are_disjoint(distinct) else [storage]


def _iter_placed(tensors: Sequence[PickledTensor], storage: Extent) -> Iterator[Extent]:
    """Yield the tensors that have no gaps between their items; raises ValueError if one does not fit."""
    for tensor in tensors:
        count = math.prod(tensor.shape)
        if not count:
            continue
        # A storage without a dtype states bytes; its items are known if the tensor is all of it.
        item_bytes, rest = divmod(storage.stop - storage.start, tensor.storage_items if tensor.is_typed else count)
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True)) + 1
        start = storage.start + tensor.offset * item_bytes
        stop = start + reach * item_bytes
        if rest or item_bytes not in ITEM_BYTES or stop > storage.stop:
            raise ValueError("a tensor does not fit into its storage")
        if count == reach:
            yield Extent(start, stop, item_bytes, tensor.shape if _is_in_order(tensor) else ())


def _is_in_order(tensor: PickledTensor) -> bool:
    """Return whether the items are in C order."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def _are_disjoint(extents: Iterable[Extent]) -> bool:
    return all(left.stop <= right.start for left, right in pairwise(sorted(extents)))
