"""State dicts that ranks save with torch.distributed.checkpoint in tests, and the functions that rank processes run."""

from __future__ import annotations

import io
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable
from signal import SIGKILL
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast.dcp import StorageReader, StorageWriter
from tests.kit.dcp_calls import IN_PROCESS

dcp: Any = torch.distributed.checkpoint
"""Its functions are not declared as exported."""


SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (7, 300),
    "columns": (5, 700),
    "same": (40, 30),
    "one": (1, 6),
    "long": (1000,),
    "scalar": (),
}


def make_global(name: str, step: int) -> torch.Tensor:
    """Return a tensor that all ranks know."""
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(step))


PLACEMENTS: dict[str, Any] = {
    "rows": Shard(0),
    "columns": Shard(1),
    "same": Replicate(),
    "one": Shard(0),
    "long": Shard(0),
    "scalar": Replicate(),
}


def make_state(step: int) -> dict[str, Any]:
    """Return a state of which this rank holds a part."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shared = {name: distribute_tensor(make_global(name, step), mesh, [kind]) for name, kind in PLACEMENTS.items()}
    return {"model": shared, "plain": make_global("same", step + 1), "step": step, "note": {"text": "x" * step}}


GRID: list[list[Any]] = [
    [Shard(0), Shard(1)],
    [Replicate(), Shard(0)],
    [Shard(0), Shard(0)],
    [Shard(1), Replicate()],
    [Replicate(), Replicate()],
]


def make_grid(step: int) -> dict[str, Any]:
    """Return tensors that lie in different ways on a mesh of two dims."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    whole = make_global("rows", step)
    return {str(number): distribute_tensor(whole, mesh, kinds) for number, kinds in enumerate(GRID)}


def save_grid(rank: int, path: str) -> None:
    dcp.save(make_grid(1), storage_writer=StorageWriter(path, "grid"))


def load_grid(rank: int, path: str) -> list[str]:
    state, wanted = make_grid(99), make_grid(1)
    dcp.load(state, storage_reader=StorageReader(path, "grid"))
    return [name for name, tensor in state.items() if not torch.equal(tensor.to_local(), wanted[name].to_local())]


def find_faults(state: dict[str, Any], step: int) -> list[str]:
    """Return what of a state is not as it was saved."""
    wanted = {name: make_global(name, step) for name in PLACEMENTS}
    faults = [name for name, tensor in state["model"].items() if not torch.equal(full(tensor), wanted[name])]
    if not torch.equal(state["plain"], make_global("same", step + 1)):
        faults.append("plain")
    return faults + [key for key in ("step",) if state[key] != step]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save(rank: int, path: str, name: str, step: int, **options: Any) -> None:
    dcp.save(make_state(step), storage_writer=StorageWriter(path, name, **options))


def load(rank: int, path: str, name: str, step: int) -> list[str]:
    state = make_state(99)
    dcp.load(state, storage_reader=StorageReader(path, name))
    return find_faults(state, step)


def save_with_cached_plans(rank: int, path: str) -> None:
    for step in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(make_state(step), storage_writer=StorageWriter(path, f"step-{step}"), planner=planner)


def save_alone(rank: int, path: str, name: str) -> list[str]:
    """Save and load without collectives; without them nothing but a barrier connects the ranks."""
    dcp.save(make_state(3), storage_writer=StorageWriter(path, name), use_collectives=False)
    state = make_state(99)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=StorageReader(path, name))
    faults = []
    for key, kind in PLACEMENTS.items():
        wanted = distribute_tensor(make_global(key, 3), state["model"][key].device_mesh, [kind])
        if not torch.equal(wanted.to_local(), state["model"][key].to_local()):
            faults.append(key)
    return faults


class Unpicklable(Exception):
    """Cannot be sent to another rank."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")
        self.lock = threading.Lock()


class _Failing(DefaultSavePlanner):
    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self._act()
        return super().resolve_data(write_item)


def _raise_oddly() -> None:
    raise Unpicklable("it is", "wrong")


def fail_and_save_again(rank: int, path: str) -> dict[str, Any]:
    """Overwrite a checkpoint while rank 1 fails, then save another."""
    writer = StorageWriter(path, "a", overwrite=True)
    planner = _Failing(_raise_oddly) if rank == 1 else DefaultSavePlanner()
    began = time.monotonic()
    outcome: dict[str, Any] = {}
    try:
        dcp.save(make_state(2), storage_writer=writer, planner=planner)
    except CheckpointException as error:
        outcome |= {"ranks": sorted(error.failures), "text": str(error)}
    outcome["seconds"] = time.monotonic() - began
    dcp.save(make_state(3), storage_writer=writer, checkpoint_id="b")
    return outcome


def die_while_saving(rank: int, path: str) -> str:
    """Overwrite a checkpoint while rank 1 is killed."""
    planner = _Failing(lambda: os.kill(os.getpid(), SIGKILL)) if rank == 1 else DefaultSavePlanner()
    try:
        dcp.save(make_state(2), storage_writer=StorageWriter(path, "a", overwrite=True), planner=planner)
    except (RuntimeError, CheckpointException) as error:
        return type(error).__name__
    return "saved"


def save_to_own_path(rank: int, path: str) -> str:
    try:
        save(rank, f"{path}-{rank}", "a", 1)
    except CheckpointException as error:
        return str(error)
    return "saved"


def save_in_thread(rank: int, path: str) -> list[str]:
    state = make_state(4)
    future: Any = dcp.async_save(state, storage_writer=StorageWriter(path), checkpoint_id="a")
    with torch.no_grad():
        for tensor in state["model"].values():
            tensor.mul_(0)
    future.result()
    return load(rank, path, "a", 4) + _find_shared(make_state(5))


def _find_shared(state: dict[str, Any]) -> list[str]:
    """Return the tensors that are not copied when a state is staged."""
    staged = StorageWriter("").stage(state)
    memory = {tensor.to_local().data_ptr() for tensor in state["model"].values() if tensor.to_local().numel()}
    return [name for name, tensor in staged["model"].items() if tensor.to_local().data_ptr() in memory]


def save_in_process(rank: int, path: str) -> list[str]:
    # Ranks of tests are daemons, which may have no children; those of launchers are not.
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # no way else
    for step in (5, 6):
        state = make_state(step)
        writer = StorageWriter(path, f"step-{step}")
        future: Any = dcp.async_save(state, storage_writer=writer, **IN_PROCESS)
        state["plain"].mul_(0)
        future.result()
    return load(rank, path, "step-5", 5) + load(rank, path, "step-6", 6)


def make_training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def train_and_save(rank: int, path: str) -> list[float]:
    model, optimizer = make_training()
    train(model, optimizer, range(3))
    states = get_state_dict(model, optimizer)
    for writer in (StorageWriter(path, "trained"), dcp.FileSystemWriter(f"{path}/files")):
        dcp.save({"model": states[0], "optim": states[1]}, storage_writer=writer)
    return train(model, optimizer, range(3, 6))


def load_and_train(rank: int, path: str, has_files: bool) -> list[float]:
    """Train on from the store, or from torch's own files."""
    reader = dcp.FileSystemReader(f"{path}/files") if has_files else StorageReader(path, "trained")
    model, optimizer = make_training()
    states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": states[0], "optim": states[1]}
    dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return train(model, optimizer, range(3, 6))
