"""Files and folders that other tools write, each made as that tool makes it or with the same first bytes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from tests.kit.dcp_calls import ALONE


def write_safetensors(path: Path) -> None:
    """Write one tensor as the safetensors format lays it out: the length of a JSON header, the header, the bytes."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))


def write_legacy(path: Path) -> None:
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)


def write_script(path: Path) -> None:
    """Write what an archive of torch.jit.save begins with."""
    name = b"model/data/0"
    path.write_bytes(b"PK\x03\x04" + bytes(22) + len(name).to_bytes(2, "little") + bytes(2) + name)


def write_dcp(path: Path) -> None:
    save_checkpoint({"w": torch.ones(3)}, checkpoint_id=path, **ALONE)


def write_hugging_face(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    write_safetensors(path / "model.safetensors")


def write_shards(path: Path) -> None:
    path.mkdir()
    write_safetensors(path / "model-00001-of-00001.safetensors")


def write_notes(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("hello\n")


FILES: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "model.pt": (lambda path: torch.save({"w": torch.ones(3)}, path), "a file that torch.save wrote"),
    "old.pt": (write_legacy, "a file that torch.save wrote"),
    "script.pt": (write_script, "an archive that torch.jit.save wrote"),
    "model.safetensors": (write_safetensors, "a safetensors file"),
    "array.npy": (lambda path: np.save(path, np.ones(3)), "a numpy array file"),
    "arrays.npz": (lambda path: np.savez(path, w=np.ones(3)), "a numpy archive"),
    "state.pkl": (lambda path: path.write_bytes(pickle.dumps({"w": 1})), "a pickle file"),
    "notes.txt": (lambda path: path.write_text("hello\n"), "a file"),
    "empty": (lambda path: path.touch(), "a file"),
}
"""By file name: what writes it, and what it must be called."""

FOLDERS: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "dcp": (write_dcp, "a checkpoint that torch.distributed.checkpoint wrote"),
    "llama": (write_hugging_face, "a model folder as Hugging Face writes it"),
    "shards": (write_shards, "a folder of safetensors files"),
}
