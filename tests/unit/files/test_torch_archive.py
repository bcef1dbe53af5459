"""The tensors of files of torch.save are found by zip directory and pickle, and a file that lies finds none."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.files import torch_archive as module
from holdfast.files.torch_archive import read_torch_archive
from holdfast.repo.format.grid import Extent
from tests.kit.tensor_files import make_archive, write_torch


def read(data: bytes) -> list[Extent]:
    return read_torch_archive(io.BytesIO(data), len(data))


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(force=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.complex128])
def test_the_tensors_of_a_real_file_are_where_torch_wrote_them(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(60).reshape(6, 10).to(dtype)
    data = write_torch(tmp_path / "model.pt", {"a": tensor}).read_bytes()

    (found,) = read(data)

    assert data[found.start : found.stop] == content(tensor)
    assert (found.item_bytes, found.shape) == (dtype.itemsize, (6, 10))


def test_tied_weights_are_one_extent() -> None:
    weight = torch.randn(6, 10)

    assert [each.shape for each in read(saved({"a": weight, "b": weight}))] == [(6, 10)]


def test_views_that_do_not_overlap_are_extents_of_their_own() -> None:
    whole = torch.randn(10, 4)
    data = saved([whole[:3], whole[5:]])

    assert [data[each.start : each.stop] for each in sorted(read(data))] == [content(whole[:3]), content(whole[5:])]


@pytest.mark.parametrize("view", ["overlapping", "with gaps"])
def test_other_views_leave_the_storage_whole(view: str) -> None:
    whole = torch.randn(10, 4)
    data = saved([whole[:6], whole[3:]] if view == "overlapping" else [whole[:, 1]])

    (found,) = read(data)

    assert (data[found.start : found.stop], found.shape) == (content(whole), ())


def test_a_transposed_tensor_has_no_rows() -> None:
    assert [each.shape for each in read(saved(torch.randn(3, 5).t()))] == [()]


def test_empty_tensors_are_nowhere() -> None:
    assert read(saved([torch.zeros(0, 3), torch.zeros(0)])) == []


def test_the_old_format_of_torch_save_is_no_archive() -> None:
    file = io.BytesIO()
    torch.save(torch.randn(50), file, _use_new_zipfile_serialization=False)

    assert read(file.getvalue()) == []


SOUND = saved({"a": torch.randn(50, 40)})


def test_without_a_pickle_that_can_be_parsed_the_storages_are_still_found() -> None:
    with zipfile.ZipFile(io.BytesIO(SOUND)) as archive:
        storage = archive.read("archive/data/0")

    (found,) = read(make_archive({"archive/data.pkl": b"\xff", "archive/data/0": storage}))

    assert (found.stop - found.start, found.shape) == (8000, ())


def test_a_storage_of_another_size_than_the_pickle_says_is_left_whole() -> None:
    with zipfile.ZipFile(io.BytesIO(SOUND)) as archive:
        pickle = archive.read("archive/data.pkl")

    for size in (7999, 8001, 3000, 80_000, 8_000_000):
        data = make_archive({"archive/data.pkl": pickle, "archive/data/0": bytes(size)})
        assert [(each.stop - each.start, each.shape) for each in read(data)] == [(size, ())]


@pytest.mark.parametrize("size", [0, 10, 1000, len(SOUND) - 30, len(SOUND) - 1])
def test_a_truncated_file_finds_no_tensors(size: int) -> None:
    assert read(SOUND[:size]) == []


def test_compressed_storages_are_not_extents() -> None:
    members = {"archive/data.pkl": b"\x80\x02}.", "archive/data/0": bytes(8000)}

    assert read(make_archive(members, compression=zipfile.ZIP_DEFLATED)) == []


def test_another_zip_file_has_no_tensors() -> None:
    assert read(make_archive({"a.txt": b"text", "data/0": bytes(8000)})) == []


def test_storages_that_overlap_are_not_extents() -> None:
    """The directory lists one place under two names."""
    data = make_archive({"a/data.pkl": b"\x80\x02}.", "a/data/0": bytes(8000), "a/data/1": bytes(8000)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        first, second = (archive.getinfo(f"a/data/{number}").header_offset for number in (0, 1))
    at = data.rindex(struct.pack("<L", second), 0, data.rindex(b"a/data/1"))

    assert len(read(data)) == 2
    assert read(data[:at] + struct.pack("<L", first) + data[at + 4 :]) == []


def test_a_long_directory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DIRECTORY_BYTES", 200)

    assert read(SOUND) == []


def test_a_long_pickle_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PICKLE_BYTES", 50)

    assert [each.shape for each in read(SOUND)] == [()]


@given(st.binary(min_size=1, max_size=60), st.integers(0, len(SOUND)))
def test_whatever_a_file_says_extents_are_inside_it_and_apart(noise: bytes, at: int) -> None:
    data = SOUND[:at] + noise + SOUND[at + len(noise) :]

    found = read(data)

    edges = [edge for each in sorted(found) for edge in (each.start, each.stop)]
    assert edges == sorted(edges)
    assert all(0 <= edge <= len(data) for edge in edges)
