"""Files of torch.save are read in both of its forms; programs, other byte orders and damage are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import BadFile, Untrusted
from holdfast.formats.reading.byte_ranges import open_file
from holdfast.formats.reading.found import Placeholders
from holdfast.formats.reading.torch_file import is_torch_file, read_torch_object


def _read(path: Path) -> Any:
    return read_torch_object(open_file(str(path)), Placeholders(), where=path.name)


@pytest.mark.parametrize("zipped", [True, False])
def test_both_forms_are_recognised_and_read(tmp_path: Path, zipped: bool) -> None:
    shared = torch.ones(5)
    torch.save({"a": shared, "b": shared[2:], "n": 3}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)

    found = _read(tmp_path / "a.pt")

    assert is_torch_file((tmp_path / "a.pt").read_bytes()[:32])
    assert found["n"] == 3
    assert found["b"].storage_offset() == 2
    assert found["a"].untyped_storage()._cdata == found["b"].untyped_storage()._cdata


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, zipped: bool, share: float) -> None:
    torch.save({"a": torch.ones(5000)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data[: int(share * len(data))])

    with pytest.raises(BadFile, match=r"a\.pt .*cut off"):
        _read(tmp_path / "a.pt")


def test_an_older_file_that_lies_about_the_size_of_a_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(5)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[-28:-20] = (3).to_bytes(8, "little")
    (tmp_path / "a.pt").write_bytes(data)

    with pytest.raises(BadFile, match="another size than its tensors"):
        _read(tmp_path / "a.pt")


def _rewrite(path: Path, changes: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, changes.get(name.partition("/")[2], data))
        for name in changes.keys() - {name.partition("/")[2] for name in records}:
            archive.writestr(f"a/{name}", changes[name])


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "a.pt")
    _rewrite(tmp_path / "a.pt", {"byteorder": b"big"})

    with pytest.raises(BadFile, match="big-endian"):
        _read(tmp_path / "a.pt")


def test_a_program_of_torchscript_is_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "a.pt")
    _rewrite(tmp_path / "a.pt", {"constants.pkl": b""})

    with pytest.raises(Untrusted, match="is a TorchScript program"):
        _read(tmp_path / "a.pt")


def test_a_storage_of_another_size_than_the_pickle_says_is_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "a.pt")
    _rewrite(tmp_path / "a.pt", {"data/0": bytes(4)})

    with pytest.raises(BadFile, match=r"record 'data/0' has 4 bytes instead of 8"):
        _read(tmp_path / "a.pt")
