"""`HoldfastCheckpointEngine`: a DeepSpeed engine saves each checkpoint as one snapshot in a store."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from holdfast.errors import NotFound, Unsupported
from holdfast.integrations.frameworks import RequiredLibrary, call_together
from holdfast.integrations.marker import (
    Marker,
    encode_marker,
    load_marked,
    load_part,
    open_store_of,
    read_marker,
    write_marker,
)
from holdfast.store import Store

with RequiredLibrary("DeepSpeed", "deepspeed"):
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

__all__ = ["HoldfastCheckpointEngine"]

_CLASS: Final = "deepspeed class"
"""The key of the class's name in the dict that an object of DeepSpeed is saved as."""
_CLASSES: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind for kind in (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
}


class HoldfastCheckpointEngine(CheckpointEngine):
    """Keeps the checkpoints of a DeepSpeed engine in a store; assign it to `engine.checkpoint_engine`.

    The checkpoint of a tag is one snapshot, "<prefix><tag>", which all ranks commit together. At each path where
    DeepSpeed expects a file is a marker, a small file that names the store and the snapshot. `torch.load` of a marker
    loads what the file would have contained, so DeepSpeed's script `zero_to_fp32` works as before.
    """

    def __init__(self, store: Store, prefix: str, *, allow_pickle: bool = False) -> None:
        """Keep checkpoints in `store`.

        Args:
            store: where to save; the same one on all ranks.
            prefix: the start of the names; it ends with a slash.
            allow_pickle: pickle values in `client_state` that the format cannot store, and unpickle them when loading.
        """
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"the prefix ends with a slash: {prefix + '/'!r}, not {prefix!r}")
        super().__init__()
        self.name = type(self).__name__
        self._store, self._prefix, self._allow_pickle = store, prefix, allow_pickle
        self._files = TorchCheckpointEngine()
        self._folder = ""
        self._states: dict[str, Any] = {}

    def latest_tag(self) -> str | None:
        """Return the tag of the newest checkpoint in the store, for `load_checkpoint(tag=...)`; None if there is none.

        DeepSpeed's own file `latest` is not written atomically: after a crash, it may be empty.
        """
        found = self._store.latest(self._prefix)
        return None if found is None else found.name.removeprefix(self._prefix)

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""
        self._folder, self._states = os.path.normpath(os.path.join(info.save_dir, info.tag)), {}

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a state until `commit`. What is not in the folder of the tag, such as an export, becomes a file."""
        if os.path.normpath(os.path.dirname(path)) == self._folder:
            self._states[path] = state_dict
        else:
            self._files.save(state_dict, path)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Save the states of all ranks as one snapshot, then write the markers; if one rank fails, all raise."""
        states, self._states = self._states, {}
        if not any(call_together(f"states of {info.tag}", lambda: bool(states))):
            return True
        name = self._prefix + info.tag
        tree = {_name_part(path): _encode(state) for path, state in states.items()}
        self._store.save(
            name, tree, overwrite=True, metadata={"deepspeed_tag": info.tag}, allow_pickle=self._allow_pickle
        )
        # When this returns, rank 0 writes the file `latest`: all markers must be there before.
        call_together(f"markers of {info.tag}", lambda: self._write_markers(name, list(states)))
        return True

    def _write_markers(self, name: str, paths: Sequence[str]) -> None:
        url, store_id = self._store.url, self._store.repository.identity.store_id
        for path in paths:
            write_marker(path, encode_marker(Marker(url, store_id, name, _name_part(path)), load=load_marked_file))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load the state of a path: of a marker, or of a file that DeepSpeed itself has written."""
        marker = read_marker(path)
        if marker is None and os.path.exists(path):
            return self._files.load(path, map_location=map_location)
        if marker is None:
            raise NotFound(f"{path} does not exist; `latest_tag` of the checkpoint engine returns a tag that does")
        store = open_store_of(marker, self._store)
        # DeepSpeed passes a device, or a function that leaves tensors on the CPU.
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        return _decode(load_part(store, marker.name, marker.part, device=device, allow_pickle=self._allow_pickle))

    def preserves_storage_sharing(self) -> bool:
        """Return False: a tensor is saved without the rest of its storage, so DeepSpeed need not copy it first."""
        return False


def load_marked_file(url: str, store_id: str, name: str, probes: Sequence[torch.Tensor], part: str) -> Any:
    """Load the state that a marker stands for. `torch.load` calls this: markers contain its name, so it cannot move."""
    return _decode(load_marked(url, store_id, name, probes, part))


torch.serialization.add_safe_globals([load_marked_file])


def _name_part(path: str) -> str:
    return os.path.basename(path).removesuffix(".pt")


def _encode(value: Any) -> Any:
    """Replace objects of DeepSpeed by dicts; return the value itself if it has none."""
    if isinstance(value, ZeroStageEnum):
        return {_CLASS: "ZeroStageEnum", "value": value.value}
    if type(value) in _CLASSES.values():
        return {_CLASS: type(value).__name__, **vars(value)}
    return _map(value, _encode)


def _decode(value: Any) -> Any:
    """Rebuild the objects that `_encode` replaced, without calling code of their classes."""
    if type(value) is not dict or _CLASS not in value:
        return _map(value, _decode)
    fields = dict(value)
    name = fields.pop(_CLASS)
    if name not in _CLASSES:
        raise Unsupported(f"the checkpoint has an object of DeepSpeed's class {name!r:.80}, which this does not know")
    if name == "ZeroStageEnum":
        return ZeroStageEnum(fields["value"])
    made = object.__new__(_CLASSES[name])
    vars(made).update(fields)
    return made


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the items of a container; return the container itself if none has changed."""
    if type(value) in (dict, OrderedDict):
        pairs = {key: change(item) for key, item in value.items()}
        return value if all(pairs[key] is item for key, item in value.items()) else type(value)(pairs)
    if type(value) in (list, tuple):
        items = [change(item) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
    return value
