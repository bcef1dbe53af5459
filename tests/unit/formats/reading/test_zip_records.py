"""Records of torch.save's archives are ranges of the file; compressed, doubled or cut ones are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from holdfast.errors import BadFile
from holdfast.formats.reading.byte_ranges import open_file
from holdfast.formats.reading.torch_file import Archive, read_archive
from tests.kit.checkpoints import read_raw


def _read(path: Path) -> Archive:
    return read_archive(open_file(str(path)), where=path.name)


def test_a_record_is_found_where_torch_wrote_it(tmp_path: Path) -> None:
    tensor = torch.randn(100)
    torch.save({"a": tensor}, tmp_path / "a.pt")

    record = _read(tmp_path / "a.pt").find("data/0", size_bytes=400)

    assert bytes(record.read(0, 400)) == read_raw(tensor)


def test_an_archive_inside_a_file_is_read_by_its_range(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "b").write_bytes(b"before" + data + b"after")

    inner = open_file(str(tmp_path / "b")).narrow(6, 6 + len(data))

    assert bytes(read_archive(inner, where="b").find("data/0").read(0, 12)) == read_raw(torch.ones(3))


@pytest.mark.parametrize("kept", [4, 30, 300, -1])
def test_an_archive_that_is_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    torch.save(torch.ones(300), tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:kept])

    with pytest.raises(BadFile, match=r"a\.pt is cut off or damaged"):
        _read(tmp_path / "a.pt")


def test_a_missing_record_and_another_size_are_named(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "a.pt")
    archive = _read(tmp_path / "a.pt")

    with pytest.raises(BadFile, match=r"has no record 'data/7'"):
        archive.find("data/7")
    with pytest.raises(BadFile, match=r"record 'data/0' has 12 bytes instead of 13"):
        archive.find("data/0", size_bytes=13)


def _write_zip(path: Path, names: list[str], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name in names:
            archive.writestr(name, b"x" * 100)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("names", "method", "reason"),
    [
        (["a/data.pkl"], zipfile.ZIP_DEFLATED, "is compressed or encrypted"),
        (["a/data.pkl", "a/data/0", "a/data/0"], zipfile.ZIP_STORED, "has the record 'data/0' twice"),
        (["readme.txt"], zipfile.ZIP_STORED, "no file of torch.save: it has no data.pkl"),
    ],
)
def test_other_archives_are_refused(tmp_path: Path, names: list[str], method: int, reason: str) -> None:
    _write_zip(tmp_path / "a.zip", names, method)

    with pytest.raises(BadFile, match=reason):
        _read(tmp_path / "a.zip")


def test_a_record_whose_header_lies_about_its_place_is_refused(tmp_path: Path) -> None:
    _write_zip(tmp_path / "a.zip", ["a/data.pkl"])
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[28:30] = b"\xff\xff"  # the length of the extra field: the record would begin 64 KiB later
    (tmp_path / "a.zip").write_bytes(data)

    with pytest.raises(BadFile, match="ends beyond the end of the file"):
        _read(tmp_path / "a.zip")
