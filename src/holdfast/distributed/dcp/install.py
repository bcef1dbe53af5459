"""Makes torch.distributed.checkpoint save to a store by default: replaces torch's file writer and reader."""

from __future__ import annotations

import copyreg
import json
import os
import sys
import types
import uuid
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import Self

from holdfast.distributed.dcp.lazy_store import CheckpointId, LazyStore, StoreLike, clean_id, raising_picklable
from holdfast.distributed.dcp.reader import StorageReader
from holdfast.distributed.dcp.writer import StorageWriter
from holdfast.errors import BadName, Corrupt, Unsupported
from holdfast.objects.url import is_url

_PACKAGE: Final = "torch.distributed.checkpoint"
"""The package in whose modules stand-ins replace torch's classes."""
_MARKER: Final = ".metadata"
"""Name of torch's metadata file. Frameworks check that it exists to tell a checkpoint from another directory."""
_MARKER_START: Final = b'{"holdfast":'
"""How a marker begins, and torch's own metadata, a pickle, does not."""
_MAX_MARKER_BYTES: Final = 1 << 16
_STORE_FOLDER: Final = ".holdfast"
"""Name of the store next to a checkpoint, if no store is installed."""
# Torch's own classes, imported before anything is installed.
_TORCH_WRITER: Final = filesystem.FileSystemWriter
_TORCH_READER: Final = filesystem.FileSystemReader
_OVERWRITE_AT: Final = 5
"""The position of `overwrite` among the arguments of torch's writer that follow the path; `_extensions` is next."""


class StandIn(ABCMeta):
    """The metaclass of a class that replaces a class of torch while `is_installed` is set.

    A call creates an instance of the stand-in while it is installed, else of torch's class. A subclass always inherits
    from torch's class, whose internals it may use or override. Instances of torch's class and of its subclasses count
    as instances of the stand-in, so that isinstance checks work as before.
    """

    torch_class: Any
    is_installed: bool

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, torch_class: Any = None, **kwargs: Any
    ) -> Any:
        """Create a stand-in for `torch_class`; without it, a subclass of the classes that the bases stand in for."""
        if torch_class is None:
            torch_bases = tuple(base.torch_class if isinstance(base, StandIn) else base for base in bases)
            return types.new_class(name, torch_bases, kwargs, lambda body: body.update(namespace))
        made: Any = super().__new__(cls, name, bases, namespace, **kwargs)
        made.torch_class = torch_class
        made.is_installed = False
        return made

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> None:
        """Drop the keyword arguments, which `__new__` has used."""
        super().__init__(name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an instance: of the stand-in while it is installed, else of torch's class."""
        if not cls.is_installed:
            return cls.torch_class(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether it is an instance of the stand-in or of torch's class."""
        return isinstance(instance, cls.torch_class) or super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Return whether it is the stand-in, or a subclass of torch's class."""
        return issubclass(subclass, cls.torch_class) or super().__subclasscheck__(subclass)


def _replace_torch_classes(stand_ins: Sequence[StandIn]) -> None:
    """Replace torch's classes by the stand-ins in all loaded modules of torch's package.

    Modules that are loaded later import the stand-ins from these.
    """
    for each in stand_ins:
        for module in _iter_modules(each.torch_class.__name__, each.torch_class):
            setattr(module, each.torch_class.__name__, each)
        # Pickle finds torch's class by its name, which now refers to the stand-in.
        copyreg.pickle(each.torch_class, _Reducer(each))
        each.is_installed = True


def _restore_torch_classes(stand_ins: Sequence[StandIn]) -> None:
    """Restore torch's classes in all loaded modules of torch's package."""
    for each in stand_ins:
        for module in _iter_modules(each.torch_class.__name__, each):
            setattr(module, each.torch_class.__name__, each.torch_class)
        copyreg.dispatch_table.pop(each.torch_class, None)
        each.is_installed = False


def _iter_modules(name: str, value: object) -> Iterator[types.ModuleType]:
    """Yield the modules of torch's package whose attribute `name` is `value`."""
    for key, module in list(sys.modules.items()):
        is_inside = key == _PACKAGE or key.startswith(f"{_PACKAGE}.")
        # A blocked import leaves None in sys.modules; it does not have the attribute either.
        if is_inside and getattr(module, name, None) is value:
            yield module


class _Reducer:
    """Pickles instances of torch's class through the stand-in, which any process can import."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def __call__(self, instance: object) -> tuple[Any, ...]:
        # Not __getstate__: Python 3.10 has none for a class that does not define it.
        reduced: tuple[Any, ...] = object.__reduce_ex__(instance, 2)  # type: ignore[assignment]  # a text is for globals
        return _new_torch_instance, (self._stand_in,), reduced[2]


def _new_torch_instance(stand_in: StandIn) -> object:
    """Return an instance of torch's class without state; unpickling sets it afterwards."""
    made: object = object.__new__(stand_in.torch_class)
    return made


class FileSystemWriter(StorageWriter, metaclass=StandIn, torch_class=_TORCH_WRITER):
    """Replaces torch's FileSystemWriter: saves under the path as name in the store, and writes a marker at the path."""

    store: ClassVar[StoreLike | None] = None
    weights_only: ClassVar[bool] = True

    def __init__(self, path: CheckpointId, *args: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Accept the arguments of torch's writer; those that concern its files are ignored."""
        if kwargs.get("_extensions") or any(args[_OVERWRITE_AT + 1 : _OVERWRITE_AT + 2]):
            raise Unsupported(
                "extensions transform torch's files and do not apply to a store; call holdfast.dcp.uninstall() first"
            )
        _verify_path(path)
        overwrite = args[_OVERWRITE_AT] if len(args) > _OVERWRITE_AT else overwrite
        self._installed_store = type(self).store
        store, name = _locate(self._installed_store, path)
        super().__init__(store, name, overwrite=overwrite, weights_only=type(self).weights_only)
        self._path_argument = path
        self.path = Path(path)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Use another path for the next save. A URL is refused when that save starts, where all ranks see the error."""
        if checkpoint_id is not None:
            self._path_argument = checkpoint_id
            self.path = Path(checkpoint_id)
            store, name = _locate(self._installed_store, checkpoint_id)
            if self._installed_store is None:
                self._lazy_store = LazyStore(store)
            super().reset(name)
        else:
            super().reset()

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The path."""
        return self.path

    def storage_meta(self) -> StorageMeta:
        """Return the ids of the next save."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether it is a path and, if no store is installed, one that torch's writer accepts."""
        is_path = isinstance(checkpoint_id, Path) or not is_url(os.fspath(checkpoint_id))
        return is_path and (cls.store is not None or _TORCH_WRITER.validate_checkpoint_id(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save, and create the directory for the marker."""
        _verify_path(self._path_argument)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        with raising_picklable():
            self.path.mkdir(parents=True, exist_ok=True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, then write the marker."""
        super().finish(metadata, results)
        with raising_picklable():
            _, name = _locate(self._installed_store, self.path)
            _write_marker(_find_marker(self.path, self.own_rank), self._installed_store, name)


class FileSystemReader(TorchStorageReader, metaclass=StandIn, torch_class=_TORCH_READER):
    """Replaces torch's FileSystemReader: reads from the store, or a checkpoint that torch has written at the path."""

    store: ClassVar[StoreLike | None] = None
    weights_only: ClassVar[bool] = True

    def __init__(self, path: CheckpointId, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of torch's reader, which are used if torch has written the checkpoint. Reads nothing."""
        super().__init__()
        _verify_path(path, "FsspecReader")
        self._installed_store = type(self).store
        self._weights_only = type(self).weights_only
        self._torch_arguments = (args, kwargs)
        self._inner: TorchStorageReader | None = None
        self._path_argument = path
        self.path = Path(path)
        self.load_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The path."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether it is a path. Torch also requires a writable directory, which a reader does not need."""
        return isinstance(checkpoint_id, Path) or not is_url(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Use another path for the next load. A URL is refused when that load starts, where all ranks see the error."""
        if checkpoint_id is not None:
            self._path_argument = checkpoint_id
            self.path = Path(checkpoint_id)
        self._inner = None
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the checkpoint, which Holdfast or torch has written."""
        _verify_path(self._path_argument, "FsspecReader")
        with raising_picklable():
            self._inner = self._choose(_find_marker(self.path, kwargs.get("rank")))
            metadata = self._inner.read_metadata(*args, **kwargs)
            if metadata.storage_meta is not None:
                metadata.storage_meta.checkpoint_id = self.path
            self.load_id = getattr(self._inner, "load_id", self.load_id)
            return metadata

    def _choose(self, marker: Path) -> TorchStorageReader:
        store, name = _locate(self._installed_store, self.path)
        found = _read_marker(marker)
        if found is None and marker.is_file():
            args, kwargs = self._torch_arguments
            return _TORCH_READER(self.path, *args, **kwargs)
        if found is not None:
            adjacent, _ = _locate(None, self.path)
            name, url = found["name"] or name, found["store"] or adjacent
            # Prefer the installed store, which may be open already. Open any other by the URL in the marker.
            installed = self._installed_store
            is_installed = installed is not None and LazyStore(installed).repository.store.url == url
            store = store if is_installed else url
        return StorageReader(store, name, weights_only=self._weights_only)

    @property
    def _chosen(self) -> TorchStorageReader:
        assert self._inner is not None, "read_metadata comes first"
        return self._inner

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Call the reader that `read_metadata` chose."""
        self._chosen.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Call the reader that `read_metadata` chose."""
        return self._chosen.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Call the reader that `read_metadata` chose."""
        return self._chosen.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Call the reader that `read_metadata` chose."""
        return self._chosen.read_data(plan, planner)


class Installed:
    """The result of `install`: as a context manager, it calls `uninstall` at the end of the `with`."""

    def __repr__(self) -> str:
        """Show which store torch.distributed.checkpoint uses."""
        store = FileSystemWriter.store
        return f"<Installed {'a store next to each checkpoint' if store is None else store}>"

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call `uninstall`."""
        uninstall()


def install(store: StoreLike | None = None, *, weights_only: bool = True) -> Installed:
    """Replace torch's FileSystemWriter and FileSystemReader, so that torch.distributed.checkpoint uses a store.

    Checkpoints that torch has written are still read. URLs, and subclasses of the two classes, still use torch's own
    code. Code outside of torch that has already imported the two classes keeps torch's own, so install early.

    Args:
        store: a `holdfast.Store`, a path or a URL, for all checkpoints. The path of a checkpoint becomes its name in
            the store. None for a store next to each checkpoint: `.holdfast` in its parent directory.
        weights_only: refuse to load values, other than tensors, that are not plain data. A save warns of such values.
    """
    FileSystemWriter.store = FileSystemReader.store = store
    FileSystemWriter.weights_only = FileSystemReader.weights_only = weights_only
    _replace_torch_classes((FileSystemWriter, FileSystemReader))
    return Installed()


def uninstall() -> None:
    """Restore torch's own writer and reader. Checkpoints saved while installed can be read with `StorageReader`."""
    _restore_torch_classes((FileSystemWriter, FileSystemReader))
    FileSystemWriter.store = FileSystemReader.store = None


def _verify_path(path: CheckpointId, instead: str = "FsspecWriter") -> None:
    """Raise BadName for a URL: used as a path, it would name a local directory."""
    if is_url(os.fspath(path)):
        raise BadName(
            f"{os.fspath(path)} is a URL, not a path. Pass it to dcp.save or dcp.load as a str, or to torch's"
            f" {instead}; such checkpoints are not kept in a store. For a directory of that name, pass"
            f" ./{os.fspath(path)}"
        )


def _locate(store: StoreLike | None, path: CheckpointId) -> tuple[StoreLike, str]:
    """Return the store and the snapshot name for the path of a checkpoint."""
    normal = os.path.normpath(os.fspath(path))
    if store is None:
        directory, name = os.path.split(os.path.abspath(normal))
        return os.path.join(directory, _STORE_FOLDER), name
    return store, clean_id(os.path.abspath(normal) if normal.startswith("..") else normal)


def _find_marker(path: Path, rank: int | None) -> Path:
    """Return the path of a checkpoint's marker; without collectives, that of one rank, named as torch names it."""
    return path / (_MARKER if rank is None else f"__{rank}{_MARKER}")


def read_place(path: CheckpointId) -> tuple[str, str] | None:
    """Return the store's URL and the snapshot's name from the marker of a checkpoint; None if there is no marker."""
    found = _read_marker(_find_marker(Path(path), None))
    if found is None:
        return None
    adjacent, name = _locate(None, path)
    return found["store"] or str(adjacent), found["name"] or name


def _write_marker(marker: Path, store: StoreLike | None, name: str) -> None:
    """Write store and name of a checkpoint to its marker, atomically: frameworks check only that the file exists."""
    # No URL for a store next to the checkpoint: it is still found there if both are moved.
    url = None if store is None else LazyStore(store).repository.store.url
    text = json.dumps({"holdfast": {"store": url, "name": name}}, separators=(",", ":"))
    temporary = marker.with_name(f".{uuid.uuid4().hex}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, marker)


def _read_marker(marker: Path) -> dict[str, str | None] | None:
    """Return store and name from a marker; None if it does not exist, or is torch's own metadata."""
    try:
        with marker.open("rb") as file:
            data = file.read(_MAX_MARKER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not data.startswith(_MARKER_START):
        return None
    try:
        fields = json.loads(data)["holdfast"]
        return {key: fields[key] if fields[key] is None else str(fields[key]) for key in ("store", "name")}
    except (ValueError, LookupError, TypeError) as error:
        raise Corrupt(
            f"{marker} is damaged: it does not name the store of the checkpoint; delete it, and pass the store to"
            " holdfast.dcp.install"
        ) from error
