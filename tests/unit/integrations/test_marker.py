"""Marker files: what they say, how they are written, and that `torch.load` of one loads the snapshot."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import holdfast
from holdfast.integrations import marker as marker_module
from holdfast.integrations.marker import (
    Marker,
    decode_marker,
    encode_marker,
    list_others,
    load_marked,
    read_marker,
    write_marker,
)


@pytest.fixture
def marked(tmp_path: Path) -> Marker:
    store = holdfast.open(tmp_path / "store")
    store.save("run/last", {"weight": torch.arange(6.0), "epoch": 3})
    return Marker(store.url, store.repository.identity.store_id, "run/last")


def _write(path: Path, marker: Marker) -> str:
    write_marker(str(path), encode_marker(marker))
    return str(path)


@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_load_of_a_marker_loads_the_snapshot(marked: Marker, tmp_path: Path, weights_only: bool) -> None:
    loaded = torch.load(_write(tmp_path / "last.ckpt", marked), weights_only=weights_only)

    assert torch.equal(loaded["weight"], torch.arange(6.0))
    assert loaded["epoch"] == 3


def test_a_marker_may_stand_for_one_part_of_the_snapshot(marked: Marker, tmp_path: Path) -> None:
    store = holdfast.open(marked.store)
    store.save("parts", {"a": {"x": 1}, "b": {"x": torch.ones(2), "y": 2}})
    part = Marker(marked.store, marked.store_id, "parts", "b")

    path = _write(tmp_path / "b.pt", part)

    assert read_marker(path) == part
    loaded = torch.load(path)
    assert torch.equal(loaded.pop("x"), torch.ones(2))
    assert loaded == {"y": 2}


def test_map_location_decides_where_the_tensors_of_the_snapshot_are(marked: Marker, tmp_path: Path) -> None:
    loaded = torch.load(_write(tmp_path / "last.ckpt", marked), map_location="meta")

    assert loaded["weight"].device.type == "meta"


def test_two_devices_besides_the_cpu_are_refused() -> None:
    with pytest.raises(holdfast.Unsupported, match="pass one of them, or 'cpu', as map_location"):
        marker_module._choose_device([torch.device("cuda", 0), torch.device("cpu"), torch.device("cuda", 1)])


def test_the_last_line_of_a_marker_says_where_the_checkpoint_is(marked: Marker, tmp_path: Path) -> None:
    data = Path(_write(tmp_path / "last.ckpt", marked)).read_bytes()

    last = data.splitlines()[-1].decode()
    assert last.startswith('{"holdfast checkpoint":')
    assert marked.store in last
    assert '"run/last"' in last
    assert len(data) < 4096


def test_what_is_written_is_read_again_without_unpickling(
    marked: Marker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path / "new" / "folder" / "last.ckpt", marked)
    monkeypatch.setattr(torch, "load", None)

    assert read_marker(path) == marked
    assert [each.name for each in Path(path).parent.iterdir()] == ["last.ckpt"]


def test_a_marker_on_another_filesystem_is_written_and_read(marked: Marker) -> None:
    write_marker("memory://checkpoints/last.ckpt", encode_marker(marked))

    try:
        assert read_marker("memory://checkpoints/last.ckpt") == marked
        assert read_marker("memory://checkpoints/other.ckpt") is None
    finally:
        MemoryFileSystem().rm("/checkpoints", recursive=True)


def test_other_files_are_not_markers(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "torch.ckpt")
    (tmp_path / "text.ckpt").write_text("holdfast checkpoint")
    (tmp_path / "folder.ckpt").mkdir()

    for name in ("torch.ckpt", "text.ckpt", "folder.ckpt", "absent.ckpt", "text.ckpt/below"):
        assert read_marker(str(tmp_path / name)) is None


def test_a_damaged_marker_is_reported() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.comment = b'{"holdfast checkpoint": {"store": '

    with pytest.raises(holdfast.Corrupt, match="marker of a checkpoint is damaged"):
        decode_marker(buffer)


def test_a_store_that_is_gone_or_replaced_is_named(marked: Marker, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "moved")
    with pytest.raises(
        holdfast.NotAStore, match=r"is in the store .*store, which is not there any more.*holdfast:<name>"
    ):
        load_marked(marked.store, marked.store_id, marked.name, ())

    holdfast.open(tmp_path / "store").save("run/last", {"weight": torch.zeros(1)})
    with pytest.raises(holdfast.StoreGone, match="another store is now"):
        load_marked(marked.store, marked.store_id, marked.name, ())


def test_pickles_in_the_snapshot_are_refused(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "store")
    store.save("run/last", {"loss": partial(torch.sum, dim=0)}, allow_pickle=True)
    path = _write(tmp_path / "last.ckpt", Marker(store.url, store.repository.identity.store_id, "run/last"))

    with pytest.raises(holdfast.HoldfastError, match="allow_pickle"):
        torch.load(path, weights_only=False)


@pytest.mark.slow
def test_without_holdfast_the_error_names_it(marked: Marker, tmp_path: Path) -> None:
    path = _write(tmp_path / "last.ckpt", marked)
    code = f"import sys, torch; sys.modules['holdfast'] = None; torch.load({path!r}, weights_only=sys.argv[1] == '1')"

    def read_error(weights_only: str) -> str:
        command = [sys.executable, "-c", code, weights_only]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    assert "holdfast" in read_error("0").splitlines()[-1]
    assert "holdfast.integrations.marker.load_marked" in read_error("1")


def test_the_other_markers_of_a_folder_are_listed_with_the_newest_first(tmp_path: Path) -> None:
    for age, name in enumerate(("newest", "middle", "oldest")):
        write_marker(str(tmp_path / f"{name}.ckpt"), encode_marker(Marker("/store", "id", name)))
        os.utime(tmp_path / f"{name}.ckpt", (1000 - age, 1000 - age))
    (tmp_path / "notes.txt").write_text("no marker")
    (tmp_path / "folder").mkdir()

    found = list_others(str(tmp_path / "middle.ckpt"))

    assert found == [str(tmp_path / "newest.ckpt"), str(tmp_path / "oldest.ckpt")]
    assert list_others("memory://nowhere/x.ckpt") == []


def test_a_marker_whose_snapshot_was_deleted_says_so_when_torch_loads_it(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "store")
    store.save("kept", {"x": 1})
    marker = Marker(store.url, store.repository.identity.store_id, "lost")
    write_marker(str(tmp_path / "lost.ckpt"), encode_marker(marker))

    with pytest.raises(
        holdfast.NotFound, match=r"the snapshot 'lost' was deleted from the store .*store; `holdfast -s"
    ):
        torch.load(tmp_path / "lost.ckpt")
