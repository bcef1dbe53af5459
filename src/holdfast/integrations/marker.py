"""Marker files: a small file at the path of a checkpoint that is in a store; `torch.load` of it loads the snapshot.

A marker is a file of `torch.save`. Its pickle contains one call, `load_marked(...)`, so whatever loads checkpoint files
by `torch.load` loads the snapshot, also with `weights_only=True` once this module is imported. The same facts are in
the comment of the zip archive, as JSON: they are read without unpickling anything, and `tail -1` shows them.
"""

from __future__ import annotations

import io
import json
import os
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import IO, Any, Final

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from holdfast.distributed.talk.failures import is_caused_by
from holdfast.errors import Corrupt, NotAStore, NotFound, RankError, StoreGone, Unsupported
from holdfast.store import Store
from holdfast.store import open as open_store

_KEY: Final = "holdfast checkpoint"


@dataclass(frozen=True, slots=True)
class Marker:
    """Where the checkpoint is that a marker file stands for."""

    store: str
    """The path or URL of the store."""
    store_id: str
    name: str
    """The name of the snapshot."""
    part: str = ""
    """The key of the snapshot's tree that the file stands for; "" for the whole tree."""


class _MarkedCheckpoint:
    """Pickles as the call that loads a snapshot."""

    def __init__(self, marker: Marker, devices: Iterable[torch.device], load: Callable[..., Any]) -> None:
        self._marker, self._load = marker, load
        # Torch applies `map_location` to tensors only: where these arrive tells where the snapshot is wanted.
        self._probes = tuple(torch.empty(0, device=device) for device in devices)

    def __reduce__(self) -> tuple[Any, ...]:
        marker = self._marker
        return self._load, (marker.store, marker.store_id, marker.name, self._probes, marker.part)


def encode_marker(
    marker: Marker,
    devices: Iterable[torch.device] = (torch.device("cpu"),),
    *,
    load: Callable[..., Any] | None = None,
) -> bytes:
    """Return the bytes of a marker file; `devices` are those of the tensors in the checkpoint.

    `load` is what `torch.load` of the file calls, with the arguments of `load_marked`, which is the default.
    """
    buffer = io.BytesIO()
    torch.save(_MarkedCheckpoint(marker, devices, load or load_marked), buffer)
    facts = {field: value for field, value in asdict(marker).items() if value}
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = f"\n{json.dumps({_KEY: facts})}\n".encode()
    return buffer.getvalue()


def decode_marker(file: IO[bytes]) -> Marker | None:
    """Return what a marker says, without unpickling; None if the file is something else."""
    try:
        with zipfile.ZipFile(file) as archive:
            comment = archive.comment
    except zipfile.BadZipFile:
        return None
    if _KEY.encode() not in comment:
        return None
    try:
        facts = json.loads(comment)[_KEY]
        store, store_id, name = (str(facts[field]) for field in ("store", "store_id", "name"))
        return Marker(store, store_id, name, str(facts.get("part", "")))
    except (ValueError, LookupError, TypeError) as error:
        raise Corrupt(f"the marker of a checkpoint is damaged: {comment[:200]!r}") from error


def read_marker(path: str) -> Marker | None:
    """Return what the marker at a path or URL of fsspec says; None if there is no file, or another one."""
    filesystem, inner = url_to_fs(path)
    try:
        with filesystem.open(inner, "rb") as file:
            return decode_marker(file)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None


def write_marker(path: str, data: bytes) -> None:
    """Write the bytes of a marker to a path or URL of fsspec, durably and, on a local filesystem, atomically."""
    filesystem, inner = url_to_fs(path)
    filesystem.makedirs(os.path.dirname(inner), exist_ok=True)
    if not isinstance(filesystem, LocalFileSystem):
        filesystem.pipe_file(inner, data)
        return
    directory = os.path.dirname(inner)
    temporary = os.path.join(directory, f".{uuid.uuid4().hex}.tmp")
    with open(temporary, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, inner)
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_marked_store(url: str, store_id: str, *, read_only: bool = True) -> Store:
    """Open the store that a marker names; raise NotAStore or StoreGone if it is not there."""
    advice = "open the store where it is now, and load the snapshot by its name; Lightning takes 'holdfast:<name>'"
    try:
        store = open_store(url, read_only=read_only, create=False)
    except NotAStore as error:
        raise NotAStore(
            f"the checkpoint is in the store {url}, which is not there any more ({error}); {advice}"
        ) from error
    found_id = store.repository.identity.store_id
    if found_id != store_id:
        raise StoreGone(
            f"the checkpoint is in a store that was at {url}, where another store is now; {advice}",
            expected_id=store_id,
            found_id=found_id,
        )
    return store


@contextmanager
def naming_the_loss(store: Store, name: str, path: str = "") -> Iterator[None]:
    """Raise errors of a snapshot that was deleted or is damaged with what to do next; `path` is that of its marker."""
    where = f"{path}: its snapshot {name!r}" if path else f"the snapshot {name!r}"
    try:
        yield
    except NotFound as error:
        text = f"{where} was deleted from the store {store.url}; {_advise(store, path)}"
        raise NotFound(text, name=name) from error
    except Corrupt as error:
        text = f"{where} in the store {store.url} is damaged: {error}; or {_advise(store, path)}"
        raise type(error)(text, key=error.key) from error
    except RankError as error:
        if not is_caused_by(error, Corrupt):
            raise
        text = f"{where} in the store {store.url} is damaged; {_advise(store, path)}. {error}"
        raise RankError(text, step=error.step, failures=error.failures) from error


def _advise(store: Store, path: str) -> str:
    others = list_others(path) if path else []
    return f"use another checkpoint, such as {others[0]}" if others else f"`holdfast -s {store.url} ls` lists others"


def list_others(path: str) -> list[str]:
    """Return the other markers in the directory of a marker, the newest first; none for a URL."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        return []
    files = [os.path.join(folder, file) for file in os.listdir(folder)]
    found = []
    for file in files:
        # A file that Lightning deletes meanwhile, or a damaged one, is none to recommend.
        with suppress(OSError, Corrupt):
            is_other = os.path.isfile(file) and not os.path.samefile(file, path)
            if is_other and read_marker(file) is not None:
                found.append((os.path.getmtime(file), file))
    return [file for _, file in sorted(found, reverse=True)]


def open_store_of(marker: Marker, store: Store) -> Store:
    """Return `store` if it is the one that the marker names, even if it was moved; otherwise open that one."""
    is_here = marker.store_id == store.repository.identity.store_id
    return store if is_here else open_marked_store(marker.store, marker.store_id)


def load_marked(url: str, store_id: str, name: str, probes: Sequence[torch.Tensor], part: str = "") -> Any:
    """Load the snapshot, or the part of it, that a marker names, to the devices on which the probes are.

    `torch.load` of a marker calls this.

    Values that were saved as pickles are refused, because this cannot know whether the caller allows them.
    """
    device = _choose_device([probe.device for probe in probes])
    store = open_marked_store(url, store_id)
    with naming_the_loss(store, name):
        return load_part(store, name, part, device=device) if part else store.load(name, device=device)


def load_part(store: Store, name: str, part: str, **options: Any) -> Any:
    """Load what a snapshot's tree has under one key; `options` are those of `Store.load`."""
    tree: dict[str, Any] = store.load(name, only=f"{part}.*", **options)
    return tree[part]


def _choose_device(devices: Sequence[torch.device]) -> torch.device:
    """Return the one device that is not the CPU, which some values are always on; the CPU if there is none."""
    others = {device for device in devices if device.type != "cpu"}
    if len(others) > 1:
        raise Unsupported(
            f"the checkpoint has tensors for {len(others)} devices ({', '.join(sorted(map(str, others)))});"
            " pass one of them, or 'cpu', as map_location"
        )
    return others.pop() if others else torch.device("cpu")


# Without this, `torch.load(weights_only=True)`, the default, refuses the call in a marker. The call reads a store and
# unpickles nothing.
torch.serialization.add_safe_globals([load_marked])
