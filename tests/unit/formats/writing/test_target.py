"""The destination of an export: it appears whole or not at all, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.errors import BadName, NameInUse, StoreFull
from holdfast.formats.writing.target import RECEIPT_NAME, ExportTarget
from holdfast.objects.local.files import PosixFiles
from tests.kit.scripted_files import Scripted


def _open(
    path: Path, *, is_folder: bool = False, replace: bool = False, files: PosixFiles | None = None
) -> ExportTarget:
    return ExportTarget(files or PosixFiles(), str(path), is_folder=is_folder, replace=replace)


def _write(target: ExportTarget, data: bytes = b"data", name: str = "") -> None:
    with target.create(name) as file:
        file.write_at(0, memoryview(data))


def _list(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def test_a_file_appears_when_it_is_committed(tmp_path: Path) -> None:
    with _open(tmp_path / "out") as target:
        _write(target)
        assert not (tmp_path / "out").exists()
        target.commit()

    assert _list(tmp_path) == ["out"]
    assert (tmp_path / "out").read_bytes() == b"data"


def test_a_folder_appears_with_all_its_files(tmp_path: Path) -> None:
    with _open(tmp_path / "out", is_folder=True) as target:
        _write(target, name="a")
        _write(target, name="deep/er/b")
        assert not (tmp_path / "out").exists()
        target.commit()

    assert _list(tmp_path) == ["out", "out/a", "out/deep", "out/deep/er", "out/deep/er/b"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_without_a_commit_nothing_is_left(tmp_path: Path, is_folder: bool) -> None:
    def fail() -> None:
        with _open(tmp_path / "out", is_folder=is_folder) as target:
            _write(target, name="deep/a" if is_folder else "")
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()

    assert _list(tmp_path) == []


def test_bytes_are_written_in_any_order_and_gaps_are_zeros(tmp_path: Path) -> None:
    with _open(tmp_path / "out") as target:
        with target.create() as file:
            file.write_at(6, memoryview(b"later"))
            file.write_at(0, memoryview(b"first"))
        target.commit()

    assert (tmp_path / "out").read_bytes() == b"first\x00later"


@pytest.mark.parametrize("call", ["create_file", "write_at", "sync_file", "rename_noreplace", "sync_directory"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_failing_disk_leaves_nothing(tmp_path: Path, call: str, is_folder: bool) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail() -> None:
        with _open(tmp_path / "out", is_folder=is_folder, files=Scripted(before={call: refuse})) as target:
            _write(target, name="a" if is_folder else "")
            target.commit()

    with pytest.raises(OSError, match="No space left"):
        fail()

    # Only a sync of the parent comes after the rename: the export is then visible, and perhaps not durable.
    is_late = call == "sync_directory" and not is_folder
    assert _list(tmp_path) == (["out"] if is_late else [])


def test_too_little_space_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with _open(tmp_path / "out") as target, pytest.raises(StoreFull, match="nothing was written") as caught:
        target.verify_room(1 << 60)

    assert caught.value.needed_bytes == 1 << 60


def test_an_existing_destination_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")

    with pytest.raises(NameInUse, match="exists already; choose another path, or replace it"), _open(tmp_path / "out"):
        pass

    assert (tmp_path / "out").read_text() == "old"


def test_a_destination_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with _open(tmp_path / "out") as target:
        _write(target)
        (tmp_path / "out").write_text("other")
        with pytest.raises(NameInUse, match="exists already"):
            target.commit()

    assert (tmp_path / "out").read_text() == "other"
    assert _list(tmp_path) == ["out"]


def test_an_older_file_is_replaced_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")

    with _open(tmp_path / "out", replace=True) as target:
        _write(target)
        target.commit()

    assert (tmp_path / "out").read_bytes() == b"data"


def test_an_older_export_is_replaced_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RECEIPT_NAME).write_text("{}")

    with _open(tmp_path / "out", is_folder=True, replace=True) as target:
        _write(target, name="new")
        target.commit()

    assert _list(tmp_path) == ["out", "out/new"]


def test_a_folder_that_no_export_wrote_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years")

    with (
        pytest.raises(NameInUse, match="is not a folder of an earlier export"),
        _open(tmp_path / "out", is_folder=True, replace=True),
    ):
        pass

    assert _list(tmp_path) == ["out", "out/thesis.txt"]


def test_a_file_that_is_added_while_an_older_export_is_replaced_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RECEIPT_NAME).write_text("{}")

    with _open(tmp_path / "out", is_folder=True, replace=True) as target:
        _write(target, name="new")
        (tmp_path / "out" / "tokenizer.json").symlink_to("elsewhere")
        with pytest.raises(NameInUse, match=r"tokenizer\.json"):
            target.commit()

    assert _list(tmp_path) == ["out", f"out/{RECEIPT_NAME}", "out/tokenizer.json"]


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "out").symlink_to("elsewhere")

    with pytest.raises(NameInUse, match="is not a file"), _open(tmp_path / "out", replace=True):
        pass

    assert (tmp_path / "elsewhere").read_text() == "kept"


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadName, match=r"the folder .*missing does not exist"), _open(tmp_path / "missing" / "out"):
        pass


def test_leftovers_of_killed_exports_are_removed_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".out.holdfast-export-00").mkdir()
    (tmp_path / ".out.holdfast-export-00" / "part").write_text("half")
    (tmp_path / ".out.holdfast-export-01").write_text("half")
    (tmp_path / ".other.holdfast-export-00").write_text("of another destination")

    with _open(tmp_path / "out") as target:
        _write(target)
        target.commit()

    assert _list(tmp_path) == [".other.holdfast-export-00", "out"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_export_that_is_running_is_not_a_leftover(tmp_path: Path, is_folder: bool) -> None:
    with _open(tmp_path / "out", is_folder=is_folder) as first:
        _write(first, name="a" if is_folder else "")
        with _open(tmp_path / "out", is_folder=is_folder) as second:
            _write(second, b"second", name="a" if is_folder else "")
            second.commit()
        with pytest.raises(NameInUse):
            first.commit()

    assert (tmp_path / "out" / "a" if is_folder else tmp_path / "out").read_bytes() == b"second"
