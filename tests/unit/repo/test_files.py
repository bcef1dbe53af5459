from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from holdfast.errors import BadName, SourceChanged
from holdfast.repo.files import FileSource, is_below, plan_files
from holdfast.repo.handle.repository import Repository
from holdfast.repo.write.writer import Request, save
from tests.kit.filetrees import MTIME_NS, make_tree
from tests.kit.hooking import Hook
from tests.kit.scripted_files import open_descriptors


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory `data` with a few files, below the current directory."""
    monkeypatch.chdir(tmp_path)
    return make_tree(tmp_path / "data")


def _names(*paths: str) -> list[str]:
    return [source.name for source in plan_files(paths)]


# --- which files a path means


BELOW: Final = ["a.txt", "b.bin", "sub/.hidden", "sub/run.sh"]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("data/a.txt", ["a.txt"]),
        ("./data/sub/run.sh", ["run.sh"]),
        ("data", [f"data/{name}" for name in BELOW]),
        ("./data", [f"data/{name}" for name in BELOW]),
        ("data/sub", ["sub/.hidden", "sub/run.sh"]),
        ("data/", BELOW),
        ("data/.", BELOW),
        (".", [f"data/{name}" for name in BELOW]),
        ("data/sub/..", BELOW),
        ("data/sub/empty", []),
    ],
)
def test_a_path_means_these_entries(tree: Path, path: str, names: list[str]) -> None:
    assert _names(path) == names


def test_paths_keep_their_order(tree: Path) -> None:
    assert _names("data/sub/run.sh", "data/a.txt") == ["run.sh", "a.txt"]


def test_directories_sort_by_their_parts(tmp_path: Path) -> None:
    for name in ("a/x", "a-b", "a.c", "b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    assert _names(f"{tmp_path}/") == ["a/x", "a-b", "a.c", "b"]


def test_a_source_describes_its_file(tree: Path) -> None:
    text, script = plan_files(["data/a.txt", "data/sub/run.sh"])

    assert (text.size_bytes, text.spec, text.note) == (5, {"type": "file", "executable": False}, {"mtime_ns": MTIME_NS})
    assert script.spec == {"type": "file", "executable": True}


def test_names_are_normalised(tmp_path: Path) -> None:
    (tmp_path / "a\u0308").touch()

    assert _names(f"{tmp_path}/") == ["\u00e4"]


def test_a_link_to_a_file_of_the_folder_counts_as_the_file(tree: Path) -> None:
    (tree / "sub/link").symlink_to("../a.txt")

    source = next(source for source in plan_files(["data"]) if source.name == "data/sub/link")

    assert bytes(source.read(0, source.size_bytes)) == b"hello"


def test_a_link_to_a_directory_is_followed_if_its_contents_are_meant(tree: Path) -> None:
    Path("latest").symlink_to("data/sub")

    assert _names("latest/") == [".hidden", "run.sh"]
    with pytest.raises(BadName, match=r"latest is a symbolic link to the directory 'data/sub'.*pass latest/"):
        plan_files(["latest"])


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to("nowhere"), "symbolic link to 'nowhere', which cannot be followed"),
        (lambda path: path.symlink_to(path), "which cannot be followed"),
        (lambda path: path.symlink_to("/"), "symbolic link to the directory '/', and such links are not followed"),
        (lambda path: path.symlink_to("/dev/null"), "leads to /dev/null, outside of the folder"),
        (os.mkfifo, "neither a file nor a directory .a pipe."),
        (_make_socket, "neither a file nor a directory .a socket."),
        (lambda path: path.with_name("back\\slash").touch(), "backslash"),
        (lambda path: path.with_name("new\nline").touch(), "control characters"),
        (lambda path: Path(os.fsdecode(os.fsencode(path) + b"\xff")).touch(), "not UTF-8; rename it"),
    ],
)
def test_what_cannot_be_restored_is_refused(tree: Path, make: Callable[[Path], None], reason: str) -> None:
    make(tree / "sub/odd")

    with pytest.raises(BadName, match=reason):
        plan_files(["data"])


def test_two_files_of_one_name_are_refused_by_both_paths(tree: Path) -> None:
    Path("a.txt").touch()

    with pytest.raises(BadName, match=r"^data/a\.txt and a\.txt would both be the entry 'a\.txt'"):
        plan_files(["data/a.txt", "a.txt"])


def test_two_files_whose_names_normalise_to_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a\u0308").touch()
    (tmp_path / "\u00e4").touch()

    with pytest.raises(BadName, match="would both be the entry 'ä'"):
        plan_files([f"{tmp_path}/"])


def test_a_missing_path_is_named(tree: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data/nothing"):
        plan_files(["data/nothing"])


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("data/sub/run.sh", "is inside the store"),
        ("data/sub", "is inside"),
        ("data", "contains the store"),
        (".", "contains"),
    ],
)
def test_a_store_is_not_saved_into_itself(tree: Path, path: str, reason: str) -> None:
    with pytest.raises(BadName, match=reason):
        plan_files([path], outside="data/sub")


def test_files_next_to_a_store_are_saved(tree: Path) -> None:
    assert [source.name for source in plan_files(["data/a.txt"], outside="data/sub")] == ["a.txt"]


def test_below_is_judged_after_links(tree: Path) -> None:
    Path("alias").symlink_to("data")

    assert is_below("alias/sub", "data")
    assert not is_below("database", "data")
    assert is_below("data", "/")


# --- the bytes of a file


def _plan(path: Path) -> FileSource:
    return plan_files([str(path)])[0]


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("HELLO")
    other.rename(path)


def _touch(path: Path) -> None:
    os.utime(path, ns=(MTIME_NS + 1, MTIME_NS + 1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.write_text("hello world"), "it had 5 bytes and now has 11"),
        (lambda path: os.truncate(path, 2), "it had 5 bytes and now has 2"),
        (_touch, "it was written to"),
        (_replace, "it was replaced by another file"),
    ],
)
def test_a_file_that_changes_is_not_saved(tree: Path, change: Callable[[Path], None], reason: str) -> None:
    path = tree / "a.txt"
    source = _plan(path)
    change(path)

    with pytest.raises(
        SourceChanged, match=f"{path} changed while it was being saved: {reason}. Nothing was committed"
    ):
        source.read(0, 5)


def test_a_file_that_changes_while_it_is_read_is_not_saved(tree: Path, hook: Hook) -> None:
    path = tree / "a.txt"
    source = _plan(path)
    read = os.preadv

    def read_and_touch(*arguments: Any) -> int:
        count = read(*arguments)
        _touch(path)
        return count

    hook(os, "preadv", read_and_touch)
    with pytest.raises(SourceChanged, match="it was written to"):
        source.read(0, 5)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_changes_before_or_while_it_is_looked_into_is_refused(tree: Path, is_open: bool) -> None:
    path = tree / "a.txt"
    source = _plan(path)
    if not is_open:
        _touch(path)

    def look() -> None:
        with source.opened():
            assert is_open
            _touch(path)

    with pytest.raises(SourceChanged, match="it was written to"):
        look()


def test_a_change_during_the_save_leaves_the_store_as_it_was(tree: Path, repo: Repository) -> None:
    source = _plan(tree / "b.bin")
    (tree / "b.bin").write_bytes(b"short")

    with pytest.raises(SourceChanged, match="now has 5"):
        save(repo, Request("snap", [source]))

    assert repo.store.list("snapshots/") == []


def test_a_pipe_in_the_place_of_a_file_does_not_hang(tree: Path) -> None:
    path = tree / "a.txt"
    source = _plan(path)
    path.unlink()
    os.mkfifo(path)

    with pytest.raises(SourceChanged, match="changed while it was being saved"):
        source.read(0, 5)


def test_no_file_stays_open(tree: Path) -> None:
    before = open_descriptors()
    for source in plan_files(["data"]):
        source.read(0, source.size_bytes)

    assert open_descriptors() == before
