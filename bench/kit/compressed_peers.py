"""Other ways to save a compressed state: torch.save and safetensors with zstd, DCP with its extension, ZipNN."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module, util
from pathlib import Path
from typing import Any, Final

import torch
import zstandard
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from bench.kit.measure import WrongResult

State = dict[str, torch.Tensor]

_PEERS: Final = Path(sys.prefix, "codec-peers")
"""Where `make bench` installs ZipNN."""
_ZIPNN_NAMES: Final = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True, slots=True)
class Format:
    """A way to save a state durably below a path, which does not exist before, and to load it again."""

    save: Callable[[State, Path], object]
    load: Callable[[Path], State]
    save_base: Callable[[State, Path], object] | None = None
    """Saves the state before, if the format stores a difference from it; then the path does exist."""


def count_state(state: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def verify_state(expected: State, loaded: object) -> None:
    """Raise WrongResult unless `loaded` has the same bytes."""
    if not isinstance(loaded, dict) or not all(
        torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in expected.items()
    ):
        raise WrongResult("a state was not loaded as it was saved")


def make_zstd_peers(like: State) -> dict[str, Format]:
    """Return the formats that compress with zstd at level 1, by name; `like` has the names and shapes to load."""
    return {
        "torch.save + zstd": Format(_save_torch, _load_torch),
        "safetensors + zstd": Format(_save_safetensors, _load_safetensors),
        "DCP + zstd": Format(_save_dcp, partial(_load_dcp, like)),
    }


def make_zipnn_peers(like: State) -> dict[str, Format]:
    """Return ZipNN on a file of safetensors, alone and with the difference from the state before.

    Returns nothing if it is not installed: it has no wheels, so that installing it takes a C compiler.
    """
    if _PEERS.exists() and str(_PEERS) not in sys.path:
        sys.path.append(str(_PEERS))
    if util.find_spec("zipnn") is None:
        return {}
    settings = {"input_format": "byte", "bytearray_dtype": _ZIPNN_NAMES[next(iter(like.values())).dtype]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports what torch deprecates
        make = partial(import_module("zipnn").ZipNN, **settings)
    return {
        "safetensors + zipnn": Format(partial(_save_zipnn, make), partial(_load_zipnn, make)),
        "safetensors + zipnn + delta": Format(
            partial(_save_zipnn_delta, make), partial(_load_zipnn_delta, make), partial(_save_zipnn, make)
        ),
    }


def _save_torch(state: State, path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    _write_zstd(buffer.getbuffer(), path)


def _load_torch(path: Path) -> State:
    loaded: State = torch.load(io.BytesIO(_read_zstd(path)), weights_only=True)
    return loaded


def _save_safetensors(state: State, path: Path) -> None:
    _write_zstd(memoryview(save_safetensors(state)), path)


def _load_safetensors(path: Path) -> State:
    return load_safetensors(_read_zstd(path))


def _write_zstd(data: memoryview, path: Path) -> None:
    """Compress with all cores at the level of "small", and write durably."""
    path.mkdir()
    _write_file(zstandard.ZstdCompressor(level=1, threads=os.cpu_count() or 1).compress(data), path / "m.zst")


def _read_zstd(path: Path) -> bytes:
    return zstandard.ZstdDecompressor().decompress((path / "m.zst").read_bytes())


def _write_file(data: bytes, path: Path) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _save_dcp(state: State, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is only one process
        writer = FileSystemWriter(path, thread_count=os.cpu_count() or 1, _extensions=[ZStandard()])
        save_dcp(state, storage_writer=writer, no_dist=True)


def _load_dcp(like: State, path: Path) -> State:
    loaded = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_dcp(loaded, storage_reader=FileSystemReader(path), no_dist=True)
    return loaded


def _save_zipnn(make: Callable[..., Any], state: State, path: Path) -> None:
    path.mkdir()
    _write_file(make().compress(bytearray(save_safetensors(state))), path / "base.znn")


def _read_zipnn(make: Callable[..., Any], path: Path) -> bytearray:
    data: bytearray = make().decompress((path / "base.znn").read_bytes())
    return data


def _load_zipnn(make: Callable[..., Any], path: Path) -> State:
    return load_safetensors(bytes(_read_zipnn(make, path)))


def _save_zipnn_delta(make: Callable[..., Any], state: State, path: Path) -> None:
    data, base = bytearray(save_safetensors(state)), _read_zipnn(make, path)
    _write_file(make(delta_compressed_type="byte").compress(data, delta_second_data=base), path / "delta.znn")


def _load_zipnn_delta(make: Callable[..., Any], path: Path) -> State:
    stored, base = (path / "delta.znn").read_bytes(), _read_zipnn(make, path)
    return load_safetensors(bytes(make(delta_compressed_type="byte").decompress(stored, delta_second_data=base)))
