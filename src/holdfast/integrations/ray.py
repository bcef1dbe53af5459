"""`RayCheckpoints`: Ray Train's workers save their state together in a store, and resume from it."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, Final

import torch.distributed as dist

from holdfast.errors import NotFound, Unsupported
from holdfast.integrations.frameworks import RequiredLibrary
from holdfast.integrations.marker import Marker, encode_marker, open_store_of, read_marker, write_marker
from holdfast.json_text import Json
from holdfast.store import Store
from holdfast.store import open as open_store

with RequiredLibrary("Ray Train", "ray"):
    import pyarrow.fs
    import ray.train
    import ray.train.collective

__all__ = ["RayCheckpoints"]

_STORE_FOLDER: Final = "holdfast"
"""The store in the folder of an experiment, if the user passes none."""
_MARKER: Final = "state.pt"
"""The file in the folder of a checkpoint; `torch.load` of it loads the snapshot."""
_FOLDER: Final = "ray_folder"
"""The key of a checkpoint's folder in the metadata of its snapshot."""


class RayCheckpoints:
    """The checkpoints of a Ray Train run in a store; create it in the training function, on every worker.

    Ray manages a small folder for each checkpoint, in the folder of the experiment, with a marker that names the store
    and the snapshot. When Ray deletes such a folder (`num_to_keep`), the next report deletes the snapshot.
    """

    def __init__(
        self,
        state: Any,
        *,
        store: Store | str | os.PathLike[str] | None = None,
        async_: bool = True,
        **load_options: Any,
    ) -> None:
        """Load the checkpoint that Ray resumes from into `state`, in place, if there is one; `report` saves `state`.

        Args:
            state: a tree for `Store.save` and `Store.load_into`, such as a dict with a `holdfast.training_state`.
            store: a store, or its path or URL; all workers must be able to write to it. By default it is in the folder
                of the experiment, below `storage_path`.
            async_: False to save in the foreground.
            load_options: those of `Store.load_into`.
        """
        context = ray.train.get_context()
        storage = context.get_storage()
        if not isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
            raise Unsupported(
                f"storage_path is on {storage.storage_filesystem.type_name}, and RayCheckpoints writes small files"
                " there: pass a storage_path that all workers have mounted; the store may be in a bucket (store=)"
            )
        if context.get_world_size() > 1 and not dist.is_initialized():
            raise Unsupported("several workers save through torch.distributed: use ray.train.torch.TorchTrainer")
        self._folder, self._filesystem = storage.experiment_fs_path, storage.storage_filesystem
        self._prefix = f"{context.get_experiment_name()}/"
        self._is_first, self._is_async = context.get_world_rank() == 0, async_
        place = os.path.join(self._folder, _STORE_FOLDER) if store is None else store
        self._store = place if isinstance(place, Store) else open_store(place)
        self._state = state
        self.is_resumed = self._resume(load_options)
        """Whether there was a checkpoint to resume from."""

    def _resume(self, options: Mapping[str, Any]) -> bool:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return False
        marker = read_marker(os.path.join(checkpoint.path, _MARKER))
        if marker is None:
            raise NotFound(f"{checkpoint.path} has no {_MARKER}: it was not saved by RayCheckpoints; load it as before")
        open_store_of(marker, self._store).load_into(marker.name, self._state, **options)
        return True

    def report(self, metrics: Mapping[str, Any], **options: Any) -> None:
        """Report metrics, and save the state as their checkpoint; all workers must call this, as `ray.train.report`.

        The state may change once this returns. Ray knows the checkpoint when it is durable. `options` are those of
        `ray.train.report`, except for how it uploads.
        """
        folder_name = options.pop("checkpoint_dir_name", None) or ray.train.collective.broadcast_from_rank_zero(
            _make_folder_name()
        )
        folder = os.path.join(self._folder, folder_name)
        name = self._prefix + folder_name
        # Before the save: a snapshot without a folder is one that Ray has deleted.
        os.makedirs(folder, exist_ok=True)
        save: Callable[..., Any] = self._store.save_async if self._is_async else self._store.save
        metadata = {"metrics": _find_numbers(metrics), _FOLDER: folder}
        handle = save(name, self._state, overwrite=True, metadata=metadata)

        def upload(checkpoint: Any, _: str) -> Any:
            if self._is_async:
                handle.wait()
            if self._is_first:
                self._write_marker(folder, name)
                self._delete_what_ray_deleted()
            return checkpoint

        modes = ray.train.CheckpointUploadMode
        ray.train.report(
            dict(metrics),
            checkpoint=ray.train.Checkpoint(folder, self._filesystem),
            checkpoint_dir_name=folder_name,
            checkpoint_upload_mode=modes.ASYNC if self._is_async else modes.SYNC,
            checkpoint_upload_fn=upload,
            delete_local_checkpoint_after_upload=False,
            **options,
        )

    def _write_marker(self, folder: str, name: str) -> None:
        marker = Marker(self._store.url, self._store.repository.identity.store_id, name)
        write_marker(os.path.join(folder, _MARKER), encode_marker(marker))

    def _delete_what_ray_deleted(self) -> None:
        # By the recorded folder: other experiments may have the same name and store, and a folder elsewhere.
        found = {each.name: str(each.metadata.get(_FOLDER, "")) for each in self._store.snapshots(self._prefix)}
        deleted = [
            name
            for name, folder in found.items()
            if os.path.dirname(folder) == self._folder and not os.path.isdir(folder)
        ]
        for name in deleted:
            self._store.delete(name)
        if deleted:
            self._store.gc()


def _make_folder_name() -> str:
    return f"checkpoint_{datetime.now(timezone.utc):%Y-%m-%d_%H-%M-%S}_{uuid.uuid4().hex[:6]}"


def _find_numbers(metrics: Mapping[str, Any]) -> dict[str, Json]:
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
