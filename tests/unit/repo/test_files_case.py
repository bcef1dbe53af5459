"""Restoring to a filesystem that ignores case: two names that would be one file are refused, not merged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import BadName
from holdfast.repo import files
from holdfast.repo.files import restore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.write.writer import Request, WriteOptions, save


class FoldingOs:
    """The calls of `os` on a filesystem that ignores case: every name is taken in lower case."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, *args: Any, **kwargs: Any) -> int:
        return os.open(path.lower() if "dir_fd" in kwargs else path, *args, **kwargs)

    def stat(self, path: str, **kwargs: Any) -> os.stat_result:
        return os.stat(path.lower(), **kwargs)

    def mkdir(self, path: str, **kwargs: Any) -> None:
        os.mkdir(path.lower(), **kwargs)

    def unlink(self, path: str, **kwargs: Any) -> None:
        os.unlink(path.lower(), **kwargs)

    def rename(self, source: str, target: str, **kwargs: Any) -> None:
        os.rename(source.lower(), target.lower(), **kwargs)

    def link(self, source: str, target: str, **kwargs: Any) -> None:
        os.link(source.lower(), target.lower(), **kwargs)


@pytest.fixture
def folding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "os", FoldingOs())


def _restore(repo: Repository, target: Path, contents: dict[str, bytes], *, overwrite: bool) -> None:
    sources = [BytesSource(name, data) for name, data in contents.items()]
    save(repo, Request("snap", sources, options=WriteOptions(overwrite=True)))
    with open_snapshot(repo, read_snapshot(repo.store, "snap")) as reader:
        restore(reader, str(target), overwrite=overwrite)


@pytest.mark.usefixtures("folding")
@pytest.mark.parametrize("names", [("A.txt", "a.txt"), ("Data/x", "data/x"), ("Straße", "straße")])
@pytest.mark.parametrize("has_old", [False, True])
def test_names_that_differ_only_in_case_are_refused_where_they_are_one_file(
    repo: Repository, tmp_path: Path, names: tuple[str, str], has_old: bool
) -> None:
    if has_old:
        _restore(repo, tmp_path / "out", {names[0]: b"old"}, overwrite=False)

    with pytest.raises(BadName, match="are one file on this filesystem, which ignores case") as caught:
        _restore(repo, tmp_path / "out", {names[0]: b"first", names[1]: b"second"}, overwrite=has_old)

    assert all(repr(name) in str(caught.value) for name in names)
    (left,) = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert left.read_bytes() == b"first"


@pytest.mark.parametrize("overwrite", [False, True])
def test_names_that_differ_only_in_case_are_restored_where_case_counts(
    repo: Repository, tmp_path: Path, overwrite: bool
) -> None:
    contents = {"A.txt": b"first", "a.txt": b"second", "Data/x": b"third", "data/x": b"fourth"}
    for _ in range(1 + overwrite):
        _restore(repo, tmp_path / "out", contents, overwrite=overwrite)

    found = {
        path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in (tmp_path / "out").rglob("*.txt")
    }
    assert found == {"A.txt": b"first", "a.txt": b"second"}
    assert (tmp_path / "out/Data/x").read_bytes() == b"third"


@pytest.mark.usefixtures("folding")
def test_a_file_of_another_case_is_replaced_if_that_is_asked_for(repo: Repository, tmp_path: Path) -> None:
    _restore(repo, tmp_path / "out", {"A.txt": b"old"}, overwrite=False)

    _restore(repo, tmp_path / "out", {"a.txt": b"new"}, overwrite=True)

    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == [b"new"]
