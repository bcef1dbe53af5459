"""Opening directories below a root without following links."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.objects.local.files import open_directory
from tests.kit.scripted_files import open_descriptors


def identify(handle: int) -> tuple[int, int]:
    """Return device and inode of an open directory, and close it."""
    try:
        status = os.fstat(handle)
    finally:
        os.close(handle)
    return status.st_dev, status.st_ino


def identify_path(path: Path) -> tuple[int, int]:
    return path.stat().st_dev, path.stat().st_ino


@pytest.mark.parametrize("below", ["", "a", "a/b", "a/b/c"])
def test_a_directory_below_the_root_is_opened(tmp_path: Path, below: str) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    found = identify(open_directory(f"{tmp_path}/", str(tmp_path / below)))
    assert found == identify_path(tmp_path / below)


@pytest.mark.parametrize("link", ["a", "a/b", "a/b/c"])
def test_a_link_below_the_root_is_refused_and_named(tmp_path: Path, link: str) -> None:
    (tmp_path / "root/a/b/c").mkdir(parents=True)
    path = tmp_path / "root" / link
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    before = open_descriptors()
    with pytest.raises(OSError, match=f"{path} is a symbolic link") as caught:
        open_directory(f"{tmp_path}/root/", f"{tmp_path}/root/a/b/c")
    assert caught.value.errno == errno.ELOOP
    assert open_descriptors() == before


def test_links_above_the_root_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real/root/a").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    found = identify(open_directory(f"{tmp_path}/link/root/", f"{tmp_path}/link/root/a"))
    assert found == identify_path(tmp_path / "real/root/a")


@pytest.mark.parametrize(
    ("below", "code"), [("absent", errno.ENOENT), ("file", errno.ENOTDIR), ("file/x", errno.ENOTDIR)]
)
def test_another_error_is_raised_as_it_is_with_the_path(tmp_path: Path, below: str, code: int) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=str(tmp_path)) as caught:
        open_directory(f"{tmp_path}/", str(tmp_path / below))
    assert caught.value.errno == code
