"""The storage writer for torch.distributed.checkpoint: each rank writes a part, the coordinator commits all parts."""

from __future__ import annotations

import copy
import functools
import io
import uuid
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

from holdfast.distributed.dcp.commit import Commit, make_root, verify_free
from holdfast.distributed.dcp.items import Written, plan_groups
from holdfast.distributed.dcp.lazy_store import (
    CheckpointId,
    LazyStore,
    StoreLike,
    choose_name,
    clean_id,
    is_name,
    raising_picklable,
)
from holdfast.distributed.dcp.metadata import KEY
from holdfast.errors import Mismatch, NotShared
from holdfast.json_text import Json
from holdfast.repo.format.layout import PartRef, parse_part
from holdfast.repo.format.source import Source
from holdfast.repo.handle.config import read_config
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.write.part_writer import WrittenPart, end_lease, write_part
from holdfast.snapshot.save.device_digests import Digests, digest_sources
from holdfast.snapshot.save.save import describe_environment
from holdfast.texts import list_some
from holdfast.trees.apply import apply_to_tensors

_MAX_NAMED: Final = 8
_BATCH_SHARE: Final = 4
"""A planner resolves at most budget / _BATCH_SHARE bytes at a time."""


class StorageWriter(TorchStorageWriter):
    """Lets `dcp.save` and `dcp.async_save` write to a store: deduplicated, verified, all or nothing.

    Use it for one save at a time. It can be pickled, for saves in another process. It is also an AsyncStager: it copies
    the state dict of an asynchronous save.
    """

    # The methods up to `close` make it an AsyncStager, because torch's default one loses conj and neg bits.
    _synchronize_after_execute: bool = False

    def __init__(
        self,
        store: StoreLike,
        name: CheckpointId | None = None,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Json] | None = None,
        weights_only: bool = True,
    ) -> None:
        """Configure a writer; the store is opened, and created if necessary, when the first save starts.

        Args:
            store: a `holdfast.Store`, a path or a URL.
            name: the name of the snapshot; a `checkpoint_id` passed to the save replaces it.
            overwrite: replace the snapshot of that name, atomically, after everything is written.
            metadata: stored with the snapshot.
            weights_only: warn of values that a `StorageReader` refuses to load without weights_only=False.
        """
        super().__init__()
        self._lazy_store = LazyStore(store)
        self._checkpoint_id = name
        self._overwrite = overwrite
        self._metadata = dict(metadata or {})
        self._weights_only = weights_only
        self._rank: int | None = None
        self._is_collective = True
        self._is_only_rank = False
        self._commit: Commit | None = None
        self._lease_id = ""
        self.save_id = _new_id()
        self.snapshot: CommittedSnapshot | None = None
        """The snapshot of the last save; set only on the rank that committed it."""

    def __repr__(self) -> str:
        """Show the name of the snapshot, if it is known yet."""
        return f"<StorageWriter {str(self._checkpoint_id)!r}>" if self._checkpoint_id else "<StorageWriter>"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of a save in progress."""
        return self.__dict__ | {"_commit": None, "_lease_id": "", "snapshot": None}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state dict, for an asynchronous save."""
        return _stage_state(state_dict)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Return False: the staged state dict is already a complete copy."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Do nothing: the staged state dict is already a complete copy."""

    def close(self) -> None:
        """Abandon a save that failed on another rank; torch does not report such failures to the writer."""
        if self._commit is not None:
            self._commit.abandon()
            self._commit = None
        if self._lease_id:
            end_lease(self._repository.store, self._lease_id)
            self._lease_id = ""

    @property
    def checkpoint_id(self) -> CheckpointId | None:
        """The name, as it was passed."""
        return self._checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether it can be the name of a snapshot."""
        return is_name(checkpoint_id)

    # Must not raise: torch calls it outside of its collectives, so the other ranks would wait for ever.
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Use another name for the next save."""
        if checkpoint_id is not None:
            self._checkpoint_id = checkpoint_id
        self.save_id = _new_id()

    def storage_meta(self) -> StorageMeta:
        """Return the ids of the next save."""
        return StorageMeta(checkpoint_id=self._checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save; raise NameInUse, before anything is planned, if the name must not be overwritten."""
        with raising_picklable():
            self.close()
            self.snapshot = None
            self._rank = kwargs.get("rank")
            self._is_collective = kwargs.get("use_collectives", True)
            self._is_only_rank = not self._is_collective
            if is_coordinator or not self._is_collective:
                verify_free(self._repository.store, self._name, overwrite=self._overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the lease, on the coordinator, before the ranks begin to write."""
        # The lease id is not put into the plans: a planner that caches plans would reuse those of the first save.
        with raising_picklable():
            self._is_only_rank = len(plans) == 1
            self._commit = Commit(self._repository, self._name, overwrite=self._overwrite)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the checkpoint; the result refers to its manifest."""
        future: Future[list[WriteResult]] = Future()
        try:
            with raising_picklable():
                future.set_result([self._write(plan, planner)])
        except BaseException:
            self.close()
            raise
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> WriteResult:
        repo, written = self._repository, Written(notes_refused=self._weights_only)
        if read_config(repo.store) is None:
            raise NotShared(
                f"rank {self._rank} finds no store in {repo.store.url}, where the coordinator created one: the path is"
                " local to each node. Use a path that all ranks share"
            )
        repo.verify_may_write()
        limit_bytes = repo.budget_bytes // _BATCH_SHARE
        groups = plan_groups(plan, planner, written, limit_bytes=limit_bytes, is_only_rank=self._is_only_rank)
        purpose = f"save {self._name!r} for torch, rank {self._rank or 0}"
        part = write_part(repo, self._name, groups, purpose=purpose, find_digests=_find_digests)
        self._lease_id = part.lease_id
        _warn_of_refused(self._name, written.refused)
        return WriteResult(MetadataIndex(self._name), part.new_bytes, _describe_part(part, written))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the parts of all ranks; until then, the name keeps its previous snapshot."""
        with raising_picklable():
            commit, self._commit = self._commit, None
            if commit is None:
                raise Mismatch(
                    f"{self._name!r}: this save was abandoned when another one began with the same writer; use a writer"
                    " for each save"
                )
            try:
                self.snapshot = self._finish(commit, metadata, results)
            finally:
                commit.abandon()

    def _finish(self, commit: Commit, metadata: Metadata, results: list[list[WriteResult]]) -> CommittedSnapshot:
        parts = [result.storage_data for own in results for result in own]
        written = Written()
        for each in parts:
            written.sizes.update(each["sizes"])
            written.dtypes.update(each["dtypes"])
        ids: Json = {"checkpoint_id": clean_id(self._checkpoint_id or ""), "save_id": self.save_id}
        return commit.finish(
            make_root(metadata, written, is_only_rank=self._is_only_rank),
            [_parse_part(each["part"]) for each in parts],
            leases=[each["lease"] for each in parts],
            metadata=self._metadata,
            environment=describe_environment() | {KEY: ids},
        )

    @property
    def _repository(self) -> Repository:
        return self._lazy_store.repository

    @property
    def own_rank(self) -> int | None:
        """This rank, if each rank saves a snapshot of its own (without collectives); else None."""
        return None if self._is_collective else self._rank or 0

    @property
    def _name(self) -> str:
        return choose_name(self._checkpoint_id, self.own_rank)


def _new_id() -> str:
    return str(uuid.uuid4())


def _describe_part(part: WrittenPart, written: Written) -> dict[str, Any]:
    """Return what the coordinator needs for the commit, as plain data."""
    return {
        "part": part.ref.to_json(),
        "lease": part.lease_id,
        "sizes": written.sizes,
        "dtypes": written.dtypes,
    }


def _warn_of_refused(name: str, refused: Mapping[str, str]) -> None:
    if not refused:
        return
    shown = list_some([f"{fqn} ({cause})" for fqn, cause in refused.items()], _MAX_NAMED)
    warnings.warn(
        f"{name!r}: {shown} will be refused when this checkpoint is loaded, because loading such values can run"
        " any code. To load them, use holdfast.dcp.install(weights_only=False) or"
        " StorageReader(..., weights_only=False)",
        stacklevel=2,
    )


def _parse_part(value: Json) -> PartRef:
    return parse_part(value, where="a rank")


def _stage_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict on the CPU; training may continue to change the original."""
    staged: dict[str, Any] = BlockingAsyncStager().stage(apply_to_tensors(_copy_if_shared, state_dict))
    copied: dict[str, Any] = _copy_streams(staged)
    return copied


def _copy_streams(staged: Any) -> Any:
    """Return a staged state dict with its BytesIO objects copied, because torch's stager does not copy them."""
    if type(staged) is io.BytesIO:
        return copy.copy(staged)
    if isinstance(staged, dict):
        return {key: _copy_streams(value) for key, value in staged.items()}
    if type(staged) in (list, tuple):
        return type(staged)(_copy_streams(value) for value in staged)
    return staged


def _copy_if_shared(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that torch's stager would not copy; else the tensor itself."""
    if isinstance(tensor, DTensor) and tensor.dim() == 0:
        return copy.deepcopy(tensor)
    if tensor.device.type == "cpu" and not does_stager_copy():
        return tensor.detach().clone()
    return tensor


@functools.cache
def does_stager_copy() -> bool:
    """Return whether the stager of this torch copies tensors that are on the CPU already."""
    # A mode for fake tensors would answer for itself.
    with _disable_current_modes():
        tensor = torch.ones(1, device="cpu")
        staged: dict[str, Any] = BlockingAsyncStager().stage({"tensor": tensor})
        return bool(staged["tensor"].data_ptr() != tensor.data_ptr())


def _find_digests(sources: Sequence[Source]) -> Digests:
    return digest_sources(enumerate(sources))
