"""PyTorch's content store (`torch.utils._content_store`) over a Holdfast store: the same names, without its limits.

Storages are addressed by content, tensors by name. Tensors are written in batches: what a writer has taken up is
visible to readers of the same process at once, to others and after a crash once the batch is committed, which happens
when it is full, at `flush` and `close`, when the writer is dropped, and when the interpreter exits.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Final, Self

import torch

from holdfast.content.batch_writer import BatchWriter
from holdfast.content.catalog import Catalog, StoredTensor
from holdfast.content.rebuild import Rebuilder, describe_entry
from holdfast.digest import hash_bytes
from holdfast.errors import TensorNotFound, Unsupported
from holdfast.objects.url import open_store
from holdfast.repo.format.layout import verify_name
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES, Repository, open_repository
from holdfast.snapshot.leaves import GRAD, TENSOR, iter_entry_numbers
from holdfast.tensors.dtypes import item_bytes
from holdfast.tensors.memory import view_bytes
from holdfast.tensors.storage import storage_bytes
from holdfast.trees.registered import Types

StoreLocation = str | os.PathLike[str] | Repository
Device = torch.device | str | int | None

_TUPLE_FIELDS: Final = 6
_OPEN_WRITERS: Final[weakref.WeakSet[BatchWriter]] = weakref.WeakSet()
"""Of this process: code written for PyTorch's reads what it has just written, and knows of no `flush`."""


def hash_storage(storage: torch.UntypedStorage, *, stable_hash: bool = False) -> str:
    """Return the hex BLAKE3-256 of a storage's bytes: the same on every device, in every process, for ever.

    There is only this one hash, so `stable_hash` changes nothing.
    """
    if storage.device.type == "meta":
        raise Unsupported("a storage on the meta device has no bytes to hash")
    on_cpu = storage.cpu()  # type: ignore[no-untyped-call]  # torch does not say
    return hash_bytes(view_bytes(storage_bytes(on_cpu))).hex()


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """What a tensor is besides its bytes; unpacks into the six values of PyTorch's.

    Of a view whose storage was not stored as a whole, `digest` and `offset` as read are those of the part that was.
    """

    dtype: torch.dtype
    digest: str
    """Of its storage; empty for a tensor that has none: on the meta device, sparse, nested, a subclass."""
    offset: int
    """In items, like the strides."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    flags: Mapping[str, bool]
    """`conj` and `neg`, if set."""
    device: torch.device = field(default=torch.device("cpu"))
    """Where the tensor is, or was when it was written."""
    layout: torch.layout = torch.strided
    requires_grad: bool = False

    def __iter__(self) -> Iterator[Any]:
        """Yield dtype, digest, offset, shape, stride and flags."""
        return (getattr(self, each.name) for each in fields(self)[:_TUPLE_FIELDS])

    def __len__(self) -> int:
        """Return 6."""
        return _TUPLE_FIELDS

    def __getitem__(self, index: int) -> Any:
        """Return one of the six."""
        return tuple(self)[index]


def _describe(tensor: torch.Tensor, digest: str | None) -> TensorMetadata:
    is_strided = tensor.layout == torch.strided and not tensor.is_nested
    is_plain = is_strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
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
    """Writes tensors under names and storages under digests; many processes may write to one place. Safe in any thread.

    Everything about a tensor is kept: dtype, strides, conj and neg bits, requires_grad, gradient, being a Parameter,
    sparse and nested layouts, quantizers. A name that is written again holds the newer tensor.
    """

    def __init__(
        self,
        loc: StoreLocation,
        stable_hash: bool = False,  # by position, as in PyTorch's
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        types: Iterable[type] = (),
    ) -> None:
        """Open the store at a path or URL, or use one that is open; the first commit creates it.

        Args:
            loc: where.
            stable_hash: changes nothing; the hash is stable.
            budget_bytes: how many bytes of tensors may wait to be committed.
            types: tensor subclasses that may be written.
        """
        self.loc = loc
        self.stable_hash = stable_hash
        self._writer = BatchWriter(lambda: _open(loc), budget_bytes=budget_bytes, types=Types(tuple(types)))
        self._finalizer = weakref.finalize(self, self._writer.end)
        _OPEN_WRITERS.add(self._writer)
        # Before `atexit`, when no thread can be started any more. There is no public way to be called that early.
        threading._register_atexit(self._finalizer)  # type: ignore[attr-defined]  # not in the stubs, for that reason

    def write_storage(self, storage: torch.UntypedStorage) -> str:
        """Write all bytes of a storage, unless they are there, and return their digest."""
        digest = hash_storage(storage)
        self._writer.write_storage(digest, storage)
        return digest

    def compute_tensor_metadata(self, t: torch.Tensor, h: str | None = None) -> TensorMetadata:
        """Describe a tensor; `h` is the digest of its storage, if that is known."""
        return _describe(t, h)

    def write_tensor(self, name: str, t: torch.Tensor) -> None:
        """Write a tensor under a name, which may hold slashes; it may change once this returns."""
        self._writer.write(name, t)

    def write_tensor_async(self, name: str, t: torch.Tensor) -> None:
        """Do the same, committing full batches in the background; errors are raised by `flush`.

        Waits only when as much as the budget allows is still to be committed.
        """
        self._writer.write(name, t, behind=True)

    def flush(self) -> None:
        """Commit what was written so far: durable, and visible to all, once this returns."""
        self._writer.flush()

    def close(self) -> None:
        """Commit what was written so far; the writer may be used again."""
        self._writer.flush()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit what was written, also after an error: what is there is what one wants to look at then."""
        self.close()


class ContentStoreReader:
    """Reads tensors by name and storages by digest, each byte verified. Safe in any thread.

    What shared memory when it was written shares it again, also across batches of one writer; what merely had equal
    content does not. What other processes write is seen when a name is not found, or after `refresh`.
    """

    def __init__(self, loc: StoreLocation, *, cache: bool = True, types: Iterable[type] = ()) -> None:
        """Open the store; with `cache`, storages that are in use are found again and not read again."""
        self.loc = loc
        self._types = Types(tuple(types))
        self._has_cache = cache
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._repo = _open(self.loc)
        self._catalog = Catalog(self._repo)
        self._reviver = Rebuilder(self._catalog, self._types, cache=self._has_cache)
        self._lock = threading.RLock()
        self._seen: dict[str, int] | None = None

    def read_storage(self, h: str, *, device: Device = None) -> torch.UntypedStorage:
        """Read a storage by its digest, to where it was or to `device`; raises TensorNotFound."""
        with self._hold():
            self._look_around()
            provider = self._catalog.find_storage(h)
            if provider is None:
                self.refresh()
                provider = self._catalog.find_storage(h)
            if provider is None:
                raise TensorNotFound(f"no storage with digest {h!r} in {self._repo.store.url}{self._excuse()}", name=h)
            return self._reviver.read_storage(provider, _parse_device(device))

    def read_tensor_metadata(self, name: str) -> TensorMetadata:
        """Read what a tensor is besides its bytes; raises TensorNotFound."""
        with self._hold():
            held = self._find(name)
            node = held.node[1] if held.node[0] == GRAD else held.node
            if node[0] != TENSOR:
                return _describe(self._reviver.read_tensor(held, None), None)
            opened = self._catalog.open(held.batch)
            found = describe_entry(opened, next(iter_entry_numbers(node, what=name)))
        spec, place = found.spec, found.place
        flags = {"conj": spec.conj, "neg": spec.neg}
        return TensorMetadata(
            spec.dtype,
            place.digest if place else "",
            spec.offset - place.first // item_bytes(spec.dtype) if place else 0,
            spec.shape,
            spec.stride,
            {flag: True for flag, is_set in flags.items() if is_set},
            found.device,
            requires_grad=spec.requires_grad,
        )

    def read_tensor(self, name: str, *, device: Device = None) -> torch.Tensor:
        """Read a tensor, to where it was or to `device`; raises TensorNotFound."""
        with self._hold():
            return self._reviver.read_tensor(self._find(name), _parse_device(device))

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        with self._hold():
            self.refresh()
            return self._catalog.names()

    def refresh(self) -> None:
        """Look for what was written since; also what was written again under a name that is known."""
        with self._hold():
            self._seen = self._count_changes()
            for writer in self._find_writers():
                writer.flush()
            self._catalog.refresh()

    def _hold(self) -> AbstractContextManager[object]:
        """Return the lock. A forked child begins anew: the threads that read stayed with the parent."""
        if os.getpid() != self._pid:
            self._start()
        return self._lock

    def _find(self, name: str) -> StoredTensor:
        name = verify_name(name, what="tensor")
        self._look_around()
        held = self._catalog.find_tensor(name)
        if held is None:
            self.refresh()
            held = self._catalog.find_tensor(name)
        if held is None:
            raise TensorNotFound(
                f"no tensor {name!r} in {self._repo.store.url}{self._excuse()}; `names()` lists those that are there",
                name=name,
            )
        return held

    def _look_around(self) -> None:
        """See to it that what this process has written is known."""
        if self._count_changes() != self._seen:
            self.refresh()

    def _count_changes(self) -> dict[str, int]:
        return {writer.id: writer.num_changes for writer in self._find_writers()}

    def _find_writers(self) -> list[BatchWriter]:
        store = self._repo.store
        # The URL of a store in memory is that of all of them.
        is_shared = not store.url.startswith("memory:")
        return [
            writer
            for writer in list(_OPEN_WRITERS)
            if writer.store is store or (is_shared and writer.store.url == store.url)
        ]

    def _excuse(self) -> str:
        damaged = len(self._catalog.damaged)
        return f" ({damaged} damaged batches could not be read: run `holdfast check`)" if damaged else ""


def _open(loc: StoreLocation) -> Repository:
    if isinstance(loc, Repository):
        return loc
    return open_repository(open_store(os.fspath(loc)), create=True)


def _parse_device(device: Device) -> torch.device | None:
    return None if device is None else torch.device(device)


__all__ = [
    "ContentStoreReader",
    "ContentStoreWriter",
    "TensorMetadata",
    "TensorNotFound",
    "hash_storage",
]
