"""Content stores of PyTorch: tensors by name, and those of one storage share it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._content_store import ContentStoreWriter

import holdfast
from holdfast.errors import BadFile
from holdfast.formats.reading.detect import read_content_folder
from holdfast.repo.files import open_source_folder
from tests.kit.checkpoints import assert_same


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = torch.arange(600.0 * 500).view(600, 500)
    writer: Any = ContentStoreWriter(str(tmp_path / "content"), stable_hash=True)
    writer.write_tensor("layer/weight", base)
    writer.write_tensor("layer/part", base[3:].t())
    writer.write_tensor("other", torch.ones(3, dtype=torch.int8))
    return tmp_path / "content"


def test_tensors_come_back_by_name_and_share_memory(tmp_path: Path, folder: Path) -> None:
    store = holdfast.open(tmp_path / "store")

    store.import_(folder, "m")

    loaded = store.load("m")
    base = torch.arange(600.0 * 500).view(600, 500)
    expected = {"layer/part": base[3:].t(), "layer/weight": base, "other": torch.ones(3, dtype=torch.int8)}
    assert_same(loaded, expected)
    assert loaded["layer/part"].data_ptr() == loaded["layer/weight"][3:].data_ptr()
    assert store.verify_import(folder, "m") == []


def test_a_storage_that_is_missing_is_named(folder: Path) -> None:
    for path in (folder / "storages").iterdir():
        path.unlink()

    with pytest.raises(BadFile, match=r"needs the storage [0-9a-f]{40}, which is missing"):
        read_content_folder(open_source_folder(str(folder)))


@pytest.mark.parametrize(
    "payload",
    [
        (torch.float32, "../../etc/passwd", 0, (1,), (1,), {}),
        (torch.float32, "0" * 40, 0, (1,)),
        {"a": 1},
        (torch.float32, "0" * 40, 0, ("a",), (1,), {}),
    ],
)
def test_metadata_in_another_form_is_refused(folder: Path, payload: Any) -> None:
    torch.save(payload, folder / "tensors" / "bad")

    with pytest.raises(BadFile, match="is not the metadata of a tensor"):
        read_content_folder(open_source_folder(str(folder)))


def test_a_store_without_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tensors").mkdir()

    with pytest.raises(BadFile, match="without tensors"):
        read_content_folder(open_source_folder(str(tmp_path)))
