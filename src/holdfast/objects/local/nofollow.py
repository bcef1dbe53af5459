"""Opens directories below a root without following a symbolic link; the root itself may be reached through links.

Each component below the root is opened relative to the handle of the one before, with O_NOFOLLOW. So the result
cannot be outside the root, even if somebody swaps a directory for a link meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

SEARCH: Final = getattr(os, "O_PATH", os.O_RDONLY)
"""How to open a directory in which names are only looked up; like a path, it needs no permission to read."""

_DIRECTORY: Final = os.O_DIRECTORY | os.O_NOFOLLOW


def open_directory(inside: str, path: str, access: int = SEARCH) -> int:
    """Return a handle to the directory `path`; `inside` is the root with a slash at its end.

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
        place = path if end < 0 else path[:end]
        above = handle
        try:
            handle = _open_component(place[start:], above, place, access if end < 0 else SEARCH)
        finally:
            os.close(above)
    return handle


def link_error(path: str) -> OSError:
    """Return what to raise where a symbolic link was found at `path`, below the root of a store."""
    text = (
        f"{path} is a symbolic link, and links inside a store are never followed;"
        " put what it leads to in its place, or remove it"
    )
    return OSError(errno.ELOOP, text, path)


def _open_component(name: str, above: int | None, place: str, access: int) -> int:
    try:
        return os.open(name, access | _DIRECTORY, dir_fd=above)
    except OSError as error:
        # Linux answers ENOTDIR for a link, as it does for a file; POSIX wants ELOOP.
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and _is_link(name, above):
            raise link_error(place) from None
        raise OSError(error.errno, error.strerror, place) from None


def _is_link(name: str, above: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode)
    except OSError:
        return False  # removed meanwhile
