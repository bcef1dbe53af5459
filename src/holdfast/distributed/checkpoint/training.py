"""All that a run needs to go on, as one thing to save and load: model, optimizer, schedule, place in the data, luck."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from holdfast.digest import hash_bytes
from holdfast.errors import Mismatch, Unsupported
from holdfast.snapshot.into.named import NamedModule, NamedOptimizer
from holdfast.snapshot.resume import RngState
from holdfast.snapshot.stateful import find_wrapping, is_stateful, unwrap_metadata
from holdfast.tensors.sharding.sharded import PerRank, per_rank

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What those who wrap a module call it: torch.compile, activation checkpointing, FSDP1."""
_BATCH = "a DataLoader has no state of its own; give it a batch_sampler that has, such as holdfast.ResumableSampler"


class TrainingState:
    """A run's state, to be given to `save` and `load_into`; names do not depend on wrappers, values not on ranks."""

    def __init__(self, parts: dict[str, Any]) -> None:
        """Take the parts as they are: objects that keep a state, and plain values."""
        self._parts = parts

    @property
    def step(self) -> Any:
        """What was given as `step`, or has been loaded."""
        return self._parts.get("step")

    def __getitem__(self, name: str) -> Any:
        """Return a part, or the value that has been loaded in its place."""
        return self._parts[name]

    def __holdfast_parts__(self) -> dict[str, Any]:
        """Return the parts."""
        return self._parts

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts; tensors are those of the run, not copies."""
        return {name: _read(part) for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Take over what `state_dict` has returned; raises Mismatch if the parts are others."""
        if state_dict.keys() != self._parts.keys():
            raise Mismatch(f"parts {sorted(self._parts)} in the target, {sorted(state_dict)} in the state")
        for name, value in state_dict.items():
            self._parts[name] = _write(self._parts[name], value)


def training_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scheduler: Any = None,
    dataloader: Any = None,
    *,
    rng: bool = True,
    step: Any = None,
    **more: Any,
) -> TrainingState:
    """Return the state of a run, for `store.save(name, ...)` and `store.load_into(name, ...)`.

    A plain, DDP or FSDP2 model saves the same names, so each can be loaded into the other, on any number of ranks.
    The optimizer's state goes by the names of parameters; one that has not stepped yet is not made to.

    Args:
        model: the module that is trained.
        optimizer: one, or several, of its parameters.
        scheduler: anything with `state_dict` and `load_state_dict`, or a list or dict of such.
        dataloader: as well, or a DataLoader whose sampler has these methods.
        rng: keep the random generators of every rank; another number of ranks goes on with other ones.
        step: any plain value; after loading, `.step` is what was saved.
        more: whatever else there is: stateful objects, tensors, plain values.
    """
    parts: dict[str, Any] = {"model": _name_module(model)}
    if optimizer is not None:
        names = find_names(model)
        if isinstance(optimizer, torch.optim.Optimizer):
            parts["optimizer"] = name_optimizer(optimizer, names)
        else:
            parts["optimizer"] = [name_optimizer(each, names) for each in optimizer]
    if scheduler is not None:
        parts["scheduler"] = scheduler
    if dataloader is not None:
        parts["dataloader"] = find_sampler(dataloader)
    if rng:
        parts["rng"] = RankRng()
    return TrainingState({**parts, "step": step, **more})


def find_names(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of each parameter without what wrappers add to it: those of torch's `get_state_dict`."""
    return {parameter: _strip(model, name) for name, parameter in model.named_parameters()}


def _strip(model: torch.nn.Module, name: str) -> str:
    *path, last = name.split(".")
    kept = []
    current = model
    for part in path:
        is_wrapped = part in _WRAPPERS or (part == "module" and isinstance(current, DistributedDataParallel))
        kept += [] if is_wrapped else [part]
        current = getattr(current, part)
    return ".".join([*kept, last])


def name_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> NamedOptimizer:
    """Return an optimizer with the names of its parameters; raises Unsupported for one that the model does not have."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise Unsupported(
                    f"parameter {position} of group {number}, of shape {tuple(parameter.shape)}, is not one of the"
                    " model's: make the optimizer after the model is wrapped or sharded, from that model's parameters"
                )
            found.append(names[parameter])
    return NamedOptimizer(optimizer, found)


def _name_module(model: torch.nn.Module) -> NamedModule:
    def write(state: dict[str, Any], strict: bool) -> None:
        set_model_state_dict(model, state, options=StateDictOptions(strict=strict))

    def read() -> dict[str, Any]:
        state = get_model_state_dict(model)
        unwrap_metadata(state, find_wrapping(model))
        return state

    return NamedModule(model, read, write)


def find_sampler(dataloader: Any) -> Any:
    """Return what knows the place in the data: the loader itself or, of a plain one, its sampler."""
    if is_stateful(dataloader) or not isinstance(dataloader, torch.utils.data.DataLoader):
        return dataloader
    for sampler in (dataloader.batch_sampler, dataloader.sampler):
        if is_stateful(sampler):
            return sampler
    raise Unsupported(_BATCH)


class RankRng:
    """The random generators of this rank; those of a run with another number of ranks are made from rank 0's."""

    def state_dict(self) -> dict[str, Any]:
        """Return where they stand, as bytes: numbers would have the ranks disagree about the tree."""
        rank, world_size = _find_place()
        state = {"rank": rank, "world_size": world_size, "generators": RngState().state_dict()}
        return {"state": per_rank(json.dumps(state, default=_encode, sort_keys=True).encode())}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Put them where they stood."""
        data: Any = state_dict["state"]
        data = data.value if isinstance(data, PerRank) else data
        try:
            state = json.loads(data, object_hook=_decode)
            saved = (state["rank"], state["world_size"])
            generators = state["generators"]
        except (KeyError, TypeError, ValueError) as error:
            raise Mismatch(f"this is no state of a rank's random generators: {error!r}") from error
        RngState().load_state_dict(generators)
        rank, world_size = _find_place()
        if saved[1] != world_size and rank != saved[0]:
            # Ranks that draw the same numbers would drop out the same units.
            _seed(hash_bytes(data + f"/{rank}/{world_size}".encode()))


def _find_place() -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _seed(digest: bytes) -> None:
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, np.uint32))
    torch.manual_seed(int.from_bytes(digest[:8]) >> 1)


def _encode(value: bytes) -> dict[str, str]:
    return {"hex": value.hex()}


def _decode(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["hex"]) if value.keys() == {"hex"} else value


def _read(part: Any) -> Any:
    """Return the state of a part, or of the parts in it."""
    if isinstance(part, dict):
        return {key: _read(item) for key, item in part.items()}
    if isinstance(part, list):
        return [_read(item) for item in part]
    return part.state_dict() if is_stateful(part) else part


def _write(part: Any, value: Any) -> Any:
    """Give a part its state; return what stands in its place from now on."""
    if isinstance(part, dict) and part.keys() == value.keys():
        return {key: _write(item, value[key]) for key, item in part.items()}
    if isinstance(part, list) and len(part) == len(value):
        return [_write(item, each) for item, each in zip(part, value, strict=True)]
    if not is_stateful(part):
        return value
    part.load_state_dict(value)
    return part
