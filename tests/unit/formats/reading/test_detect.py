"""The format is found by content; two formats in one folder are refused until one is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.errors import BadFile, BadName
from holdfast.formats.reading.detect import open_checkpoint
from tests.kit.checkpoints import save_dcp


def test_files_are_recognised_whatever_their_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.bin")
    torch.save({"a": torch.ones(1)}, tmp_path / "two.safetensors")

    assert open_checkpoint(str(tmp_path / "one.bin")).format == "safetensors"
    assert open_checkpoint(str(tmp_path / "two.safetensors")).format == "torch"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a checkpoint of a known format"),
        (b"just a text", "is not a checkpoint of a known format"),
        (b"\0" * 100, "is not a checkpoint of a known format"),
        (b"GGUF" + bytes(30), "is a GGUF file, which cannot be imported; convert it to safetensors"),
        (b"\x89HDF" + bytes(30), "is an HDF5 file"),
    ],
)
def test_another_file_is_no_checkpoint(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x").write_bytes(content)

    with pytest.raises(BadFile, match=reason):
        open_checkpoint(str(tmp_path / "x"))


def test_a_folder_that_is_both_needs_a_choice(tmp_path: Path) -> None:
    save_dcp({"a": torch.ones(1)}, tmp_path / "both")
    save_file({"b": torch.ones(1)}, tmp_path / "both" / "model.safetensors")

    with pytest.raises(BadFile, match="is of several formats: safetensors and dcp; choose one with --format"):
        open_checkpoint(str(tmp_path / "both"))

    assert list(open_checkpoint(str(tmp_path / "both"), "dcp").tree) == ["a"]
    assert list(open_checkpoint(str(tmp_path / "both"), "hf").tree) == ["b"]


def test_a_choice_must_fit_the_content(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "m")

    with pytest.raises(BadFile, match="is not of the format torch"):
        open_checkpoint(str(tmp_path / "m"), "torch")
    with pytest.raises(BadName, match="'tar' is no format to import; choose one of safetensors"):
        open_checkpoint(str(tmp_path / "m"), "tar")


def test_an_empty_folder_and_a_missing_path_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="is not a checkpoint of a known format"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(BadFile, match="does not exist"):
        open_checkpoint(str(tmp_path / "none"))
