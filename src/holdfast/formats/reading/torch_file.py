"""Reads files of torch.save without unpickling them; only listed classes and functions may be named in one."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import torch

from holdfast.errors import BadFile, Untrusted
from holdfast.files.torch_archive import PICKLE, ZIP_MAGIC, find_records
from holdfast.formats.reading.byte_ranges import ByteReader, FileBytes
from holdfast.formats.reading.found import Placeholders, StoredStorage, TensorForm, make_tensor
from holdfast.formats.reading.pickle_reader import (
    MAX_PICKLE_BYTES,
    FindGlobal,
    Maker,
    measure_pickle,
    read_pickle,
    verify_keys,
)
from holdfast.tensors.spec import find_dtype, give_role, item_bytes

_STORAGES: Final = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
}
_STORAGE_MODULES: Final = frozenset({"torch", "torch.storage", "torch.cuda"})
_DTYPES: Final = frozenset(str(found) for found in vars(torch).values() if isinstance(found, torch.dtype))
_MAX_SHAPE: Final = 64
_PYTHON_2: Final = {"__builtin__.long": "builtins.int"}
"""Names that protocol 2, which torch.save uses, takes from Python 2."""
_TENSOR_CLASSES: Final = ("torch.Tensor", "torch.nn.parameter.Parameter")
LocateStorage = Callable[[str, int], ByteReader]
"""Returns the bytes of the storage with a key, of which the file says that it has this many; raises BadFile."""


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of storages: the dtype of their items."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """A storage that a pickle refers to."""

    stored: StoredStorage
    dtype: torch.dtype


class TorchObjects:
    """Makes the tensors and values of one file of torch.save, as placeholders."""

    def __init__(
        self,
        placeholders: Placeholders,
        locate: LocateStorage,
        *,
        where: str,
        find_other: FindGlobal | None = None,
    ) -> None:
        """Find the bytes of storages by `locate`, and names that are not in the table by `find_other`."""
        self._find_other = find_other
        self._placeholders = placeholders
        self._locate = locate
        self._where = where
        self._storages: dict[str, StoredStorage] = {}
        self._makers: dict[str, Callable[[tuple[Any, ...]], object]] = {
            "collections.OrderedDict": partial(_make_hashed, OrderedDict),
            "collections.defaultdict": self._make_defaultdict,
            "collections.Counter": partial(_make_hashed, Counter),
            "builtins.set": partial(_make_hashed, set),
            "builtins.frozenset": partial(_make_hashed, frozenset),
            "builtins.complex": lambda args: complex(*args),
            "builtins.bytearray": _make_bytearray,
            "builtins.bytes": _make_empty,
            "builtins.dict": _refuse_call,
            "builtins.list": _refuse_call,
            "builtins.int": _refuse_call,
            "_codecs.encode": _make_bytes,
            **dict.fromkeys(_TENSOR_CLASSES, _refuse_call),
            "torch.Size": _make_size,
            "torch.device": _make_device,
            "torch._utils._rebuild_tensor_v2": self._make_v2,
            "torch._utils._rebuild_tensor_v3": self._make_v3,
            "torch._utils._rebuild_parameter": self._make_parameter,
            "torch._tensor._rebuild_from_type_v2": self._make_from_type,
        }

    def find_global(self, module: str, name: str) -> object:
        """Return what a name stands for; raises Untrusted for every name that is not in the table."""
        full = _PYTHON_2.get(f"{module}.{name}", f"{module}.{name}").replace("__builtin__.", "builtins.")
        if full in self._makers:
            return Maker(full, self._makers[full])
        if full in _DTYPES:
            return find_dtype(name)
        if module in _STORAGE_MODULES and name in _STORAGES:
            return StorageType(_STORAGES[name])
        if self._find_other:
            return self._find_other(module, name)
        raise self._refuse(full)

    def load_persistent(self, value: object) -> PickledStorage:
        """Return the storage of a persistent id; storages with one key are one storage."""
        match value:
            case ("storage", StorageType(dtype), str(key), str(), int(count), *_) if count >= 0:
                if key not in self._storages:
                    reader = self._locate(key, count * item_bytes(dtype))
                    self._storages[key] = self._placeholders.add_storage(reader)
                return PickledStorage(self._storages[key], dtype)
        raise BadFile(f"{self._where} refers to a storage in a form that torch.save does not write", path=self._where)

    def _refuse(self, full: str) -> Untrusted:
        return Untrusted(
            f"{self._where} contains {full[:120]!r}, which is not a tensor or plain value: loading it could run code."
            " Nothing was imported; if you trust the file, unpickle it (--unpickle, unpickle=True)",
            name=full,
        )

    def _make_defaultdict(self, args: tuple[Any, ...]) -> object:
        factories = {"builtins.int": int, "builtins.list": list, "builtins.dict": dict, "builtins.set": set}
        if not args or not isinstance(args[0], Maker) or args[0].name not in factories:
            raise self._refuse("a defaultdict with a factory of its own")
        return _make_hashed(partial(defaultdict, factories[args[0].name]), args[1:])

    def _make_v2(self, args: tuple[Any, ...]) -> torch.Tensor:
        match args:
            case (PickledStorage() as storage, int(offset), tuple(shape), tuple(stride), bool(grad), _, *rest):
                flags = rest[0] if rest and isinstance(rest[0], dict) else {}
                return self._make(storage, TensorForm(storage.dtype, shape, stride, offset, requires_grad=grad), flags)
        raise self._malformed()

    def _make_v3(self, args: tuple[Any, ...]) -> torch.Tensor:
        match args:
            case (PickledStorage() as s, int(offset), tuple(shape), tuple(stride), bool(grad), _, dtype, *rest):
                if isinstance(dtype, torch.dtype):
                    flags = rest[0] if rest and isinstance(rest[0], dict) else {}
                    return self._make(s, TensorForm(dtype, shape, stride, offset, requires_grad=grad), flags)
        raise self._malformed()

    def _make(self, storage: PickledStorage, form: TensorForm, flags: dict[Any, Any]) -> torch.Tensor:
        if not all(type(size) is int for size in (*form.shape, *form.stride)):
            raise self._malformed()
        tensor = make_tensor(storage.stored, form, what=f"{self._where}: a tensor")
        if flags.keys() - {"conj", "neg"}:
            raise self._malformed()
        if flags.get("conj"):
            tensor = tensor.conj()
        return torch._neg_view(tensor) if flags.get("neg") else tensor

    def _make_parameter(self, args: tuple[Any, ...]) -> torch.Tensor:
        match args:
            case (torch.Tensor() as data, bool(grad), _):
                try:
                    return give_role(data.detach(), "parameter", requires_grad=grad)
                except RuntimeError as error:
                    raise self._malformed() from error
        raise self._malformed()

    def _make_from_type(self, args: tuple[Any, ...]) -> object:
        """Make a tensor that has attributes; these are dropped if the caller takes objects that are not made."""
        match args:
            case (Maker() as function, Maker(name), tuple(inner), state) if name in _TENSOR_CLASSES:
                if self._find_other or not state:
                    return function.make(inner)
        raise self._refuse("a tensor with attributes, or of a subclass")

    def _malformed(self) -> BadFile:
        return BadFile(f"{self._where} has a tensor in a form that torch.save does not write", path=self._where)


def _refuse_call(args: tuple[Any, ...]) -> object:
    """Refuse a call of a class that is only named: the factory of a defaultdict, or the class of a tensor."""
    raise ValueError("a class is called that is never called in a file of torch.save")


def _make_hashed(kind: Callable[..., object], args: tuple[Any, ...]) -> object:
    """Make a dict of pairs or a set of items; each is a list or tuple, or hashed already."""
    for item in chain.from_iterable(each for each in args if isinstance(each, list | tuple)):
        verify_keys(item[:1] if isinstance(item, list) else [item])
    return kind(*args)


def _make_bytes(args: tuple[Any, ...]) -> bytes:
    """Return bytes, which protocol 2 writes as text in Latin-1."""
    if len(args) != 2 or type(args[0]) is not str or args[1] != "latin1":
        raise ValueError("bytes are encoded in an unknown way")
    return args[0].encode("latin1")


def _make_bytearray(args: tuple[Any, ...]) -> bytearray:
    # A number would allocate that much memory.
    if len(args) > 1 or not all(type(each) is bytes for each in args):
        raise ValueError("a bytearray is not made of bytes")
    return bytearray(*args)


def _make_empty(args: tuple[Any, ...]) -> bytes:
    if args:
        raise ValueError("bytes are not made of text")
    return b""


def _make_size(args: tuple[Any, ...]) -> torch.Size:
    if len(args) != 1 or type(args[0]) is not tuple or len(args[0]) > _MAX_SHAPE:
        raise ValueError("a shape is not a tuple")
    return torch.Size(args[0])


def _make_device(args: tuple[Any, ...]) -> torch.device:
    try:
        return torch.device(*args)
    except RuntimeError as error:
        raise ValueError("a device is unknown") from error


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
