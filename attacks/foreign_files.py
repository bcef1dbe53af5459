"""Builds files that a hostile or broken writer could hand to `holdfast import`; see README.md."""

from __future__ import annotations

import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

PWNED: Final = "pwned"
"""The file that hostile pickles create, if anything in them is called."""


class _Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {PWNED}",)


def _write_safetensors(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _slot(**changes: Any) -> Any:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def _cut(path: Path, share: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    return path


def _torch(folder: Path, value: Any, name: str = "a.pt", *, zipped: bool = True) -> Path:
    torch.save(value, folder / name, _use_new_zipfile_serialization=zipped)
    return folder / name


def _zip_pickle(folder: Path, data: bytes) -> Path:
    """Write an archive of torch.save with this pickle."""
    path = folder / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/byteorder", b"little")
    return path


def _dcp(folder: Path, change: Callable[[Any], Any] = lambda metadata: metadata) -> Path:
    path = folder / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is only one process
        save_dcp({"w": torch.ones(600, 600), "n": 3}, checkpoint_id=str(path), no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 - written just now
    (path / ".metadata").write_bytes(pickle.dumps(change(metadata)))
    return path


def _move(metadata: Any, **changes: Any) -> Any:
    data = {index: replace(info, **changes) for index, info in metadata.storage_data.items()}
    return replace(metadata, storage_data=data)


def _shards(folder: Path, files: dict[str, list[str]], weight_map: dict[str, str]) -> Path:
    path = folder / "model"
    path.mkdir()
    for name, keys in files.items():
        save_file({key: torch.ones(2) for key in keys}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def _both(folder: Path) -> Path:
    path = _dcp(folder)
    save_file({"b": torch.ones(1)}, path / "model.safetensors")
    return path


def _doubled(levels: int) -> bytes:
    """Return a pickle of a few bytes that stands for a list of 2**levels items."""
    value: list[Any] = [1]
    for _ in range(levels):
        value = [value, value]
    return pickle.dumps(value)


def _loop() -> bytes:
    value: list[Any] = []
    value.append(value)
    return pickle.dumps(value)


def _text(folder: Path) -> Path:
    path = folder / "readme.txt"
    path.write_text("not a checkpoint")
    return path


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _whole(folder: Path, name: str = "m.safetensors") -> Path:
    save_file({"x": torch.ones(5000)}, folder / name)
    return folder / name


FILES: Final[dict[str, Callable[[Path], Path]]] = {
    "not a checkpoint": _text,
    "a pipe": _pipe,
    "safetensors, cut off": lambda folder: _cut(_whole(folder), 0.5),
    "safetensors, a header of 2**62 bytes": lambda folder: _write_raw(folder, struct.pack("<Q", 1 << 62) + b"{}" * 9),
    "safetensors, a header 100,000 deep": lambda folder: _write_safetensors(folder / "m", b"{" + b'"a":[' * 100_000),
    "safetensors, an unknown dtype": lambda folder: _write_safetensors(folder / "m", _slot(dtype="F33")),
    "safetensors, offsets beyond the end": lambda folder: _write_safetensors(
        folder / "m", _slot(shape=[1 << 40], data_offsets=[0, 1 << 42])
    ),
    "safetensors, tensors that overlap": lambda folder: _write_safetensors(
        folder / "m", {**_slot(), "y": _slot()["x"]}
    ),
    "an index that names missing shards": lambda folder: _shards(folder, {"1": ["a"]}, {"a": "1", "b": "2"}),
    "an index that leads outside": lambda folder: _shards(folder, {"1": ["a"]}, {"a": "../../etc/passwd"}),
    "a tensor in two shards": lambda folder: _shards(
        folder, {"1.safetensors": ["a"], "2.safetensors": ["a"]}, {"a": "1.safetensors", "b": "2.safetensors"}
    ),
    "torch.save, a pickle that runs a command": lambda folder: _torch(folder, {"w": torch.ones(2), "x": _Evil()}),
    "torch.save, an older file that runs a command": lambda folder: _torch(folder, _Evil(), zipped=False),
    "torch.save, cut off": lambda folder: _cut(_torch(folder, torch.ones(5000)), 0.7),
    "torch.save, an older file, cut off": lambda folder: _cut(_torch(folder, torch.ones(5000), zipped=False), 0.7),
    "torch.save, a list of 2**60 items in a few bytes": lambda folder: _zip_pickle(folder, _doubled(60)),
    "torch.save, a list that contains itself": lambda folder: _zip_pickle(folder, _loop()),
    "torch.save, a text of 2**60 bytes": lambda folder: _zip_pickle(folder, b"\x80\x04\x8d" + b"\xff" * 7 + b"\x0fx."),
    "torch.save, an array of bytes of 2**40": lambda folder: _zip_pickle(
        folder, b"\x80\x04cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R."
    ),
    "DCP, metadata that runs a command": lambda folder: _dcp(
        folder, lambda found: replace(found, planner_data=_Evil())
    ),
    "DCP, a file that leads outside": lambda folder: _dcp(
        folder, lambda found: _move(found, relative_path="../../etc/passwd")
    ),
    "DCP, an item of 2**50 bytes": lambda folder: _dcp(folder, lambda found: _move(found, length=1 << 50)),
    "DCP, a missing file": lambda folder: _dcp(folder, lambda found: _move(found, relative_path="__7_0.distcp")),
    "a folder that is both": _both,
}
"""By name: writes a file or folder into a folder, and returns its path."""


def _write_raw(folder: Path, data: bytes) -> Path:
    (folder / "m").write_bytes(data)
    return folder / "m"
