"""Raw filesystem calls: the type of the filesystem that contains a path, and what is made durable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.objects.local.files import PosixFiles, find_mount_type
from tests.kit.hooking import Hook

MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:40 / /mnt rw - autofs systemd-1 rw
31 30 0:41 / /mnt rw - nfs4 server:/export rw
32 22 0:42 / /mnt/data rw - xfs /dev/sdb rw
33 22 0:43 / /with\\040space rw master:1 - fuse.sshfs host: rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me", "ext4"),
        ("/", "ext4"),
        ("/mnt", "nfs4"),
        ("/mnt/x", "nfs4"),
        ("/mnt/data", "xfs"),
        ("/mnt/database", "nfs4"),
        ("/with space/x", "fuse.sshfs"),
    ],
)
def test_the_filesystem_type_is_that_of_the_deepest_mount(path: str, kind: str) -> None:
    assert find_mount_type(MOUNTS, path) == kind


def test_this_machine_knows_the_type_of_its_filesystem(tmp_path: Path) -> None:
    assert PosixFiles().read_filesystem_type(str(tmp_path / "absent"))


def test_a_directory_is_synced_by_its_own_handle(tmp_path: Path, hook: Hook) -> None:
    synced: list[int] = []
    hook(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))

    PosixFiles(str(tmp_path)).sync_directory(str(tmp_path))

    assert synced == [tmp_path.stat().st_ino]
