"""Keeps what `accelerator.save_state` saves in a store instead of in folders."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.checkpointing import Saving, load_first_intact
from holdfast.distributed.checkpoint.training import RankRng, TrainingState, find_names, name_optimizer, training_state
from holdfast.errors import Mismatch, NameInUse, NotFound, Unsupported
from holdfast.integrations.frameworks import RequiredLibrary
from holdfast.integrations.marker import Marker, encode_marker, read_marker, write_marker
from holdfast.mirror.retention import keep_unmirrored
from holdfast.repo.upkeep.prune import Keep, apply_prune, read_prune_plan
from holdfast.snapshot.lazy import Snapshot
from holdfast.snapshot.staging import SaveHandle
from holdfast.snapshot.stateful import is_stateful, read_state, unwrap
from holdfast.store import Store

with RequiredLibrary("Accelerate", "accelerate"):
    import accelerate
    from accelerate import Accelerator
    from accelerate.utils import DistributedType


MARKER: Final = "holdfast-snapshot.pt"
"""The file in a checkpoint's folder that names the store and the snapshot; `torch.load` of it loads the snapshot."""
_VERSION: Final = "accelerate"
"""The key in a checkpoint's metadata for the version of Accelerate; other snapshots do not have it."""
_PRIVATE: Final = (
    "_models",
    "_optimizers",
    "_schedulers",
    "_dataloaders",
    "_custom_objects",
    "_save_model_state_pre_hook",
    "_load_model_state_pre_hook",
)
"""Where an Accelerator keeps what `prepare` and its `register_` methods were given; no public name leads there."""


def use_store(
    accelerator: Any, store: Store, prefix: str, *, async_: bool = False, allow_pickle: bool = False
) -> AcceleratorCheckpoints:
    """Make `save_state` and `load_state` of an Accelerator use a store.

    A checkpoint is one snapshot: models, optimizers, schedules, scaler, positions of data loaders, what was given to
    `register_for_checkpointing`, and the RNG state of every rank. The folder of a checkpoint contains a small marker.
    `load_state()` without a path loads the newest complete checkpoint. With a `total_limit`, old checkpoints are
    deleted when the new one is durable. Call this on every rank.

    Args:
        accelerator: an `accelerate.Accelerator`, or an object of a subclass.
        store: where to save.
        prefix: the start of the names; it ends with a slash.
        async_: save in the background. The next save, `load_state` and `end_training` wait for it and raise its error.
        allow_pickle: pickle values of registered objects that the format cannot store, and unpickle them when loading.
    """
    _verify_supported(accelerator)
    if prefix and not prefix.endswith("/"):
        raise ValueError(f"the prefix ends with a slash: {prefix + '/'!r}, not {prefix!r}")
    checkpoints = AcceleratorCheckpoints(accelerator, store, prefix, async_=async_, allow_pickle=allow_pickle)
    kind = type(accelerator)
    # A subclass of the accelerator's own class, so that all other methods stay what they are.
    accelerator.__class__ = type(kind.__name__, (_StoredAccelerator, kind), {})
    accelerator.holdfast = checkpoints
    return checkpoints


def _verify_supported(accelerator: Any) -> None:
    if isinstance(accelerator, _StoredAccelerator):
        raise Unsupported("this accelerator saves to a store already")
    absent = [name for name in _PRIVATE if not hasattr(accelerator, name)]
    if absent:
        raise Unsupported(
            f"this version of Accelerate does not keep its objects in {', '.join(absent)}; install a version that does,"
            " such as 1.15, or save without it: store.save(name, holdfast.training_state(model, optimizer))"
        )
    kind = accelerator.distributed_type
    is_fsdp1 = kind == DistributedType.FSDP and not accelerator.is_fsdp2
    if is_fsdp1 or kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise Unsupported(
            f"{'FSDP1' if is_fsdp1 else kind.value} saves through its own code, which this does not replace;"
            " train with DDP or with FSDP2 (fsdp_version=2)"
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a checkpoint is: in a folder for Accelerate, under a name in the store."""

    folder: str
    name: str
    is_numbered: bool = False
    """Whether Accelerate has chosen the folder, by a number."""
    is_replaced: bool = False
    """Whether the name has an older checkpoint."""


class AcceleratorCheckpoints:
    """The checkpoints of one Accelerator in a store."""

    def __init__(self, accelerator: Any, store: Store, prefix: str, *, async_: bool, allow_pickle: bool) -> None:
        self._accelerator, self._store, self._prefix = accelerator, store, prefix
        self._is_async, self._allow_pickle = async_, allow_pickle
        self._numbered_names = re.compile(re.escape(prefix) + "checkpoint_([0-9]+)")
        self._saving: Saving | None = None

    def wait(self) -> None:
        """Wait for the save in the background and for what it deletes; raise its error, if it had one."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def save(self, output_dir: str | os.PathLike[str] | None) -> Path:
        """Save the state of the accelerator, on every rank; return the folder that stands for the checkpoint."""
        self.wait()
        place = self._choose_place(output_dir)
        os.makedirs(place.folder, exist_ok=True)
        state = make_state(self._accelerator, self._run_save_hooks(place.folder))
        save: Callable[..., object] = self._store.save_async if self._is_async else self._store.save
        result = save(
            place.name,
            state,
            overwrite=not place.is_numbered,
            metadata={_VERSION: accelerate.__version__},
            allow_pickle=self._allow_pickle,
        )
        self._saving = Saving(result if isinstance(result, SaveHandle) else None, lambda: self._finish(place))
        if not self._is_async:
            self.wait()
        self._accelerator.project_configuration.iteration += 1
        return Path(place.folder)

    def _choose_place(self, output_dir: str | os.PathLike[str] | None) -> _Place:
        configuration = self._accelerator.project_configuration
        names = {each.name for each in self._store.snapshots(self._prefix)}
        if not configuration.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError("save_state needs a folder, because automatic_checkpoint_naming is not set")
            name = self._prefix + _clean(output_dir)
            return _Place(os.path.abspath(output_dir), name, is_replaced=name in names)
        name = f"{self._prefix}checkpoint_{configuration.iteration}"
        place = _Place(self._find_numbered_folder(name), name, is_numbered=True)
        is_used = name in names
        if is_used or _is_of_accelerate(place.folder):
            raise NameInUse(
                f"{name if is_used else place.folder!r} exists already; to continue that run, call"
                " accelerator.load_state() first; otherwise pass another prefix to use_store, or the first free number"
                " to ProjectConfiguration(iteration=...)",
                name=name,
            )
        return place

    def _find_numbered_folder(self, name: str) -> str:
        """Return the folder in which Accelerate looks for the checkpoint with a numbered name."""
        last = name.removeprefix(self._prefix)
        return os.path.abspath(os.path.join(self._accelerator.project_dir or "", "checkpoints", last))

    def _run_save_hooks(self, folder: str) -> Sequence[torch.nn.Module]:
        """Call the hooks that the user has registered; return the models that they leave to be saved."""
        models: list[torch.nn.Module] = self._accelerator._models
        hooks = self._accelerator._save_model_state_pre_hook
        if not hooks:
            return models
        # A hook that saves a model itself removes its weights from the list. Accelerate lists none of sharded models.
        is_sharded = self._accelerator.is_fsdp2
        weights = [] if is_sharded else [self._accelerator.get_state_dict(each, unwrap=False) for each in models]
        given = list(weights)
        for hook in hooks.values():
            hook(models, weights, folder)
        if len(weights) == len(given):
            return models
        return [model for model, own in zip(models, given, strict=True) if any(own is each for each in weights)]

    def _finish(self, place: _Place) -> None:
        """Write the marker and delete old checkpoints; called on every rank when a save is durable, acts on one."""
        if not self._accelerator.is_main_process:
            return
        marker = Marker(self._store.url, self._store.repository.identity.store_id, place.name)
        write_marker(os.path.join(place.folder, MARKER), encode_marker(marker))
        limit = self._accelerator.project_configuration.total_limit
        is_limited = limit is not None and place.is_numbered
        if (is_limited and self._delete_oldest(limit)) or place.is_replaced:
            self._store.gc()

    def _delete_oldest(self, limit: int) -> bool:
        """Delete numbered checkpoints beyond the newest `limit`, except tagged ones; return whether there were any."""
        store = self._store.repository.verify_same()
        plan = read_prune_plan(store, self._prefix, Keep(last=max(1, limit)), only=self._numbered_names)
        plan = keep_unmirrored(self._store.repository, plan)
        for snapshot in plan.delete:
            folder = self._find_numbered_folder(snapshot.name)
            # The folder first: if this is interrupted, no folder is left whose snapshot is gone.
            if self._read_name(folder) == snapshot.name:
                shutil.rmtree(folder)
        return bool(apply_prune(store, plan).deleted)

    def _read_newest_first(self) -> list[Snapshot]:
        found = [each for each in self._store.snapshots(self._prefix) if _VERSION in each.metadata]
        # They are listed in the order of their numbers, which stays if two have the same time.
        return sorted(found, key=lambda each: each.time)[::-1]

    def load(self, input_dir: str | os.PathLike[str] | None, *, strict: bool = True) -> None:
        """Load the checkpoint of a folder or of a snapshot's name; without either, the newest that is complete."""
        self.wait()
        self._accelerator.wait_for_everyone()  # until the first rank has deleted old ones: all must see the same
        if input_dir is None:
            found = self._read_newest_first()
            if not found:
                raise ValueError(
                    f"the store has no checkpoint under {self._prefix!r} to load; a folder that Accelerate itself has"
                    " written is loaded by its path"
                )
        else:
            found = [self._find(os.path.expanduser(input_dir))]
        load_first_intact(found, lambda each: self._load_one(each, input_dir, strict=strict))
        self._choose_next_iteration()

    def _find(self, text: str) -> Snapshot:
        """Return the snapshot of a folder, by its marker or, if the folder is elsewhere, by its path; or of a name."""
        known = {each.name: each for each in self._store.snapshots()}
        names = [self._prefix + _clean(text), self._prefix + os.path.basename(_clean(text)), text]
        for name in [self._read_name(text), *names]:
            if name in known:
                return known[name]
        raise NotFound(
            f"{text!r} is neither a folder of a checkpoint in the store {self._store.url} nor the name of one; its"
            f" checkpoints are {', '.join(each.name for each in self._read_newest_first()[:3]) or 'none'}",
            name=text,
        )

    def _read_name(self, folder: str) -> str | None:
        """Return the name of the snapshot that the marker in a folder names; None if that is not in this store."""
        marker = read_marker(os.path.join(folder, MARKER))
        is_here = marker is not None and marker.store_id == self._store.repository.identity.store_id
        return marker.name if marker and is_here else None

    def _load_one(self, snapshot: Snapshot, input_dir: str | os.PathLike[str] | None, *, strict: bool) -> None:
        is_numbered = self._numbered_names.fullmatch(snapshot.name)
        folder = input_dir or (self._find_numbered_folder(snapshot.name) if is_numbered else "")
        state = make_state(self._accelerator, self._run_load_hooks(str(folder)))
        self._store.load_into(snapshot, state, strict=strict, allow_pickle=self._allow_pickle)
        self._accelerator.step = state.step

    def _run_load_hooks(self, folder: str) -> Sequence[torch.nn.Module]:
        """Call the hooks that the user has registered; return the models that they leave to be loaded."""
        is_sharded = self._accelerator.is_fsdp2
        models = [] if is_sharded else list(self._accelerator._models)
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(models, folder)
        return self._accelerator._models if is_sharded else models

    def _choose_next_iteration(self) -> None:
        """Continue the numbers after the highest one, also if an older checkpoint was loaded."""
        configuration = self._accelerator.project_configuration
        if configuration.automatic_checkpoint_naming:
            numbers = [self._numbered_names.fullmatch(each.name) for each in self._store.snapshots(self._prefix)]
            configuration.iteration = max((int(each[1]) + 1 for each in numbers if each), default=0)


class _StoredAccelerator(Accelerator):  # type: ignore[misc]  # its types are not known to mypy: pyproject.toml
    """Replaces the methods of an Accelerator that read and write checkpoint folders."""

    holdfast: AcceleratorCheckpoints

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Path:
        return self.holdfast.save(output_dir)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        if input_dir is not None and _is_of_accelerate(os.path.expanduser(input_dir)):
            self.holdfast.wait()
            super().load_state(input_dir, load_kwargs, **options)
            return
        unknown = options.keys() - {"strict", "map_location"}
        if unknown:
            raise Unsupported(f"load_state from a store has no option {', '.join(sorted(unknown))}; leave it out")
        self.holdfast.load(input_dir, strict=options.get("strict", True))

    def end_training(self) -> None:
        self.holdfast.wait()
        super().end_training()


def _is_of_accelerate(folder: str) -> bool:
    """Return whether a folder contains a checkpoint that Accelerate itself has written."""
    return any(Path(folder).glob("random_states_*.pkl")) and not Path(folder, MARKER).exists()


def _clean(path: str | os.PathLike[str]) -> str:
    """Return a path as the end of a name: as it was typed, without what does not belong into a name."""
    text = os.path.normpath(path)
    return (os.path.abspath(text) if text.split(os.sep)[0] in (".", "..") else text).strip(os.sep)


with RequiredLibrary("Accelerate", "accelerate"):
    from accelerate.data_loader import SeedableRandomSampler


def make_state(accelerator: Any, models: Sequence[torch.nn.Module]) -> TrainingState:
    """Return the state of an accelerator for `save` and `load_into`, with the weights of `models` only.

    Parts are called as Accelerate calls its files: "model", "model_1", "optimizer", "optimizer_1" ...
    """
    parts: dict[str, Any] = {}
    names: dict[torch.Tensor, str] = {}
    for number, model in enumerate(accelerator._models):
        part = _number("model", number)
        if any(model is each for each in models):
            parts[part] = training_state(model, rng=False)["model"]
        is_only = len(accelerator._models) == 1
        names |= {tensor: name if is_only else f"{part}.{name}" for tensor, name in find_names(model).items()}
    for number, optimizer in enumerate(accelerator._optimizers):
        parts[_number("optimizer", number)] = _name(optimizer, names)
    for number, schedule in enumerate(accelerator._schedulers):
        parts[_number("scheduler", number)] = schedule
    for number, loader in enumerate(accelerator._dataloaders):
        parts[_number("dataloader", number)] = LoaderState(loader)
    if accelerator.scaler is not None:
        parts["scaler"] = accelerator.scaler
    parts["custom"] = list(accelerator._custom_objects)
    # The RNG state last: loading other parts may draw random numbers.
    return TrainingState({**parts, "step": accelerator.step, "rng": RankRng()})


def _number(part: str, number: int) -> str:
    return f"{part}_{number}" if number else part


def _name(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Any:
    """Return an optimizer whose state is saved by parameter name; as it is, if it has parameters of its own."""
    groups = unwrap(optimizer).param_groups
    has_names = all(parameter in names for group in groups for parameter in group["params"])
    return name_optimizer(optimizer, names) if has_names else optimizer


class LoaderState:
    """The position of a data loader that Accelerate has prepared.

    A loader always has its epoch, the seed of its order, and the state of its generator. Whether it has a position in
    the epoch depends on the loader: torchdata's has one, and so has a batch sampler with `state_dict`.
    """

    def __init__(self, loader: Any) -> None:
        """Read and restore the position of `loader`."""
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return the position; what the loader does not have is None."""
        position, order, generator = self._find_position(), self._find_order(), self._find_generator()
        return {
            "epoch": self._loader.iteration,
            "position": None if position is None else read_state(position),
            "order": None if order is None else {"seed": order.initial_seed, "epoch": order.epoch},
            "generator": None if generator is None else generator.get_state().numpy().tobytes(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Restore the position; raise Mismatch, and change nothing, if the loader is of another kind."""
        position, order, generator = self._find_position(), self._find_order(), self._find_generator()
        found = {"position": position, "order": order, "generator": generator}
        differing = [part for part, value in found.items() if (state_dict[part] is None) != (value is None)]
        if differing:
            raise Mismatch(
                f"the saved data loader and this one are of different kinds: only one has: {', '.join(differing)};"
                " create this one as the saved one was created"
            )
        self._loader.iteration = state_dict["epoch"]
        if position is not None:
            position.load_state_dict(state_dict["position"])
        if order is not None:
            order.initial_seed, order.epoch = state_dict["order"]["seed"], state_dict["order"]["epoch"]
        if generator is not None:
            generator.set_state(torch.frombuffer(bytearray(state_dict["generator"]), dtype=torch.uint8))

    def _find_position(self) -> Any:
        """Return the object that stores the position in the epoch: the loader or one of its samplers."""
        if self._loader.use_stateful_dataloader:
            return self._loader
        outer = self._loader.batch_sampler
        # Accelerate wraps a batch sampler to give each rank its share.
        samplers = (outer, getattr(outer, "batch_sampler", None), self._loader.sampler)
        return next((each for each in samplers if is_stateful(each)), None)

    def _find_order(self) -> Any:
        sampler = self._loader.get_sampler()
        return sampler if isinstance(sampler, SeedableRandomSampler) else None

    def _find_generator(self) -> torch.Generator | None:
        """Return the generator that the order is drawn from; None if each epoch sets its seed."""
        if self._find_order() is not None:
            return None
        found = getattr(self._loader.get_sampler(), "generator", None)
        return found if isinstance(found, torch.Generator) else None
