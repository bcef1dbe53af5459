"""Finds where the tensors of a file of `torch.save` are, by its zip directory and the shapes in its pickle."""

from __future__ import annotations

import io
import math
import pickletools
import struct
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from holdfast.errors import BadFile
from holdfast.repo.format.grid import ITEM_BYTES, Extent

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


MAX_DIRECTORY_BYTES: Final = 2 << 20
"""A longer directory is not read. 2 MiB list about 30,000 storages."""
MAX_PICKLE_BYTES: Final = 8 << 20
"""A longer pickle is not read; each storage is then cut without regard to rows."""
_STORAGES: Final = "data/"
_MAX_OPCODES: Final = 800_000
"""A pickle with more opcodes is not read to its end. A tensor takes about 30."""
_MAX_DIMS: Final = 64
_UNTYPED: Final = "torch.storage UntypedStorage"
_MARK: Final = object()


def read_torch_archive(file: BinaryIO, size_bytes: int) -> list[Extent]:
    """Return the tensors of a file that has `size_bytes`, and the storages whose tensors are not known; [] if none."""

    def read(start: int, stop: int) -> bytes:
        file.seek(start)
        return file.read(stop - start)

    try:
        records = find_records(read, size_bytes, where="the file", max_directory_bytes=MAX_DIRECTORY_BYTES)
    except (BadFile, OSError, struct.error):
        return []
    storages = {
        name.removeprefix(_STORAGES): Extent(start, stop)
        for name, (start, stop) in records.items()
        if name.startswith(_STORAGES) and start < stop
    }
    if not _are_disjoint(storages.values()):
        return []
    start, stop = records[PICKLE]
    tensors = _parse_tensors(read(start, stop)) if stop - start <= MAX_PICKLE_BYTES else {}
    return [extent for key, storage in storages.items() for extent in _place(tensors.get(key, ()), storage)]


def _parse_tensors(pickle: bytes) -> Mapping[str, Sequence[PickledTensor]]:
    """Return the tensors that the pickle describes, by the key of their storage; none if it cannot be parsed."""
    by_key: dict[str, list[PickledTensor]] = defaultdict(list)
    try:
        for tensor in parse_tensors(pickle):
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


class PickledTensor(NamedTuple):
    """A tensor as a pickle describes it: the storage by its key, and which items of it."""

    key: str
    storage_items: int
    """The number of items in the storage; of bytes, if the storage has no dtype."""
    is_typed: bool
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Storage(NamedTuple):
    """A persistent id that names a storage."""

    key: str
    num_items: int
    is_typed: bool


class _Effect(NamedTuple):
    """What an opcode does to the stack."""

    pops: int
    """How many values it takes; those above the last mark come on top of that."""
    takes_mark: bool
    pushes: int


def _find_effect(opcode: pickletools.OpcodeInfo) -> _Effect:
    before = opcode.stack_before
    takes_mark = pickletools.markobject in before
    pops = before.index(pickletools.markobject) if takes_mark else len(before)
    return _Effect(pops, takes_mark, len(opcode.stack_after))


def _read_global(stream: IO[bytes]) -> str:
    """Return a module and a name, which are two lines of text; pickletools would decode escapes in them."""
    return " ".join(stream.readline()[:-1].decode() for _ in range(2))


# Other opcodes whose argument is text with escapes belong to protocol 0, which torch.save does not write.
_TEXTUAL: Final = frozenset(("STRING", "UNICODE", "INT", "LONG", "FLOAT", "PERSID", "INST"))
_READERS: Final[Mapping[str, Callable[[IO[bytes]], Any]]] = {
    "GLOBAL": _read_global,
    **{each.name: each.arg.reader for each in pickletools.opcodes if each.arg and each.name != "GLOBAL"},
}
_OPCODES: Final = {
    each.code.encode("latin-1"): (each.name, _READERS.get(each.name), _find_effect(each))
    for each in pickletools.opcodes
    if each.name not in _TEXTUAL
}
_CONSTANTS: Final = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "GLOBAL")
)


def parse_tensors(data: bytes) -> list[PickledTensor]:
    """Return every tensor in a pickle; raises ValueError if it is malformed, too long or of an unknown kind."""
    stream = BytesIO(data)
    machine = _Machine()
    try:
        for _ in range(_MAX_OPCODES):
            name, reader, effect = _OPCODES[stream.read(1)]
            if name == "STOP":
                return machine.tensors
            machine.step(name, reader(stream) if reader else None, effect)
    except (KeyError, IndexError) as error:
        raise ValueError("the pickle is malformed") from error
    raise ValueError("the pickle is too long")


class _Machine:
    """The stack and memo of an unpickler, with numbers, strings and tuples of them; None for any other value."""

    def __init__(self) -> None:
        self.tensors: list[PickledTensor] = []
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any, effect: _Effect) -> None:
        """Do what one opcode does; raises IndexError or KeyError if the stack or the memo lacks a value."""
        stack = self._stack
        if name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _CONSTANTS:
            stack.append(argument)
        else:
            value = self._evaluate(name, self._pop(effect))
            stack.extend([value] * effect.pushes)

    def _pop(self, effect: _Effect) -> list[Any]:
        stack = self._stack
        popped: list[Any] = []
        if effect.takes_mark:
            while (value := stack.pop()) is not _MARK:
                popped.append(value)
        popped += [stack.pop() for _ in range(effect.pops)]
        popped.reverse()
        return popped

    def _evaluate(self, name: str, popped: list[Any]) -> Any:
        if name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"):
            return tuple(popped)
        if name == "STACK_GLOBAL":
            return f"{popped[0]} {popped[1]}"
        if name == "BINPERSID":
            return _parse_storage(popped[0])
        if name == "REDUCE" and (tensor := _parse_tensor(popped[1])):
            self.tensors.append(tensor)
        return None


def _parse_storage(value: Any) -> _Storage | None:
    """Return the storage that a persistent id names: ("storage", class, key, location, number of items)."""
    match value:
        case ("storage", str(kind), str(key), _, int(num_items)) if num_items > 0:
            return _Storage(key, num_items, kind != _UNTYPED)
    return None


def _parse_tensor(arguments: Any) -> PickledTensor | None:
    """Return the tensor that a call rebuilds from (storage, offset, shape, stride, ...); None for any other call."""
    match arguments:
        case (_Storage() as storage, int(offset), tuple(shape), tuple(stride), *_):
            if _are_sizes(shape) and _are_sizes(stride) and len(shape) == len(stride) and offset >= 0:
                return PickledTensor(*storage, offset, shape, stride)
    return None


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return len(values) <= _MAX_DIMS and all(type(value) is int and value >= 0 for value in values)
