"""Opens directories below a root without following a symbolic link; the root itself may be reached through links.

Each component below the root is opened relative to the handle of its parent, with O_NOFOLLOW. So the result is never
outside the root, even if another process replaces a directory with a link at the same time.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

SEARCH: Final = getattr(os, "O_PATH", os.O_RDONLY)
"""Flags to open a directory only to look up names in it, which needs no permission to read the directory."""

_DIRECTORY: Final = os.O_DIRECTORY | os.O_NOFOLLOW


def open_directory(inside: str, path: str, access: int = SEARCH) -> int:
    """Return a handle to the directory `path`; `inside` is the root, with a slash at the end.

    Raises the OSError of `link_error` if a component below the root is a symbolic link.
    """
    if not path.startswith(inside):
        return os.open(path, access | os.O_DIRECTORY)  # the root or a directory above it
    end = path.find("/", len(inside))
    if end < 0:
        return _open_component(path, None, path, access)
    handle = _open_component(path[:end], None, path[:end], SEARCH)
    while end >= 0:
        start, end = end + 1, path.find("/", end + 1)
        component = path if end < 0 else path[:end]
        parent = handle
        try:
            handle = _open_component(component[start:], parent, component, access if end < 0 else SEARCH)
        finally:
            os.close(parent)
    return handle


def link_error(path: str) -> OSError:
    """Return the error to raise for a symbolic link at `path`, below the root of a store."""
    text = (
        f"{path} is a symbolic link, and links inside a store are never followed;"
        " replace it by its target, or remove it"
    )
    return OSError(errno.ELOOP, text, path)


def _open_component(name: str, parent: int | None, path: str, access: int) -> int:
    try:
        return os.open(name, access | _DIRECTORY, dir_fd=parent)
    except OSError as error:
        # Linux returns ENOTDIR for a link, as for a file; POSIX specifies ELOOP.
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and _is_link(name, parent):
            raise link_error(path) from None
        raise OSError(error.errno, error.strerror, path) from None


def _is_link(name: str, parent: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False  # it was removed in the meantime
