"""`HoldfastCheckpointIO`: Lightning saves, loads and deletes its checkpoints in a store."""

from __future__ import annotations

import io
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Final

import torch

from holdfast.distributed.dcp.install import read_place
from holdfast.errors import AmbiguousName, NameInUse, NotFound, Unsupported
from holdfast.facade import Store
from holdfast.integrations.marker import (
    Marker,
    encode_marker,
    open_marked_store,
    read_marker,
    write_marker,
)
from holdfast.integrations.missing import RequiredLibrary
from holdfast.json_text import Json
from holdfast.objects.url import is_url
from holdfast.opening import open as open_store

with RequiredLibrary("Lightning", "lightning"):
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

__all__ = ["HoldfastCheckpointIO", "open_checkpoint"]

NAME_PREFIX: Final = "holdfast:"
"""What precedes the name of a snapshot in `ckpt_path`."""
_FACTS: Final = "lightning"
"""The key in a snapshot's metadata for the path of its marker."""


class HoldfastCheckpointIO(CheckpointIO):
    """Keeps the checkpoints of a `Trainer` or of `Fabric` in a store: `Trainer(plugins=[HoldfastCheckpointIO(store)])`.

    At each path where Lightning expects a checkpoint is a marker, a small file that names the store and the snapshot.
    Lightning finds, links and deletes markers as it does checkpoint files, and `torch.load` of a marker loads the
    snapshot.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        prefix: str | None = None,
        allow_pickle: bool = False,
        gc: bool = True,
    ) -> None:
        """Keep checkpoints in `store`.

        Args:
            store: a store, or its path or URL.
            prefix: the start of the snapshots' names, such as "run/"; the name of the file follows. Without it, a name
                is the path of the file, relative to the working directory if it is below it.
            allow_pickle: pickle hyperparameters and other values that the format cannot store. To load them, pass
                `weights_only=False` to the Trainer's method.
            gc: free space whenever Lightning deletes or overwrites a checkpoint. With False, `store.gc()` does that
                later.
        """
        super().__init__()
        self._store = open_store(store) if isinstance(store, str | os.PathLike) else store
        self._prefix, self._allow_pickle, self._collects = prefix, allow_pickle, gc
        self._files = TorchCheckpointIO()
        _register_for_pytorch_lightning()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint, then write its marker to `path`. No other rank takes part: Lightning calls rank 0 only."""
        if storage_options is not None:
            raise Unsupported("HoldfastCheckpointIO has no storage_options; pass options to holdfast.open")
        place = os.fspath(path)
        name = self._save(place, checkpoint)
        marker = Marker(self._store.url, self._store.repository.identity.store_id, name)
        write_marker(place, encode_marker(marker, {tensor.device for tensor in _iter_tensors(checkpoint)}))

    def _save(self, path: str, checkpoint: dict[str, Any]) -> str:
        metadata: dict[str, Json] = {_FACTS: _describe(path), "step": checkpoint.get("global_step")}
        own = self._read_own_name(path)
        for name in [own] if own else self._iter_names(path):
            is_own = name == own or self._is_left_over(name, path)
            # NameInUse: another path has the name, perhaps since a moment ago. Then try the next name.
            with suppress(NameInUse):
                self._verify_free(name, is_own=is_own)
                self._store.save(
                    name,
                    checkpoint,
                    overwrite=is_own,
                    metadata=metadata,
                    allow_pickle=self._allow_pickle,
                    collective=False,
                )
                if is_own:
                    self._collect(self._store)  # the bytes that the old checkpoint of this path had
                return name
        raise AssertionError("the names do not end")

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint of a marker, of "holdfast:<name>", or of a file that `torch.save` wrote.

        Args:
            path: the path of a marker or file; or "holdfast:" and the name or tag of a snapshot in the store.
            map_location: a device, default the CPU. Lightning itself never passes one.
            weights_only: False allows values that were saved as pickles.
        """
        place = os.fspath(path)
        marker = None if place.startswith(NAME_PREFIX) else read_marker(place)
        if marker is None and not place.startswith(NAME_PREFIX):
            loaded: dict[str, Any] = self._files.load_checkpoint(place, map_location, weights_only)
            return loaded
        store, name = self._locate(marker) if marker else (self._store, place.removeprefix(NAME_PREFIX))
        tree: dict[str, Any] = store.load(name, device=_find_device(map_location), allow_pickle=weights_only is False)
        return tree

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete the marker, and the snapshot unless another marker names it too."""
        place = os.fspath(path)
        if os.path.islink(place):
            os.unlink(place)
            return
        own, sharded = self._read_own_name(place), read_place(place)
        # The marker first: if this is interrupted, no marker is left whose snapshot is gone.
        self._files.remove_checkpoint(place)
        if own:
            self._delete(self._store, own)
        if sharded:
            url, name = sharded
            self._delete(self._store if url == self._store.url else open_store(url, create=False), name)

    def _delete(self, store: Store, name: str) -> None:
        with suppress(NotFound):
            store.delete(name)
            self._collect(store)

    def _collect(self, store: Store) -> None:
        if self._collects:
            store.gc()

    def _locate(self, marker: Marker) -> tuple[Store, str]:
        """Return the store of a marker, which is this one's even if it was moved, and the snapshot's name."""
        if self._is_here(marker):
            return self._store, marker.name
        return open_marked_store(marker.store, marker.store_id), marker.name

    def _is_here(self, marker: Marker) -> bool:
        return marker.store_id == self._store.repository.identity.store_id

    def _read_own_name(self, path: str) -> str | None:
        """Return the snapshot that the marker at a path names; None if another path has a better right to it.

        A link, or a copy of a marker, names the snapshot of another path. A marker that was moved keeps its snapshot.
        """
        marker = None if os.path.islink(path) else read_marker(path)
        if marker is None or not self._is_here(marker):
            return None
        saved_for = self._read_facts(marker.name).get("path", "")
        is_copy = saved_for != _find_full(path) and read_marker(saved_for) == marker
        return None if is_copy else marker.name

    def _is_left_over(self, name: str, path: str) -> bool:
        """Return whether a snapshot was saved for a path on this host: a save that was killed wrote no marker."""
        return self._read_facts(name) == _describe(path)

    def _verify_free(self, name: str, *, is_own: bool) -> None:
        """Raise NameInUse if a snapshot or tag has the name, and it is not that of the path to save."""
        try:
            self._store.snapshot(name)
        except NotFound:
            return
        except AmbiguousName as error:
            raise NameInUse(str(error), name=name) from error
        if not is_own:
            raise NameInUse(f"{name!r} is in use", name=name)

    def _read_facts(self, name: str) -> dict[str, str]:
        """Return path and host that a snapshot was saved for; empty if it was not saved by Lightning."""
        try:
            facts = self._store.snapshot(name).metadata.get(_FACTS)
        except (NotFound, AmbiguousName):
            return {}
        return {key: str(value) for key, value in facts.items()} if isinstance(facts, dict) else {}

    def _iter_names(self, path: str) -> Iterator[str]:
        """Yield names for a path, without end: the first one, and then the same with a number."""
        full = _find_full(path)
        stem = os.path.basename(full) if self._prefix is not None else _shorten(full)
        first = (self._prefix or "") + stem.removesuffix(".ckpt")
        yield first
        yield from (f"{first}~{number}" for number in count(2))


def open_checkpoint(store: Store, name: str) -> io.BytesIO:
    """Return a file for `load_from_checkpoint` or `torch.load`, which load the snapshot of that name from it."""
    name = store.snapshot(name).name
    return io.BytesIO(encode_marker(Marker(store.url, store.repository.identity.store_id, name)))


def _register_for_pytorch_lightning() -> None:
    """Let the package `pytorch_lightning`, which has its own copy of every class, accept the plug-in as well."""
    copy = sys.modules.get("lightning_fabric.plugins.io.checkpoint_io")
    if copy is not None:
        copy.CheckpointIO.register(HoldfastCheckpointIO)


def _describe(path: str) -> dict[str, Json]:
    return {"path": _find_full(path), "host": socket.gethostname()}


def _find_full(path: str) -> str:
    """Return an absolute path, or the URL as it is."""
    return path if is_url(path) else os.path.abspath(path)


def _shorten(path: str) -> str:
    """Return an absolute path or URL as a name: relative to the working directory if it is below it."""
    if is_url(path):
        return path.partition("://")[2].strip("/")
    inside = os.path.relpath(path)
    return path.strip("/") if inside.startswith("..") else inside


def _find_device(map_location: Any) -> torch.device:
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, str | int | torch.device):
        return torch.device(map_location)
    raise Unsupported(f"map_location is a device here, such as 'cpu', not a {type(map_location).__name__}")


def _iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _iter_tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _iter_tensors(each)
