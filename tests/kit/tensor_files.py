"""Files with tensors in them: those that real libraries write, and malformed ones made by hand."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

NO_SAFETENSORS = "needs safetensors, which `make test` installs"


def write_safetensors(path: Path, state: dict[str, torch.Tensor]) -> Path:
    """Write a file with the real library; skip the test if it is not installed."""
    pytest.importorskip("safetensors", reason=NO_SAFETENSORS)
    from safetensors.torch import save_file

    save_file(state, path)
    return path


def write_torch(path: Path, state: object, **options: Any) -> Path:
    """Write a file with torch.save."""
    torch.save(state, path, **options)
    return path


def make_safetensors(header: object, *, data_bytes: int = 0) -> bytes:
    """Return a file with any header, whether it is valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def make_archive(members: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip file."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()
