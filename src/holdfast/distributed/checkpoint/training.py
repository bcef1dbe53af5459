"""The complete state of a training run as one object: model, optimizer, schedule, data position and RNG state."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from holdfast.digest import hash_bytes
from holdfast.errors import Mismatch, Unsupported
from holdfast.snapshot.into.match import NamedModule, NamedOptimizer
from holdfast.snapshot.resume import RngState
from holdfast.snapshot.stateful import (
    NO_POSITION,
    AnyOptimizer,
    Optimizers,
    find_wrapping,
    is_optimizer,
    is_stateful,
    list_optimizers,
    read_state,
    unwrap,
    unwrap_metadata,
)
from holdfast.tensors.sharding import PerRank, per_rank

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attribute names under which wrappers keep the module: torch.compile, activation checkpointing, FSDP1."""


class TrainingState:
    """The state of a run, for `save` and `load_into`. Names do not depend on wrappers, nor values on the rank count."""

    def __init__(self, parts: dict[str, Any]) -> None:
        """Use `parts`, by name: objects with state_dict and load_state_dict, and plain values."""
        self._parts = parts

    def __repr__(self) -> str:
        """Show the names of the parts, and the step."""
        step = "" if self.step is None else f", step {self.step!r}"
        return f"<TrainingState of {', '.join(name for name in self._parts if name != 'step')}{step}>"

    @property
    def step(self) -> Any:
        """The value that was passed as `step`; after a load, the loaded value."""
        return self._parts.get("step")

    def __getitem__(self, name: str) -> Any:
        """Return a part; after a load, a plain value is the loaded one."""
        return self._parts[name]

    def __holdfast_parts__(self) -> dict[str, Any]:
        """Return the parts."""
        return self._parts

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts; tensors are those of the run, not copies."""
        return {name: _read(part) for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Load a state that `state_dict` returned; raise Mismatch if it has other parts."""
        if state_dict.keys() != self._parts.keys():
            raise Mismatch(f"the target has the parts {sorted(self._parts)}, the state has {sorted(state_dict)}")
        for name, value in state_dict.items():
            self._parts[name] = _write(self._parts[name], value)


def training_state(
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    dataloader: Any = None,
    *,
    rng: bool = True,
    step: Any = None,
    **more: Any,
) -> TrainingState:
    """Return the state of a run, for `store.save(name, ...)` and `store.load_into(name, ...)`.

    A plain, DDP or FSDP2 model saves the same names, so each can be loaded into the other, on any number of ranks.
    The optimizer's state is saved by parameter name. An optimizer that has not stepped yet stays without state.

    Args:
        model: the module that is trained.
        optimizer: one optimizer of the model's parameters, or several. One that a framework has wrapped is saved by the
            wrapper's `state_dict` and named by the parameters of its `.optimizer`.
        scheduler: an object with `state_dict` and `load_state_dict`, or a list or dict of such objects.
        dataloader: an object with these methods, or a DataLoader whose sampler has them; it may be wrapped.
        rng: save the RNG state of every rank. On another number of ranks, rank 0's is restored, the others are seeded.
        step: any plain value; after loading, `.step` is the saved value.
        more: further parts: objects with these methods, tensors, plain values.
    """
    model = unwrap_module(model)
    parts: dict[str, Any] = {"model": _name_module(model)}
    if optimizer is not None:
        names = find_names(model)
        named = [name_optimizer(each, names) for each in list_optimizers(optimizer)]
        parts["optimizer"] = named[0] if is_optimizer(optimizer) else named
    if scheduler is not None:
        parts["scheduler"] = scheduler
    if dataloader is not None:
        parts["dataloader"] = find_sampler(dataloader)
    if rng:
        parts["rng"] = RankRng()
    return TrainingState({**parts, "step": step, **more})


def unwrap_module(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside wrappers that save it under its own names, such as that of Lightning's Fabric.

    Torch's functions for state dicts know DDP, FSDP and compiled modules, and no others.
    """
    while True:
        inner = getattr(model, "module", None)
        has_own_method = type(model).state_dict is not torch.nn.Module.state_dict
        if isinstance(model, torch.nn.DataParallel):
            model = model.module
        elif has_own_method and isinstance(inner, torch.nn.Module) and _saves_as(model, inner):
            model = inner
        else:
            return model


def _saves_as(model: torch.nn.Module, inner: torch.nn.Module) -> bool:
    return model.state_dict().keys() == inner.state_dict().keys()


def find_names(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of each parameter without prefixes of wrappers, as torch's `get_state_dict` names it."""
    for module in model.modules():
        # After a forward pass without a backward pass, a sharded module may have whole parameters in their place.
        if isinstance(module, FSDPModule):
            module.reshard()
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


def name_optimizer(optimizer: AnyOptimizer, names: Mapping[torch.Tensor, str]) -> NamedOptimizer:
    """Return an optimizer with the names of its parameters; raise Unsupported if one is not in `names`."""
    found = []
    for number, group in enumerate(unwrap(optimizer).param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise Unsupported(
                    f"parameter {position} of group {number}, of shape {tuple(parameter.shape)}, is not one of the"
                    " model's: create the optimizer from the parameters of the wrapped or sharded model"
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
    """Return the object that stores the data position: the loader itself or, if it has none, its sampler."""
    # Lightning's Fabric forwards no methods of the loader inside, which only this private name leads to.
    for loader in (dataloader, getattr(dataloader, "_dataloader", None)):
        if _has_position(loader):
            return loader
    samplers = [getattr(dataloader, name, None) for name in ("batch_sampler", "sampler")]
    for sampler in samplers:
        if is_stateful(sampler):
            return sampler
    is_loader = isinstance(dataloader, torch.utils.data.DataLoader) or any(each is not None for each in samplers)
    if is_loader:
        raise Unsupported(NO_POSITION)
    return dataloader


def _has_position(dataloader: Any) -> bool:
    """Return whether a loader has a state; a wrapper may have the methods although the loader inside has none."""
    if not is_stateful(dataloader):
        return False
    try:
        read_state(dataloader)
    except Unsupported:
        return False
    return True


class RankRng:
    """The RNG state of this rank. On another number of ranks, rank 0's is restored; the others are seeded from it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the RNG state as bytes: as numbers, it would make the trees of the ranks differ."""
        rank, world_size = _find_rank()
        state = {"rank": rank, "world_size": world_size, "generators": RngState().state_dict()}
        return {"state": per_rank(json.dumps(state, default=_encode, sort_keys=True).encode())}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Restore the RNG state, or seed the generators from it if the number of ranks has changed."""
        data: Any = state_dict["state"]
        data = data.value if isinstance(data, PerRank) else data
        try:
            state = json.loads(data, object_hook=_decode)
            saved = (state["rank"], state["world_size"])
            generators = state["generators"]
        except (KeyError, TypeError, ValueError) as error:
            raise Mismatch(f"not the RNG state of a rank: {error!r}") from error
        RngState().load_state_dict(generators)
        rank, world_size = _find_rank()
        if saved[1] != world_size and rank != saved[0]:
            # With equal seeds, all ranks would draw the same dropout masks.
            _seed(hash_bytes(data + f"/{rank}/{world_size}".encode()))


def _find_rank() -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _seed(digest: bytes) -> None:
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, np.uint32))
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _encode(value: bytes) -> dict[str, str]:
    return {"hex": value.hex()}


def _decode(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["hex"]) if value.keys() == {"hex"} else value


def _read(part: Any) -> Any:
    """Return the state of a part, or of the parts that it contains."""
    if isinstance(part, dict):
        return {key: _read(item) for key, item in part.items()}
    if isinstance(part, list):
        return [_read(item) for item in part]
    return read_state(part) if is_stateful(part) else part


def _write(part: Any, value: Any) -> Any:
    """Load a state into a part; return the part, or the value that replaces it."""
    if isinstance(part, dict) and part.keys() == value.keys():
        return {key: _write(item, value[key]) for key, item in part.items()}
    if isinstance(part, list) and len(part) == len(value):
        return [_write(item, each) for item, each in zip(part, value, strict=True)]
    if not is_stateful(part):
        return value
    part.load_state_dict(value)
    return part
