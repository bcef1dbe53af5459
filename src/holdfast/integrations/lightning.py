"""Lightning saves, loads and deletes its checkpoints in a store: `HoldfastCheckpointIO`, and a strategy for shards."""

from __future__ import annotations

import io
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain, count
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from holdfast.distributed.checkpoint.checkpoint import World
from holdfast.distributed.checkpoint.training import training_state
from holdfast.distributed.dcp.install import read_place
from holdfast.errors import AmbiguousName, Mismatch, NameInUse, NotFound, Unsupported
from holdfast.integrations.frameworks import RequiredLibrary
from holdfast.integrations.marker import (
    Marker,
    encode_marker,
    naming_the_loss,
    open_store_of,
    read_marker,
    write_marker,
)
from holdfast.json_text import Json
from holdfast.objects.url import is_url
from holdfast.snapshot.lazy import Snapshot
from holdfast.store import Store
from holdfast.store import open as open_store
from holdfast.trees.outline import Leaf

with RequiredLibrary("Lightning", "lightning"):
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch.strategies import ModelParallelStrategy

__all__ = ["HoldfastCheckpointIO", "HoldfastModelParallelStrategy", "open_checkpoint"]

NAME_PREFIX: Final = "holdfast:"
"""What precedes the name of a snapshot in `ckpt_path`."""
_FACTS: Final = "lightning"
"""The key in a snapshot's metadata for the path of its marker."""
_FOLDER_FILE: Final = "meta.pt"
"""The file by which Lightning tells the folder of a sharded checkpoint of its own from other folders."""
_SHARDED: Final[tuple[str, ...]] = ("state_dict", "optimizer_states")
"""The parts of a checkpoint of which each rank has a shard; all others are the same on each rank."""


class _Place(NamedTuple):
    """Where to save a checkpoint."""

    name: str
    is_own: bool
    """Whether the name has an earlier checkpoint of the same path, which is overwritten."""
    metadata: dict[str, Json]


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
        for choice in self._iter_places(place, checkpoint):
            with suppress(NameInUse):  # another path has taken the name a moment ago
                self._save(choice, checkpoint, collective=False)
                self._mark(choice, place, checkpoint)
                self._collect_old(choice)
                return

    def save_shards(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Save a checkpoint of which each rank has a part; all ranks must call this, and rank 0 writes the marker."""
        place = os.fspath(path)
        with World().join("save for Lightning", place) as ranks:
            choose = self._iter_places(place, checkpoint).__next__
            choice = _Place(*ranks.broadcast("choose a name", lambda: tuple(choose())))
            self._save(choice, checkpoint, collective=True)
            ranks.broadcast("write the marker", lambda: self._mark(choice, place, checkpoint))
        # Outside of the collective: it may take longer than the ranks wait for a sign of life.
        if ranks.is_coordinator:
            self._collect_old(choice)

    def _save(self, place: _Place, checkpoint: dict[str, Any], *, collective: bool) -> None:
        self._store.save(
            place.name,
            checkpoint,
            overwrite=place.is_own,
            metadata=place.metadata,
            allow_pickle=self._allow_pickle,
            collective=collective,
        )

    def _mark(self, place: _Place, path: str, checkpoint: dict[str, Any]) -> None:
        """Write the marker of a checkpoint that is saved; it replaces a folder that Lightning's own strategy wrote."""
        if os.path.isfile(os.path.join(path, _FOLDER_FILE)):
            self.remove_checkpoint(path)
        marker = Marker(self._store.url, self._store.repository.identity.store_id, place.name)
        write_marker(path, encode_marker(marker, {tensor.device for tensor in _iter_tensors(checkpoint)}))

    def _collect_old(self, place: _Place) -> None:
        """Free the bytes that the old checkpoint of a path had."""
        if place.is_own:
            self._collect(self._store)

    def _iter_places(self, path: str, checkpoint: dict[str, Any]) -> Iterator[_Place]:
        """Yield free names for the checkpoint of a path, or the one that it has already; without end."""
        metadata: dict[str, Json] = {_FACTS: _describe(path), "step": checkpoint.get("global_step")}
        own = self._read_own_name(path)
        for name in chain([own] if own else [], self._iter_names(path)):
            is_own = name == own or self._is_left_over(name, path)
            if is_own or self._is_free(name):
                yield _Place(name, is_own, metadata)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint of a marker, of "holdfast:<name>", or of a file that `torch.save` wrote.

        Args:
            path: the path of a marker or file; or "holdfast:" and the name or tag of a snapshot in the store.
            map_location: a device, default the CPU. Lightning itself never passes one.
            weights_only: False allows values that were saved as pickles.
        """
        found = self.read_location(path)
        if found is None:
            loaded: dict[str, Any] = self._files.load_checkpoint(path, map_location, weights_only)
            return loaded
        store, name = found
        device = _find_device(map_location)
        with _naming_the_marker(store, name, path):
            tree: dict[str, Any] = store.load(name, device=device, allow_pickle=weights_only is False)
        return tree

    def read_location(self, path: str | os.PathLike[str]) -> tuple[Store, str] | None:
        """Return store and name of the snapshot that a marker or "holdfast:<name>" means; None for any other file."""
        place = os.fspath(path)
        if place.startswith(NAME_PREFIX):
            return self._store, place.removeprefix(NAME_PREFIX)
        marker = read_marker(place)
        return (open_store_of(marker, self._store), marker.name) if marker else None

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

    def _is_free(self, name: str) -> bool:
        """Return whether no snapshot and no tag has the name."""
        try:
            self._store.snapshot(name)
        except NotFound:
            return True
        except AmbiguousName:
            pass
        return False

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


class HoldfastModelParallelStrategy(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy`, for FSDP2 and tensor parallel models, with its checkpoints in a store.

    Use it with the plug-in: `Trainer(strategy=HoldfastModelParallelStrategy(), plugins=[HoldfastCheckpointIO(store)])`.
    Each rank saves its shards, in one snapshot with the rest of the checkpoint; any number of ranks can load it.
    Checkpoints that Lightning's own strategy wrote are still loaded.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint, all ranks together; with `save_distributed_checkpoint=False`, rank 0 saves all of it."""
        if storage_options is not None or not _has_shards(checkpoint):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        shards: dict[str, Any] = {key: checkpoint.pop(key) for key in _SHARDED if key in checkpoint}
        # The rest may differ from rank to rank, such as the time that a callback has measured.
        path, rest = self.broadcast((filepath, checkpoint))
        self._plugin.save_shards({**rest, **shards}, path)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load each rank's shards into the model and the optimizers; return the rest of the checkpoint."""
        path = self.broadcast(checkpoint_path)
        found = self._plugin.read_location(path)
        if found is None:
            rest: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return rest
        store, name = found
        with _naming_the_marker(store, name, path):
            return self._load_shards(store.snapshot(name), store, allow_pickle=weights_only is False)

    def _load_shards(self, snapshot: Snapshot, store: Store, *, allow_pickle: bool) -> dict[str, Any]:
        assert self.model is not None
        assert self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        leaves = snapshot.open().leaves
        optimizers: Any = list(self.optimizers)
        state = training_state(self.model, optimizers, rng=False)
        # What the target has as None is loaded into new memory.
        tree: dict[Any, Any] = dict.fromkeys({leaf.path_json[0] for leaf in leaves} - {*_SHARDED})
        tree["state_dict"] = state["model"]
        if optimizers:
            tree["optimizer_states"] = optimizers if _has_numbers(leaves) else state["optimizer"]
        elif strict:
            # To test or predict: the saved optimizers are left out, so Holdfast must not ask for equal keys.
            strict = False
            _verify_complete(state["model"].state_dict(), leaves)
        store.load_into(snapshot, tree, strict=strict, allow_pickle=allow_pickle)
        return {key: value for key, value in tree.items() if key not in _SHARDED}

    @property
    def _plugin(self) -> HoldfastCheckpointIO:
        plugin: Any = self.checkpoint_io
        while not isinstance(plugin, HoldfastCheckpointIO):
            # AsyncCheckpointIO and other wrappers keep the plug-in under this name.
            plugin = getattr(plugin, "checkpoint_io", None)
            if plugin is None:
                raise Unsupported(
                    "HoldfastModelParallelStrategy needs a store; pass it to the Trainer:"
                    " plugins=[HoldfastCheckpointIO(store)]"
                )
        return plugin


def _naming_the_marker(store: Store, name: str, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Return a context for loading a snapshot; a name that the user has passed has no marker."""
    place = os.fspath(path)
    return nullcontext() if place.startswith(NAME_PREFIX) else naming_the_loss(store, name, place)


def _has_numbers(leaves: Sequence[Leaf]) -> bool:
    """Return whether the optimizers in a checkpoint know parameters by number: a strategy without shards saved it."""
    paths = [(leaf.path_json, leaf.node) for leaf in leaves if leaf.path_json[0] == "optimizer_states"]
    return any(path[2::2] == ("param_groups", "params") and isinstance(node, int) for path, node in paths)


def _verify_complete(state: Mapping[str, Any], leaves: Sequence[Leaf]) -> None:
    """Raise Mismatch if a checkpoint lacks values of a model's state."""
    saved = {leaf.path_json[:2] for leaf in leaves}
    missing = [key for key in state if ("state_dict", key) not in saved]
    if missing:
        raise Mismatch(
            f"the checkpoint has no value for {', '.join(missing)}; set strict_loading = False in the LightningModule"
            " to keep the model's own",
            problems=tuple(missing),
        )


def _has_shards(checkpoint: dict[str, Any]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in _iter_tensors(checkpoint.get("state_dict")))


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
