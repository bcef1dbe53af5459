"""PyTorch's content store (`torch.utils._content_store`) over a Holdfast store: the same names, without its limits.

Storages are addressed by content, tensors by name. Tensors are written in batches. Readers in the same process see a
tensor as soon as it is written. Other processes see it, and it survives a crash, once its batch is committed. A batch
is committed when it is full, at `flush` and `close`, when the writer is dropped, and when the interpreter exits.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Final

import torch
from typing_extensions import Self

from holdfast.content.batch import BatchWriter
from holdfast.content.catalog import Catalog, Rebuilder, StoredTensor, describe_entry
from holdfast.errors import TensorNotFound, Unsupported
from holdfast.objects.at_exit import before_exit
from holdfast.objects.url import open_store
from holdfast.repo.format.layout import verify_name
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES, Repository, open_repository
from holdfast.snapshot.leaves import GRAD, TENSOR, iter_entry_numbers
from holdfast.tensors.composite import has_own_bytes
from holdfast.tensors.device_digest.choice import digest_pieces
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece
from holdfast.tensors.memory import view_storage
from holdfast.tensors.spec import item_bytes
from holdfast.trees.apply import Device
from holdfast.trees.registered import Types

StoreLocation = str | os.PathLike[str] | Repository

_TUPLE_FIELDS: Final = 6
_OPEN_WRITERS: Final[weakref.WeakSet[BatchWriter]] = weakref.WeakSet()
"""The writers of this process. Code written for PyTorch's store reads what it has just written, without `flush`."""


def hash_storage(storage: torch.UntypedStorage, *, stable_hash: bool = False) -> str:
    """Return the hex BLAKE3-256 of a storage's bytes, computed where they are.

    It does not depend on device, process or version.

    `stable_hash` has no effect: this hash is always stable.
    """
    if storage.device.type == "meta":
        raise Unsupported("a storage on the meta device has no bytes to hash")
    data = DeviceBytes.from_memory(view_storage(storage, 0, storage.nbytes(), storage.device))
    return digest_pieces([DevicePiece(data, 0, data.size_bytes)])[0].hex()


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """The metadata of a tensor; unpacks into the six values of PyTorch's content store.

    If only a part of a view's storage was stored, a reader returns the `digest` of that part, and the `offset` in it.
    """

    dtype: torch.dtype
    digest: str
    """Digest of the storage; empty for a tensor without one: on the meta device, sparse, nested, or a subclass."""
    offset: int
    """Offset in the storage, in items, like the strides."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    flags: Mapping[str, bool]
    """`conj` and `neg`, if set."""
    device: torch.device = field(default=torch.device("cpu"))
    """The device of the tensor, or its device when it was written."""
    layout: torch.layout = torch.strided
    requires_grad: bool = False

    def __iter__(self) -> Iterator[Any]:
        """Yield dtype, digest, offset, shape, stride and flags."""
        return (getattr(self, each.name) for each in fields(self)[:_TUPLE_FIELDS])

    def __len__(self) -> int:
        """Return 6, the number of values that it unpacks into."""
        return _TUPLE_FIELDS

    def __getitem__(self, index: int) -> Any:
        """Return one of the six values."""
        return tuple(self)[index]


def _describe(tensor: torch.Tensor, digest: str | None) -> TensorMetadata:
    is_strided = tensor.layout == torch.strided and not tensor.is_nested
    is_plain = has_own_bytes(tensor)
    if not is_plain or tensor.is_meta:
        digest = digest or ""
    flags = {"conj": tensor.is_conj(), "neg": tensor.is_neg()}
    return TensorMetadata(
        tensor.dtype,
        hash_storage(tensor.untyped_storage()) if digest is None else digest,
        int(tensor.storage_offset()) if is_plain else 0,
        () if tensor.is_nested else tuple(tensor.shape),
        tensor.stride() if is_strided else (),
        {name: True for name, is_set in flags.items() if is_set},
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
    )


class ContentStoreWriter:
    """Writes tensors by name and storages by digest. Many threads and processes may write to one store.

    All properties of a tensor are stored: dtype, strides, conj and neg bits, requires_grad, gradient, whether it is a
    Parameter, sparse and nested layouts, quantizers. Writing a name again replaces its tensor.
    """

    def __init__(
        self,
        loc: StoreLocation,
        stable_hash: bool = False,  # positional, as in PyTorch
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        types: Iterable[type] = (),
    ) -> None:
        """Open a store for writing; the first commit creates it if it does not exist.

        Args:
            loc: a path, a URL, or an open repository.
            stable_hash: has no effect; the hash is always stable.
            budget_bytes: how many bytes of tensors may wait to be committed.
            types: tensor subclasses that may be written.
        """
        self.loc = loc
        self.stable_hash = stable_hash
        self._writer = BatchWriter(lambda: _open(loc), budget_bytes=budget_bytes, types=Types(tuple(types)))
        self._finalizer = weakref.finalize(self, self._writer.end)
        _OPEN_WRITERS.add(self._writer)
        before_exit(self._finalizer)

    def write_storage(self, storage: torch.UntypedStorage) -> str:
        """Write all bytes of a storage, unless this writer has written them before; return their digest."""
        digest = hash_storage(storage)
        self._writer.write_storage(digest, storage)
        return digest

    def compute_tensor_metadata(self, t: torch.Tensor, h: str | None = None) -> TensorMetadata:
        """Return the metadata of a tensor; `h` is the digest of its storage, if that is known."""
        return _describe(t, h)

    def write_tensor(self, name: str, t: torch.Tensor) -> None:
        """Write a tensor under a name, which may contain slashes; the tensor may be changed once this returns."""
        self._writer.write(name, t)

    def write_tensor_async(self, name: str, t: torch.Tensor) -> None:
        """Write a tensor as `write_tensor` does, but commit full batches in the background; `flush` raises errors.

        Waits only while the memory budget is full of tensors that are not committed yet.
        """
        self._writer.write(name, t, in_background=True)

    def flush(self) -> None:
        """Commit everything written so far; it is durable, and visible to all processes, once this returns."""
        self._writer.flush()

    def close(self) -> None:
        """Commit everything written so far; the writer may be used again."""
        self._writer.flush()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit everything written, also after an error, because the tensors help to find its cause."""
        self.close()


class ContentStoreReader:
    """Reads tensors by name and storages by digest, and verifies each byte. Safe to use from any thread.

    Tensors that shared memory when they were written share it again, also across batches of one writer. Tensors that
    merely had equal content do not. The reader looks for tensors of other processes when a name is not found, and in
    `refresh`.
    """

    def __init__(self, loc: StoreLocation, *, cache: bool = True, types: Iterable[type] = ()) -> None:
        """Open a store for reading.

        Args:
            loc: a path, a URL, or an open repository.
            cache: return storages that are still in use again, instead of reading them again.
            types: tensor subclasses that may be read.
        """
        self.loc = loc
        self._types = Types(tuple(types))
        self._has_cache = cache
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._repo = _open(self.loc)
        self._catalog = Catalog(self._repo)
        self._rebuilder = Rebuilder(self._catalog, self._types, cache=self._has_cache)
        self._lock = threading.RLock()
        self._seen: dict[str, int] | None = None

    def read_storage(self, h: str, *, device: Device | None = None) -> torch.UntypedStorage:
        """Read a storage by its digest, to its original device or to `device`; raise TensorNotFound."""
        with self._lock_here():
            self._refresh_if_changed()
            stored = self._catalog.find_storage(h)
            if stored is None:
                self.refresh()
                stored = self._catalog.find_storage(h)
            if stored is None:
                raise TensorNotFound(
                    f"no storage with digest {h!r} in {self._repo.store.url}{self._describe_damage()}", name=h
                )
            return self._rebuilder.read_storage(stored, _parse_device(device))

    def read_tensor_metadata(self, name: str) -> TensorMetadata:
        """Read the metadata of a tensor; raise TensorNotFound."""
        with self._lock_here():
            stored = self._find(name)
            node = stored.node[1] if stored.node[0] == GRAD else stored.node
            if node[0] != TENSOR:
                return _describe(self._rebuilder.read_tensor(stored, None), None)
            opened = self._catalog.open(stored.batch)
            found = describe_entry(opened, next(iter_entry_numbers(node, what=name)))
        spec, span = found.spec, found.span
        flags = {"conj": spec.conj, "neg": spec.neg}
        return TensorMetadata(
            spec.dtype,
            span.digest if span else "",
            spec.offset - span.first // item_bytes(spec.dtype) if span else 0,
            spec.shape,
            spec.stride,
            {flag: True for flag, is_set in flags.items() if is_set},
            found.device,
            requires_grad=spec.requires_grad,
        )

    def read_tensor(self, name: str, *, device: Device | None = None) -> torch.Tensor:
        """Read a tensor, to its original device or to `device`; raise TensorNotFound."""
        with self._lock_here():
            return self._rebuilder.read_tensor(self._find(name), _parse_device(device))

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        with self._lock_here():
            self.refresh()
            return self._catalog.names()

    def refresh(self) -> None:
        """Find what was written since the last refresh, including newer tensors under known names."""
        with self._lock_here():
            self._seen = self._count_changes()
            for writer in self._find_writers():
                writer.flush()
            self._catalog.refresh()

    def _lock_here(self) -> AbstractContextManager[object]:
        """Return the lock. After a fork, reopen first: the child has none of the parent's reading threads."""
        if os.getpid() != self._pid:
            self._start()
        return self._lock

    def _find(self, name: str) -> StoredTensor:
        name = verify_name(name, what="tensor")
        self._refresh_if_changed()
        stored = self._catalog.find_tensor(name)
        if stored is None:
            self.refresh()
            stored = self._catalog.find_tensor(name)
        if stored is None:
            raise TensorNotFound(
                f"no tensor {name!r} in {self._repo.store.url}{self._describe_damage()};"
                " `names()` lists the stored names",
                name=name,
            )
        return stored

    def _refresh_if_changed(self) -> None:
        """Refresh if a writer of this process has written anything since the last refresh."""
        if self._count_changes() != self._seen:
            self.refresh()

    def _count_changes(self) -> dict[str, int]:
        return {writer.id: writer.num_changes for writer in self._find_writers()}

    def _find_writers(self) -> list[BatchWriter]:
        store = self._repo.store
        # All stores in memory have the same URL.
        is_shared = not store.url.startswith("memory:")
        return [
            writer
            for writer in list(_OPEN_WRITERS)
            if writer.store is store or (is_shared and writer.store.url == store.url)
        ]

    def _describe_damage(self) -> str:
        damaged = len(self._catalog.damaged)
        return f" ({damaged} damaged batches could not be read: run `holdfast check`)" if damaged else ""


def _open(loc: StoreLocation) -> Repository:
    if isinstance(loc, Repository):
        return loc
    return open_repository(open_store(os.fspath(loc)), create=True)


def _parse_device(device: Device | None) -> torch.device | None:
    return None if device is None else torch.device(device)


__all__ = [
    "ContentStoreReader",
    "ContentStoreWriter",
    "TensorMetadata",
    "TensorNotFound",
    "hash_storage",
]
