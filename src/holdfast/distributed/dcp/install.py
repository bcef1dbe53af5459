"""Makes a store the place where torch.distributed.checkpoint keeps checkpoints, for code that offers no hook."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.distributed.dcp.lazy_store import CheckpointId, LazyStore, StoreLike, clean_id, raising_plainly
from holdfast.distributed.dcp.reader import StorageReader
from holdfast.distributed.dcp.stand_in import StandIn, put_in, take_out
from holdfast.distributed.dcp.writer import StorageWriter
from holdfast.errors import BadName, Corrupt, Unsupported
from holdfast.objects.url import is_url

_MARKER: Final = ".metadata"
"""Where torch keeps its own metadata, and where frameworks look for it to tell a checkpoint from a mere directory."""
_SIGN: Final = b'{"holdfast":'
_MAX_MARKER_BYTES: Final = 1 << 16
_HIDDEN: Final = ".holdfast"
# Found when this module is loaded, before anything is installed.
_TORCH_WRITER: Final = filesystem.FileSystemWriter
_TORCH_READER: Final = filesystem.FileSystemReader
_OVERWRITE_AT: Final = 5
"""The position of `overwrite` among the arguments of torch's writer that follow the path; `_extensions` is next."""


class FileSystemWriter(StorageWriter, metaclass=StandIn, torch_class=_TORCH_WRITER):
    """Stands in for torch's FileSystemWriter: a path is a name in the store, and gets a marker for frameworks."""

    store: ClassVar[StoreLike | None] = None
    weights_only: ClassVar[bool] = True

    def __init__(self, path: CheckpointId, *args: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Take what torch's takes; what is about its files means nothing here."""
        if kwargs.get("_extensions") or any(args[_OVERWRITE_AT + 1 : _OVERWRITE_AT + 2]):
            raise Unsupported(
                "extensions that transform torch's files do not apply to a store; uninstall it to use them"
            )
        _verify_path(path)
        overwrite = args[_OVERWRITE_AT] if len(args) > _OVERWRITE_AT else overwrite
        self._home = type(self).store
        super().__init__(*_locate(self._home, path), overwrite=overwrite, weights_only=type(self).weights_only)
        self._given = path
        self.path = Path(path)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Take another path for the next save; a URL is refused when that begins, where torch tells all ranks."""
        if checkpoint_id is not None:
            self._given = checkpoint_id
            self.path = Path(checkpoint_id)
            place, name = _locate(self._home, checkpoint_id)
            if self._home is None:
                self._place = LazyStore(place)
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
        """Tell whether it is a path, and one that torch's writer would take or that a given store does."""
        is_path = isinstance(checkpoint_id, Path) or not is_url(os.fspath(checkpoint_id))
        return is_path and (cls.store is not None or _TORCH_WRITER.validate_checkpoint_id(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save, and make the directory in which the marker will be."""
        _verify_path(self._given)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        with raising_plainly():
            self.path.mkdir(parents=True, exist_ok=True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, then leave the marker."""
        super().finish(metadata, results)
        with raising_plainly():
            _, name = _locate(self._home, self.path)
            _write_marker(_find_marker(self.path, self.own_rank), self._home, name)


class FileSystemReader(TorchStorageReader, metaclass=StandIn, torch_class=_TORCH_READER):
    """Stands in for torch's FileSystemReader: reads from the store, or what torch itself has written at the path."""

    store: ClassVar[StoreLike | None] = None
    weights_only: ClassVar[bool] = True

    def __init__(self, path: CheckpointId, *args: Any, **kwargs: Any) -> None:
        """Touch nothing yet."""
        super().__init__()
        _verify_path(path, "FsspecReader")
        self._home = type(self).store
        self._weights_only = type(self).weights_only
        self._more = (args, kwargs)
        self._inner: TorchStorageReader | None = None
        self._given = path
        self.path = Path(path)
        self.load_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The path."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Tell whether it is a path; torch's own asks for one beside which it can write, which no reader needs."""
        return isinstance(checkpoint_id, Path) or not is_url(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Take another path for the next load; a URL is refused when that begins, where torch tells all ranks."""
        if checkpoint_id is not None:
            self._given = checkpoint_id
            self.path = Path(checkpoint_id)
        self._inner = None
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read what the checkpoint holds, whoever has written it."""
        _verify_path(self._given, "FsspecReader")
        with raising_plainly():
            self._inner = self._choose(_find_marker(self.path, kwargs.get("rank")))
            metadata = self._inner.read_metadata(*args, **kwargs)
            if metadata.storage_meta is not None:
                metadata.storage_meta.checkpoint_id = self.path
            self.load_id = getattr(self._inner, "load_id", self.load_id)
            return metadata

    def _choose(self, marker: Path) -> TorchStorageReader:
        store, name = _locate(self._home, self.path)
        told = _read_marker(marker)
        if told is None and marker.is_file():
            return _TORCH_READER(self.path, *self._more[0], **self._more[1])
        if told is not None:
            beside, _ = _locate(None, self.path)
            name, url = told["name"] or name, told["store"] or beside
            # The installed one may be open, with options; another is opened by what the marker says.
            is_installed = self._home is not None and LazyStore(self._home).repository.store.url == url
            store = store if is_installed else url
        return StorageReader(store, name, weights_only=self._weights_only)

    @property
    def _chosen(self) -> TorchStorageReader:
        assert self._inner is not None, "the metadata is read first"
        return self._inner

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Pass it on."""
        self._chosen.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Pass it on."""
        return self._chosen.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Pass it on."""
        return self._chosen.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Pass it on."""
        return self._chosen.read_data(plan, planner)


class Installed:
    """That a store is torch's default; use it in a `with`, or call `uninstall` when it should be no more."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put torch's own writer and reader back."""
        uninstall()


def install(store: StoreLike | None = None, *, weights_only: bool = True) -> Installed:
    """Let torch.distributed.checkpoint, and all that calls its FileSystemWriter and FileSystemReader, use a store.

    Checkpoints that torch has written before are still read. URLs, and subclasses of the two classes, stay with torch's
    own code. Code outside of torch that has imported the two names earlier keeps torch's own: install first.

    Args:
        store: a `holdfast.Store`, a path or a URL, for all checkpoints; a path is a name in it. Without one, there
            is a store beside each checkpoint, `.holdfast` in the directory that it is in.
        weights_only: refuse to load values, other than tensors, that are more than plain data; a save warns of them.
    """
    FileSystemWriter.store = FileSystemReader.store = store
    FileSystemWriter.weights_only = FileSystemReader.weights_only = weights_only
    put_in((FileSystemWriter, FileSystemReader))
    return Installed()


def uninstall() -> None:
    """Put torch's own writer and reader back; what was saved meanwhile is read by `StorageReader`."""
    take_out((FileSystemWriter, FileSystemReader))
    FileSystemWriter.store = FileSystemReader.store = None


def _verify_path(path: CheckpointId, instead: str = "FsspecWriter") -> None:
    """Raise BadName for a URL: taken for a path, it would name a directory of this machine."""
    if is_url(os.fspath(path)):
        raise BadName(
            f"{os.fspath(path)} is a URL, and no path. Give it to dcp.save or dcp.load as a text, or to torch's"
            f" {instead}: what is there is not kept in a store. A directory of that name is ./{os.fspath(path)}"
        )


def _locate(store: StoreLike | None, path: CheckpointId) -> tuple[StoreLike, str]:
    """Return the store and the name that a path stands for."""
    place = os.path.normpath(os.fspath(path))
    if store is None:
        directory, name = os.path.split(os.path.abspath(place))
        return os.path.join(directory, _HIDDEN), name
    return store, clean_id(os.path.abspath(place) if place.startswith("..") else place)


def _find_marker(path: Path, rank: int | None) -> Path:
    """Return where the marker of a checkpoint is or, without collectives, that of one rank, named as torch does."""
    return path / (_MARKER if rank is None else f"__{rank}{_MARKER}")


def _write_marker(marker: Path, store: StoreLike | None, name: str) -> None:
    """Say where the checkpoint is; whole or not at all, for frameworks look only whether it is there."""
    # A store beside the checkpoint is found there, wherever both are moved to.
    url = None if store is None else LazyStore(store).repository.store.url
    told = json.dumps({"holdfast": {"store": url, "name": name}}, separators=(",", ":"))
    written = marker.with_name(f".{uuid.uuid4().hex}.tmp")
    written.write_text(told, encoding="utf-8")
    os.replace(written, marker)


def _read_marker(marker: Path) -> dict[str, str | None] | None:
    """Return what a marker says; None if it is not there, or is torch's own metadata."""
    try:
        with marker.open("rb") as file:
            data = file.read(_MAX_MARKER_BYTES)
    except FileNotFoundError:
        return None
    if not data.startswith(_SIGN):
        return None
    try:
        told = json.loads(data)["holdfast"]
        return {key: told[key] if told[key] is None else str(told[key]) for key in ("store", "name")}
    except (ValueError, LookupError, TypeError) as error:
        raise Corrupt(f"{marker} does not say where the checkpoint is; remove it, and name the store") from error
