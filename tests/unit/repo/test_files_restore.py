from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.digest import Buffer
from holdfast.errors import BadName, Corrupt, NameInUse, NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.progress import Silent
from holdfast.repo.files import Restored, plan_files, restore
from holdfast.repo.format.source import BytesSource, Source
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.write.writer import Request, WriteOptions, save
from tests.kit.filetrees import MTIME_NS, TREE_BYTES, make_tree
from tests.kit.hooking import Hook
from tests.kit.scripted_files import open_descriptors


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory `data` with a few files, below the current directory."""
    monkeypatch.chdir(tmp_path)
    return make_tree(tmp_path / "data")


def _write(repo: Repository, *sources: Source) -> None:
    save(repo, Request("snap", sources, options=WriteOptions(overwrite=True)))


def _restore(repo: Repository, target: Path, *, only: str | None = None, overwrite: bool = False) -> Restored:
    with open_snapshot(repo, read_snapshot(repo.store, "snap")) as reader:
        return restore(reader, str(target), only=only, overwrite=overwrite)


def _read_tree(top: Path) -> dict[str, bytes]:
    return {path.relative_to(top).as_posix(): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


def test_what_was_saved_is_restored(tree: Path, repo: Repository, tmp_path: Path) -> None:
    _write(repo, *plan_files(["data"]))

    done = _restore(repo, tmp_path / "deep/out")

    assert _read_tree(tmp_path / "deep/out/data") == _read_tree(tree)
    assert done == Restored(4, TREE_BYTES)
    restored = tmp_path / "deep/out/data"
    assert (restored / "a.txt").stat().st_mtime_ns == MTIME_NS
    assert os.access(restored / "sub/run.sh", os.X_OK)
    assert not (restored / "a.txt").stat().st_mode & 0o111


def test_only_chooses_by_glob(tree: Path, repo: Repository, tmp_path: Path) -> None:
    _write(repo, *plan_files(["data/"]))

    _restore(repo, tmp_path / "out", only="*.sh")

    assert list(_read_tree(tmp_path / "out")) == ["sub/run.sh"]


def test_a_glob_without_a_match_is_an_error(tree: Path, repo: Repository, tmp_path: Path) -> None:
    _write(repo, *plan_files(["data"]))

    with pytest.raises(NotFound, match=r"no entry of 'snap' matches '\*\.pt'; `holdfast show snap` lists them"):
        _restore(repo, tmp_path / "out", only="*.pt")

    assert not (tmp_path / "out").exists()


def test_files_in_the_way_are_all_named_and_nothing_is_written(tree: Path, repo: Repository, tmp_path: Path) -> None:
    _write(repo, *plan_files(["data/"]))
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    (out / "b.bin").write_text("mine")
    (out / "sub/run.sh").symlink_to("nowhere")

    with pytest.raises(NameInUse, match=r"2 of 4 files exist already in .*out: b\.bin, sub/run\.sh\. Nothing was"):
        _restore(repo, out)

    assert _read_tree(out) == {"b.bin": b"mine"}


def test_overwrite_replaces_files_and_links_but_not_what_links_lead_to(
    tree: Path, repo: Repository, tmp_path: Path
) -> None:
    _write(repo, *plan_files(["data/"]))
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "precious").write_text("precious")
    (out / "a.txt").symlink_to(tmp_path / "precious")
    (out / "b.bin").write_text("old")

    _restore(repo, out, overwrite=True)

    assert (tmp_path / "precious").read_text() == "precious"
    assert not (out / "a.txt").is_symlink()
    assert _read_tree(out) == _read_tree(tree)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_link_in_the_place_of_a_directory_is_not_followed(
    tree: Path, repo: Repository, tmp_path: Path, overwrite: bool, inside: bool
) -> None:
    _write(repo, *plan_files(["data/"]))
    out, elsewhere = tmp_path / "out", tmp_path / ("out/real" if inside else "elsewhere")
    out.mkdir()
    elsewhere.mkdir()
    (out / "sub").symlink_to(elsewhere)

    with pytest.raises(BadName, match="'sub' is a file or a symbolic link, but a directory is needed"):
        _restore(repo, out, overwrite=overwrite)

    assert _read_tree(elsewhere) == _read_tree(out) == {}


def test_a_directory_in_the_place_of_a_file_is_never_replaced(tree: Path, repo: Repository, tmp_path: Path) -> None:
    _write(repo, *plan_files(["data/a.txt"]))
    (tmp_path / "out/a.txt").mkdir(parents=True)

    with pytest.raises(BadName, match=r"a\.txt is a directory"):
        _restore(repo, tmp_path / "out", overwrite=True)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../up", "a/../../up", "a//b", "a/", ".", "nul\0", "back\\slash", "", "line\nbreak"],
)
def test_a_hostile_name_writes_nothing(repo: Repository, tmp_path: Path, name: str) -> None:
    _write(repo, BytesSource("fine", b"x"), BytesSource(name, b"x"))

    with pytest.raises(BadName, match=r"entry name .* is refused"):
        _restore(repo, tmp_path / "out")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b/c", "a"), ("a\u0308", "\u00e4")])
def test_entries_that_cannot_be_files_side_by_side_are_refused(
    repo: Repository, tmp_path: Path, names: tuple[str, str]
) -> None:
    _write(repo, *(BytesSource(name, b"x") for name in names))

    with pytest.raises(BadName, match="choose one with --only"):
        _restore(repo, tmp_path / "out")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spec", "note"),
    [(None, None), ([1], [2]), ({"executable": "yes"}, {"mtime_ns": "then"}), ({}, {"mtime_ns": 1 << 80}), ({}, {})],
)
def test_odd_specs_and_notes_are_passed_over(repo: Repository, tmp_path: Path, spec: object, note: object) -> None:
    _write(repo, BytesSource("x", b"bytes", spec=spec, note=note))

    _restore(repo, tmp_path / "out")

    assert (tmp_path / "out/x").read_bytes() == b"bytes"
    assert not (tmp_path / "out/x").stat().st_mode & 0o111


def _flip(data: Buffer, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


def test_a_damaged_entry_leaves_no_file(repo: Repository, tmp_path: Path) -> None:
    _write(repo, BytesSource("good", b"g" * 10), BytesSource("rotten", bytes(9_000_000)))
    store = repo.store
    assert isinstance(store, MemoryStore)
    key, data = next((key, data) for key, data in store.contents().items() if key.startswith("packs/"))
    store.delete(key)
    store.create(key, _flip(data, 5000))

    with pytest.raises(Corrupt, match="entry 'rotten'"):
        _restore(repo, tmp_path / "out")

    assert _read_tree(tmp_path / "out") == {"good": b"g" * 10}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["good"]


def test_progress_counts_every_byte_once(tree: Path, repo: Repository, tmp_path: Path) -> None:
    class Counted(Silent):
        done = 0
        total = 0

        def begin(self, task: str, total_bytes: int) -> None:
            assert task == "get snap"
            self.total = total_bytes

        def advance(self, num_bytes: int) -> None:
            self.done += num_bytes

    _write(repo, *plan_files(["data"]))
    progress = Counted()
    with open_snapshot(repo, read_snapshot(repo.store, "snap")) as reader:
        restore(reader, str(tmp_path / "out"), progress=progress)

    assert progress.done == progress.total == TREE_BYTES


def test_no_handle_stays_open(tree: Path, repo: Repository, tmp_path: Path) -> None:
    _write(repo, *plan_files(["data"]))
    before = open_descriptors()

    _restore(repo, tmp_path / "out")
    with pytest.raises(NameInUse):
        _restore(repo, tmp_path / "out")

    assert open_descriptors() == before


def _refuse_links(*_names: object, **_options: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_filesystem_without_hard_links_will_do(tree: Path, repo: Repository, tmp_path: Path, hook: Hook) -> None:
    _write(repo, *plan_files(["data/"]))
    hook(os, "link", _refuse_links)

    _restore(repo, tmp_path / "out")

    assert _read_tree(tmp_path / "out") == _read_tree(tree)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_appears_during_the_restore_is_not_replaced(
    tree: Path, repo: Repository, tmp_path: Path, hook: Hook, has_links: bool
) -> None:
    class Intruder(Silent):
        def advance(self, num_bytes: int) -> None:
            (tmp_path / "out/a.txt").write_text("mine")

    _write(repo, *plan_files(["data/a.txt"]))
    if not has_links:
        hook(os, "link", _refuse_links)
    with open_snapshot(repo, read_snapshot(repo.store, "snap")) as reader:
        with pytest.raises(FileExistsError, match=r"File exists: '.*out/a\.txt'"):
            restore(reader, str(tmp_path / "out"), overwrite=True, progress=Intruder())

    assert _read_tree(tmp_path / "out") == {"a.txt": b"mine"}
