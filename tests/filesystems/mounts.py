"""Filesystems mounted for a test: images on loop devices, a tmpfs, an overlay, and FUSE filesystems."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.filesystems.debian import require

_IMAGE_BYTES: Final = 600 << 20


@dataclass(frozen=True, slots=True)
class Mount:
    """A filesystem that this machine's own kernel, or a FUSE program, can mount."""

    programs: dict[str, str]
    """What it takes, with the Debian package of each program."""
    mount: Callable[[Path, Path], None]
    """Mounts it at the second path; the first is a folder for what it needs."""


def _run(*words: str | Path) -> str:
    try:
        return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout.strip()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"`{' '.join(map(str, words))}` is not possible here: {error.stderr.strip()}")


def _mount_image(make: list[str], mount: list[str], folder: Path, point: Path) -> None:
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES)
    _run(*make, image)
    _run(*mount, image, point)


def _mount_device(make: list[str], mount: list[str], folder: Path, point: Path) -> None:
    """Mount an image by a program that wants a block device."""
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES)
    _run(*make, image)
    device = _run("losetup", "--find", "--show", image)
    try:
        _run(*mount, device, point)
    finally:
        # It goes when nobody uses it any more.
        _run("losetup", "--detach", device)


def _mount_tmpfs(_folder: Path, point: Path) -> None:
    _run("mount", "-t", "tmpfs", "tmpfs", point)


def _mount_bindfs(folder: Path, point: Path) -> None:
    _run("bindfs", folder, point)


def _mount_overlay(folder: Path, point: Path) -> None:
    parts = {name: folder / name for name in ("lower", "upper", "work")}
    for part in parts.values():
        part.mkdir()
    options = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
    _run("mount", "-t", "overlay", "overlay", "-o", options, point)


MOUNTS: Final[dict[str, Mount]] = {
    "tmpfs": Mount({}, _mount_tmpfs),
    "ext4": Mount(
        {"mkfs.ext4": "e2fsprogs"},
        lambda folder, point: _mount_image(["mkfs.ext4", "-q"], ["mount", "-o", "loop"], folder, point),
    ),
    "xfs": Mount(
        {"mkfs.xfs": "xfsprogs"},
        lambda folder, point: _mount_image(["mkfs.xfs", "-q"], ["mount", "-o", "loop"], folder, point),
    ),
    "btrfs": Mount(
        {"mkfs.btrfs": "btrfs-progs"},
        lambda folder, point: _mount_image(["mkfs.btrfs", "-q"], ["mount", "-o", "loop"], folder, point),
    ),
    "overlay": Mount({}, _mount_overlay),
    "exfat (FUSE)": Mount(
        {"mkfs.exfat": "exfatprogs", "mount.exfat-fuse": "exfat-fuse"},
        lambda folder, point: _mount_device(["mkfs.exfat"], ["mount.exfat-fuse"], folder, point),
    ),
    "ntfs (FUSE)": Mount(
        {"mkfs.ntfs": "ntfs-3g", "ntfs-3g": "ntfs-3g"},
        lambda folder, point: _mount_image(["mkfs.ntfs", "-q", "-F", "-f"], ["ntfs-3g"], folder, point),
    ),
    "bindfs (FUSE)": Mount({"bindfs": "bindfs"}, _mount_bindfs),
}


@contextmanager
def mounted(name: str, folder: Path) -> Iterator[Path]:
    """Mount a filesystem; return where. Skips the test where that is not allowed."""
    require(MOUNTS[name].programs)
    point = folder / "mounted"
    point.mkdir()
    (folder / "parts").mkdir()
    MOUNTS[name].mount(folder / "parts", point)
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)
