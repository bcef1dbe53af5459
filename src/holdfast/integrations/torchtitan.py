"""`HoldfastCheckpointManager`: TorchTitan's trainer saves its checkpoints in a store, and resumes from them."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from holdfast.errors import Mismatch, Unsupported
from holdfast.integrations.frameworks import RequiredLibrary, call_together
from holdfast.snapshot.lazy import Snapshot
from holdfast.store import open as open_store
from holdfast.texts import list_some

with RequiredLibrary("TorchTitan", "torchtitan"):
    from torchtitan.components.checkpointer import MODEL, BaseCheckpointManager, CheckpointManager

__all__ = ["HoldfastCheckpointManager"]

_MODEL_ONLY: Final = "model_only"
"""Whether a checkpoint has the model only; a key of a snapshot's metadata."""
_LISTED: Final = 10


class HoldfastCheckpointManager(BaseCheckpointManager):
    """Keeps the checkpoints of a TorchTitan run in a store: `checkpoint=HoldfastCheckpointManager.Config(enable=True)`.

    A checkpoint is one snapshot, "<prefix>step-<step>". What is not in the store (an initial checkpoint, a model in
    Hugging Face's format, a checkpoint that TorchTitan itself has written to the folder) is left to TorchTitan's own
    manager.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """The options of TorchTitan's managers, and where to save."""

        store: str = ""
        """The path of the store; by default it is `store` in the checkpoint folder. Another one needs a prefix."""

        prefix: str = ""
        """The start of the snapshots' names, such as "run1/"; runs that share a store need different ones."""

        async_save: bool = True
        """Whether to save in the background, from a copy of the state."""

    def __init__(self, config: Config, **parts: Any) -> None:
        """Manage what TorchTitan's trainer passes to every checkpoint manager: see its `CheckpointManager`."""
        self.enable = config.enable
        if not self.enable:
            return
        if config.store and not config.prefix:
            raise ValueError(
                f"{config.store} may have snapshots of others: pass a prefix for this run, such as 'run1/'"
            )
        self._config = config
        self._own = CheckpointManager(_make_own_config(config), **parts)
        self._store = open_store(config.store or os.path.join(self._own.folder, "store"))
        self._saves = self._store.manager(
            config.prefix,
            async_=config.async_save,
            stop_signals=(),
            **({"keep_last": config.keep_latest_k} if config.keep_latest_k else {}),
        )
        # TorchTitan asks whether it is None, and waits through `_wait_for_saving`.
        self.save_future: Any = None

    def _is_due(self, step: int, last_step: bool) -> bool:
        config = self._config
        if config.load_only:
            return False
        return last_step or step % config.interval == 0 or (step == 1 and config.enable_first_step_checkpoint)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._is_due(curr_step, last_step):
            return False
        if last_step and self._config.last_save_in_hf:
            self._saves.wait()
            exported: bool = self._own.save(curr_step, last_step=True)
            return exported
        model_only = last_step and self._config.last_save_model_only
        tree = {MODEL: self._make_export()} if model_only else self._make_tree([])
        self._saves.step(curr_step, tree, metadata={_MODEL_ONLY: model_only}, force=True)
        self.save_future = self._saves
        if last_step:
            self._wait_for_saving()
        return True

    def _make_export(self) -> dict[str, Any]:
        dtype = self._own.export_dtype
        weights: dict[str, Any] = self._own.states[MODEL].state_dict()
        return {
            name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in weights.items()
        }

    def _make_tree(self, excluded: list[str]) -> dict[str, dict[str, Any]]:
        """Return the states to save, or to load into; their tensors are those of the run."""
        unknown = sorted(set(excluded) - set(self._own.states))
        if unknown:
            raise ValueError(f"exclude_from_loading names {unknown}; the states are {sorted(self._own.states)}")
        used = {name: state for name, state in self._own.states.items() if name not in excluded}
        return {name: state.state_dict() for name, state in used.items() if state is not None}

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        # Rank 0 decides: the others might see another state of the store.
        name = call_together("find a checkpoint", lambda: self._read_name(step))[0]
        if name is None:
            loaded: bool = self._own.load(step)
            return loaded
        snapshot = self._store.snapshot(name)
        model_only = snapshot.metadata[_MODEL_ONLY] is True
        tree = self._make_tree([] if model_only else self._config.exclude_from_loading)
        if model_only:
            tree = {MODEL: tree[MODEL]}
        call_together("compare the names", lambda: _verify_complete(snapshot, tree))
        # Not strict: a rank may have less than all ranks have saved, such as its own part of the loader's state.
        self._store.load_into(snapshot, tree, strict=False, cast=model_only)
        for part, state in tree.items():
            self._own.states[part].load_state_dict(state)
        return True

    def _read_name(self, step: int) -> str | None:
        """Return the name of a step's checkpoint, or of the newest for -1; None if the store has none."""
        prefix = self._config.prefix
        # Not those of other runs, whose names may begin with the same prefix.
        found = [
            each
            for each in self._store.snapshots(prefix)
            if _MODEL_ONLY in each.metadata and each.name == f"{prefix}step-{each.metadata['step']}"
        ]
        if step != -1:
            return next((each.name for each in found if each.metadata["step"] == step), None)
        # A checkpoint without an optimizer ends a run; only the one before the first step also begins one.
        usable = [each for each in found if not each.metadata[_MODEL_ONLY] or each.metadata["step"] == 0]
        if found and not usable:
            raise Unsupported(
                f"{found[-1].name!r} has the model only, so training cannot continue from it: delete it to start from"
                " step 0, or pass its step as load_step to begin with its weights"
            )
        return max(usable, key=lambda each: (each.time, each.metadata["step"])).name if usable else None

    def _wait_for_saving(self) -> None:
        self._saves.wait()
        self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: when a save in the background returns, the state has been copied."""

    def _close(self) -> None:
        self._saves.close()
        self._own.close()


def _make_own_config(config: Any) -> Any:
    """Return the configuration of TorchTitan's manager, which deletes nothing."""
    shared = {field.name: getattr(config, field.name) for field in fields(BaseCheckpointManager.Config)}
    return CheckpointManager.Config(**shared | {"keep_latest_k": 0})


def _verify_complete(snapshot: Snapshot, tree: dict[str, dict[str, Any]]) -> None:
    """Raise Mismatch if the snapshot lacks something that the run has."""
    missing = [f"{part}.{key}" for part, state in tree.items() for key in state if f"{part}.{key}" not in snapshot]
    if missing:
        raise Mismatch(
            f"{snapshot.name!r} does not have {list_some(missing, _LISTED)}; to go on without a state, name it in"
            " exclude_from_loading",
            problems=tuple(missing),
        )
