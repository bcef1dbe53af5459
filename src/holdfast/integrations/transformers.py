"""Keeps the checkpoints of a Hugging Face Trainer in a store instead of in folders."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from holdfast.checkpointing import CheckpointManager, ManagerOptions, load_first_intact
from holdfast.distributed.checkpoint.training import RankRng, TrainingState, training_state
from holdfast.errors import Mismatch, Unsupported
from holdfast.integrations.frameworks import RequiredLibrary
from holdfast.json_text import is_number
from holdfast.snapshot.lazy import Snapshot
from holdfast.store import Store
from holdfast.tensors.sharding import PerRank, per_rank

with RequiredLibrary("Transformers with Accelerate", "transformers"):
    import accelerate  # noqa: F401  # the Trainer needs it, and would say so only when it is created
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState

_STATE_FILE: Final = "trainer_state.json"
_FOLDER: Final = re.compile(r"checkpoint-([0-9]+)\Z")
AUTO: Final = "auto"
"""The value of `resume_from_checkpoint` that resumes if there is a checkpoint."""
_BEST: Final = "best_at_step"
"""A metric of every checkpoint: its own step if it was the best when it was saved, otherwise 0."""


def use_store(trainer: Any, store: Store, prefix: str, *, async_: bool = True) -> TrainerCheckpoints:
    """Make a Trainer save its checkpoints to a store, as "<prefix>step-<step>", and resume from them.

    When it saves and what it keeps is decided by its arguments: `save_strategy`, `save_steps`, `save_total_limit`,
    `load_best_model_at_end`. `trainer.train(resume_from_checkpoint=True)` resumes from the newest checkpoint that is
    not damaged; "auto" does so too, but starts from the beginning if there is none. SIGTERM and SIGINT save and end the
    training after the current step. Call this before `train`, on every rank.

    Args:
        trainer: a `transformers.Trainer`, or an object of a subclass.
        store: where to save.
        prefix: the start of the names; it ends with a slash.
        async_: False to save in the foreground.
    """
    _verify_supported(trainer)
    checkpoints = TrainerCheckpoints(store, prefix, _make_options(trainer.args, async_=async_))
    kind = type(trainer)
    # A subclass of the trainer's own class, so that all other methods stay what they are.
    trainer.__class__ = type(kind.__name__, (_StoredTrainer, kind), {})
    trainer.holdfast = checkpoints
    trainer.add_callback(_StopCallback(trainer))
    return checkpoints


def _verify_supported(trainer: Any) -> None:
    if isinstance(trainer, _StoredTrainer):
        raise Unsupported("this trainer saves to a store already")
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2):
        raise Unsupported(
            "DeepSpeed and FSDP1 save through their own code, which this does not replace; train with DDP or with FSDP2"
            ' (fsdp_config={"version": 2})'
        )
    if trainer.args.push_to_hub:
        raise Unsupported(
            "push_to_hub=True uploads checkpoint folders, and there are none; set it to False, and call"
            " trainer.push_to_hub() after training"
        )


def _make_options(args: Any, *, async_: bool) -> ManagerOptions:
    limit = args.save_total_limit
    if limit is None or limit <= 0:
        return ManagerOptions(async_=async_)
    if args.metric_for_best_model is None:
        return ManagerOptions(async_=async_, keep_last=limit)
    # The best one counts, too. With a limit of 1, the last and the best are kept, as the Trainer does.
    return ManagerOptions(async_=async_, keep_last=max(1, limit - 1), keep_best=(_BEST, 1, "max"))


class TrainerCheckpoints:
    """The checkpoints of one Trainer in a store."""

    def __init__(self, store: Store, prefix: str, options: ManagerOptions) -> None:
        self._store, self._prefix, self._options = store, prefix, options
        self._manager: CheckpointManager | None = None
        self._folder = Path()
        self._stand_ins: dict[str, str] = {}
        """The checkpoint that each folder in `_folder` stands for, by path."""
        self._held_rng = _HeldRng()
        self._is_loaded = False
        self.stop_reason = ""
        """Why the last `train` ended early: "SIGTERM", "SIGINT", "another rank was signalled"; or ""."""

    def run(self, train: Any, wanted: object, trainer: Any) -> Any:
        """Call `train` with the folder to resume from, if any, and with a manager that is open meanwhile."""
        with (
            TemporaryDirectory(prefix="holdfast-") as folder,
            CheckpointManager(self._store, self._prefix, self._options) as own,
        ):
            self._folder, self._stand_ins, self._manager, self.stop_reason = Path(folder), {}, own, ""
            try:
                return self._resume(train, wanted, own)
            finally:
                self.stop_reason = own.stop_reason
                best = trainer.state.best_model_checkpoint
                trainer.state.best_model_checkpoint = self._stand_ins.get(best, best)

    def _resume(self, train: Any, wanted: object, manager: CheckpointManager) -> Any:
        """Train from the checkpoint that is wanted; if any will do, from the newest that is not damaged."""
        if wanted is True or wanted == AUTO:
            found = manager.read_newest_first()
            if not found and wanted is True:
                raise ValueError(
                    f"the store has no checkpoint under {self._prefix!r} to resume from;"
                    f" resume_from_checkpoint={AUTO!r} then starts from the beginning"
                )
        elif _is_nothing_in_a_store(wanted):
            return train(wanted)
        else:
            folder = _FOLDER.search(str(wanted))
            found = [self._store.snapshot(self._name(int(folder[1])) if folder else str(wanted))]
        if not found:
            return train(None)
        self._is_loaded = False
        results: list[Any] = []
        load_first_intact(
            found,
            lambda each: results.append(train(self._write_stand_in(each))),
            # An error of the training itself is not a reason to start again from an older checkpoint.
            may_go_on=lambda: not self._is_loaded,
        )
        return results[0]

    def is_stand_in(self, path: str | None) -> bool:
        """Return whether a folder stands for a checkpoint in the store."""
        return path in self._stand_ins

    def _write_stand_in(self, snapshot: Snapshot) -> str:
        """Write a folder with the file that the Trainer itself reads when it resumes; return its path."""
        target: dict[str, Any] = {"trainer": per_rank(b"")}
        # Collective, so that all ranks notice if it is damaged for one of them.
        self._store.load_into(snapshot, target, strict=False)
        saved: Any = target["trainer"]
        data: Any = saved.value if isinstance(saved, PerRank) else saved
        if not data:
            raise Mismatch(f"{snapshot.name!r} is not a checkpoint of a Trainer; resume from one that use_store saved")
        state: dict[str, Any] = json.loads(data)
        if state["best_model_checkpoint"] is not None:
            state["best_model_checkpoint"] = self._make_stand_in(state["best_model_checkpoint"])
        path = self._make_stand_in(snapshot.name)
        (Path(path) / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
        return path

    def _make_stand_in(self, name: str) -> str:
        """Create the folder that stands for a checkpoint; return its path."""
        path = self._folder / name.replace("/", "-")
        path.mkdir(exist_ok=True)
        self._stand_ins[str(path)] = name
        return str(path)

    def _name(self, step: int) -> str:
        return f"{self._prefix}step-{step}"

    def save(self, trainer: Any, *, force: bool) -> bool:
        """Save if `force` is set or if the process was told to stop; return whether the training must end."""
        assert self._manager is not None, "a trainer saves while it trains"
        state = trainer.state
        is_best = state.best_global_step == state.global_step
        self._manager.step(
            state.global_step,
            lambda: self._make_current_tree(trainer),
            metrics=_find_metrics(state) | {_BEST: float(state.global_step if is_best else 0)},
            metadata={"only_model": bool(trainer.args.save_only_model)},
            force=force,
        )
        return self._manager.should_stop

    def _make_current_tree(self, trainer: Any) -> TrainingState:
        """Bring the trainer's own state up to date, and return what is to be saved."""
        trainer.store_flos()
        if trainer.state.best_global_step == trainer.state.global_step:
            trainer.state.best_model_checkpoint = self._make_stand_in(self._name(trainer.state.global_step))
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        trainer.state.stateful_callbacks = _export_callbacks(callbacks)
        return self._make_tree(trainer, only_model=trainer.args.save_only_model)

    def _make_tree(self, trainer: Any, *, only_model: bool) -> TrainingState:
        if only_model:
            return training_state(trainer.model_wrapped, rng=False, trainer=self._encode_state(trainer.state))
        scaler = getattr(trainer.accelerator, "scaler", None)
        more = {"rng_state": self._held_rng, **({} if scaler is None else {"scaler": scaler})}
        return training_state(
            trainer.model_wrapped,
            trainer.optimizer,
            trainer.lr_scheduler,
            rng=False,
            step=trainer.state.global_step,
            trainer=self._encode_state(trainer.state),
            **more,
        )

    def _encode_state(self, state: Any) -> PerRank:
        values = dataclasses.asdict(state)
        best = values["best_model_checkpoint"]
        values["best_model_checkpoint"] = self._stand_ins.get(best, best)
        return per_rank(json.dumps(values, sort_keys=True).encode())

    def load(self, trainer: Any, path: str) -> None:
        """Load everything but the RNG state, which `restore_rng` restores when the Trainer asks for it."""
        snapshot = self._store.snapshot(self._stand_ins[path])
        only_model = snapshot.metadata.get("only_model") is True
        self._store.load_into(snapshot, self._make_tree(trainer, only_model=only_model))
        self._is_loaded = True

    def restore_rng(self) -> None:
        """Restore the RNG state of the checkpoint that was loaded."""
        self._held_rng.restore()

    def load_best(self, trainer: Any) -> None:
        """Load the weights of the best checkpoint."""
        assert self._manager is not None, "a trainer loads its best model at the end of training"
        self._manager.wait()
        weights = {"model": training_state(trainer.model, rng=False)["model"]}
        self._store.load_into(self._stand_ins[trainer.state.best_model_checkpoint], weights, strict=False)


class _HeldRng:
    """The RNG state; a loaded one is restored later, when the Trainer has skipped the batches of the first steps."""

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return RankRng().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._loaded = state_dict

    def restore(self) -> None:
        if self._loaded is not None:
            RankRng().load_state_dict(self._loaded)
        self._loaded = None


class _StoredTrainer(Trainer):  # type: ignore[misc]  # its types are not known to mypy: pyproject.toml
    """Replaces the methods of a Trainer that read and write checkpoint folders."""

    holdfast: TrainerCheckpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        def train(path: Any) -> Any:
            # An attempt to resume from a damaged checkpoint has left its hook, which adds noise (NEFTune).
            hook = getattr(self, "neftune_hook_handle", None)
            if hook is not None:
                hook.remove()
            return super(_StoredTrainer, self).train(path, *args, **options)

        return self.holdfast.run(train, resume_from_checkpoint, self)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None or self.hp_search_backend is not None:
            raise Unsupported("a hyperparameter search has many runs; give each its own trainer, store prefix and all")
        if self.holdfast.save(self, force=True):
            self.control.should_training_stop = True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # Those in a store are loaded at once, by `_load_optimizer_and_scheduler`: then nothing is half loaded.
        if not self.holdfast.is_stand_in(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.holdfast.is_stand_in(checkpoint):
            self.holdfast.load(self, checkpoint)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self.holdfast.is_stand_in(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.holdfast.is_stand_in(checkpoint):
            self.holdfast.restore_rng()
        else:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        if self.holdfast.is_stand_in(self.state.best_model_checkpoint):
            self.holdfast.load_best(self)
        else:
            super()._load_best_model()


class _StopCallback(TrainerCallback):  # type: ignore[misc]  # its types are not known to mypy: pyproject.toml
    """Saves and ends the training after a step if the process was told to stop."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self._trainer.holdfast.save(self._trainer, force=False):
            control.should_training_stop = True


def _export_callbacks(callbacks: list[Any]) -> dict[str, Any]:
    """Return the states of callbacks by class name; several of one class as a list."""
    found: dict[str, list[Any]] = {}
    for each in callbacks:
        if isinstance(each, ExportableState):
            found.setdefault(type(each).__name__, []).append(each.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def _find_metrics(state: Any) -> dict[str, float]:
    """Return what was logged for this step: numbers only."""
    entries = takewhile(lambda entry: entry.get("step") == state.global_step, reversed(state.log_history))
    logged: dict[str, float] = {}
    for entry in entries:
        logged = {name: value for name, value in entry.items() if name != "step" and is_number(value)} | logged
    return logged


def _is_nothing_in_a_store(wanted: object) -> bool:
    """Return whether nothing is to be resumed, or a folder that the Trainer itself has written."""
    return wanted is None or wanted is False or (Path(str(wanted)) / _STATE_FILE).is_file()
