"""A second user of this machine, and the access control lists that let one in."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Final

import pytest

STRANGER: Final = 61234
"""The number of a user whom no table of this machine knows."""

# From linux/posix_acl_xattr.h and posix_acl.h.
_VERSION: Final = 2
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY: Final = 0xFFFFFFFF


def set_acl(path: Path, attribute: str = "system.posix_acl_access", *, permissions: int | None) -> None:
    """Let the stranger do what `permissions` (rwx as three bits) say, if any; skip where lists are not supported."""
    mode = path.stat().st_mode
    entries = [(_OWNER, mode >> 6 & 7, _NOBODY), (_GROUP, mode >> 3 & 7, _NOBODY), (_OTHER, mode & 7, _NOBODY)]
    if permissions is not None:
        entries += [(_USER, permissions, STRANGER), (_MASK, permissions | mode >> 3 & 7, _NOBODY)]
    data = struct.pack("<I", _VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in sorted(entries))
    try:
        os.setxattr(path, attribute, data)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EOPNOTSUPP):
            pytest.skip(f"the filesystem of {path} has no access control lists")
        raise
