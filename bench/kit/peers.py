"""The contestants: other formats and Holdfast, each with a durable save, a load, a load in place, and partial reads."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module, util
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.utils._content_store import ContentStoreReader, ContentStoreWriter

import holdfast
from bench.kit.states import State, copy_state, make_empty
from holdfast.repo.read.reader import Verify

FILE: Final = "state"
SNAPSHOT: Final = "run/step-0"
_DCP_THREADS: Final = (1, 4)
# DCP warns that it saves in a single process, which is intended.
_ONE_PROCESS: Final = "torch.distributed is disabled"


@dataclass(frozen=True, slots=True)
class Peer:
    """One contestant: how it saves a state durably in an empty folder, and how it reads it."""

    name: str
    save: Callable[[Path, State], object]
    load: Callable[[Path, State], State]
    """Load into new memory; the second argument has the shapes and dtypes of the state."""
    fill: Callable[[Path, State], object]
    """Load in place."""
    read_one: Callable[[Path, str, torch.Tensor], torch.Tensor]
    """Load one tensor, which has the shape and dtype of the last argument."""
    list_names: Callable[[Path], list[str]]
    read_rows: Callable[[Path, str, slice], torch.Tensor] | None = None
    open_mapped: Callable[[Path], State] | None = None
    """Open the whole state as views of the file, without reading it."""


def sync_folder(folder: Path) -> None:
    """Make every file below a folder and its name durable, for formats that do not do this themselves."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_filesystem(folder: Path) -> None:
    """Make everything written to a filesystem durable: cheaper than one fsync for each of many files."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        if libc.syncfs(handle):
            raise OSError(ctypes.get_errno(), "syncfs failed", str(folder))
    finally:
        os.close(handle)


def _copy_all(source: State, target: State) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])


def _save_torch(folder: Path, state: State) -> None:
    torch.save(dict(state), folder / FILE)
    sync_folder(folder)


def _map_torch(folder: Path) -> State:
    found: State = torch.load(folder / FILE, mmap=True)
    return found


TORCH: Final = Peer(
    "torch.save",
    _save_torch,
    lambda folder, like: torch.load(folder / FILE),
    lambda folder, state: _copy_all(_map_torch(folder), state),
    lambda folder, name, like: _map_torch(folder)[name].clone(),
    lambda folder: list(_map_torch(folder)),
    lambda folder, name, rows: _map_torch(folder)[name][rows].clone(),
    _map_torch,
)


def _call_safetensors(name: str) -> Any:
    # Not an import statement: the package may be missing, to us and to mypy.
    return import_module("safetensors.torch").__dict__[name]


def _open_safetensors(folder: Path) -> Any:
    return _call_safetensors("safe_open")(folder / FILE, framework="pt")


def _map_safetensors(folder: Path) -> State:
    found: State = _call_safetensors("load_file")(folder / FILE)
    return found


def _save_safetensors(folder: Path, state: State) -> None:
    _call_safetensors("save_file")(dict(state), folder / FILE)
    sync_folder(folder)


def _fill_safetensors(folder: Path, state: State) -> None:
    with _open_safetensors(folder) as file:
        for name, tensor in state.items():
            tensor.copy_(file.get_tensor(name))


def _read_safetensors(folder: Path, name: str, rows: slice | None) -> torch.Tensor:
    with _open_safetensors(folder) as file:
        found: torch.Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        return found.clone()


def _list_safetensors(folder: Path) -> list[str]:
    with _open_safetensors(folder) as file:
        return list(file.keys())


SAFETENSORS: Final = Peer(
    "safetensors",
    _save_safetensors,
    # It loads views of the file, which are read when touched; the other formats return copies, so this copies too.
    lambda folder, like: copy_state(_map_safetensors(folder)),
    _fill_safetensors,
    lambda folder, name, like: _read_safetensors(folder, name, None),
    _list_safetensors,
    _read_safetensors,
    _map_safetensors,
)


def _save_dcp(folder: Path, state: State, *, threads: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ONE_PROCESS)
        state_dict_saver.save(dict(state), storage_writer=FileSystemWriter(folder, thread_count=threads), no_dist=True)
    sync_folder(folder)


def _fill_dcp(folder: Path, state: State) -> State:
    target = dict(state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ONE_PROCESS)
        state_dict_loader.load(target, storage_reader=FileSystemReader(folder), no_dist=True)
    return target


def _make_dcp(threads: int) -> Peer:
    return Peer(
        "DCP" if threads == 1 else f"DCP, {threads} threads",
        partial(_save_dcp, threads=threads),
        lambda folder, like: _fill_dcp(folder, make_empty(like)),
        _fill_dcp,
        lambda folder, name, like: _fill_dcp(folder, {name: torch.empty_like(like)})[name],
        lambda folder: list(FileSystemReader(folder).read_metadata().state_dict_metadata),
    )


DCP: Final = tuple(_make_dcp(threads) for threads in _DCP_THREADS)


def save_content_store(folder: Path, state: State) -> None:
    """Save with PyTorch's content store and SHA-1, its hash that is stable across processes."""
    writer = ContentStoreWriter(str(folder), stable_hash=True)
    for name, tensor in state.items():
        writer.write_tensor(name, tensor)
    sync_filesystem(folder)


def _load_content_store(folder: Path, like: State) -> State:
    reader = ContentStoreReader(str(folder))
    return {name: reader.read_tensor(name) for name in like}


CONTENT_STORE: Final = Peer(
    "content store",
    save_content_store,
    _load_content_store,
    lambda folder, state: _copy_all(_load_content_store(folder, state), state),
    lambda folder, name, like: ContentStoreReader(str(folder)).read_tensor(name),
    lambda folder: sorted(path.name for path in (folder / "tensors").iterdir()),
)


def _map_holdfast(folder: Path) -> State:
    found: State = holdfast.open(folder).load(SNAPSHOT, mmap=True)
    return found


def make_holdfast(verify: Verify = "full") -> Peer:
    """Return Holdfast, which opens the store again for every operation."""
    return Peer(
        "Holdfast" if verify == "full" else f"Holdfast, verify={verify!r}",
        lambda folder, state: holdfast.open(folder).save(SNAPSHOT, dict(state)),
        lambda folder, like: holdfast.open(folder).load(SNAPSHOT, verify=verify),
        lambda folder, state: holdfast.open(folder).load_into(SNAPSHOT, dict(state), verify=verify),
        lambda folder, name, like: holdfast.open(folder).snapshot(SNAPSHOT)[name].read(),
        lambda folder: holdfast.open(folder).snapshot(SNAPSHOT).keys(),
        lambda folder, name, rows: holdfast.open(folder).snapshot(SNAPSHOT)[name][rows],
        _map_holdfast,
    )


HOLDFAST: Final = make_holdfast()
HOLDFAST_FAST: Final = make_holdfast("fast")


def find_peers() -> list[Peer]:
    """Return the other formats that are installed."""
    return [TORCH, *([SAFETENSORS] if util.find_spec("safetensors") else []), *DCP, CONTENT_STORE]
