"""Who could have written a file: its owner and mode, and those of every directory and link that leads to it."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from typing import Final

_MAX_LINKS: Final = 40
_ROOT_UID: Final = 0


def find_intruder(path: str, below: Sequence[str] = ()) -> str:
    """Say how somebody else than this user or root could have put something at `path`, or at those below; "" if nobody.

    Whoever can write to a directory can put another one in the place of what is in it, unless the directory is sticky.
    """
    try:
        for place, status in _iter_way(path):
            fault = _find_fault(place, status, is_way=True)
            if fault:
                return fault
        faults = [_find_fault(path, os.stat(path), is_way=False)]
        faults += [_find_fault_below(place, os.lstat(place)) for place in below]
        return next(filter(None, faults), "")
    except OSError as error:
        return f"{error.filename} cannot be looked at ({error.strerror})"


def _iter_way(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each directory and link that is passed on the way to `path`, link by link, and what it ends at."""
    here, links = "/", 0
    ahead = [part for part in reversed(os.path.abspath(path).split("/")) if part]
    yield here, os.lstat(here)
    while ahead:
        part = ahead.pop()
        if part == os.pardir:
            here = os.path.dirname(here)
            continue
        place = os.path.join(here, part)
        status = os.lstat(place)
        yield place, status
        if not stat.S_ISLNK(status.st_mode):
            here = place
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(0, "too many links", place)
        target = os.readlink(place)
        here = "/" if os.path.isabs(target) else here
        ahead += [part for part in reversed(target.split("/")) if part not in ("", os.curdir)]


def _find_fault_below(place: str, status: os.stat_result) -> str:
    # Where it leads was not walked, and nothing that Holdfast writes is one.
    if stat.S_ISLNK(status.st_mode):
        return f"{place} is a link"
    return _find_fault(place, status, is_way=False)


def _find_fault(place: str, status: os.stat_result, *, is_way: bool) -> str:
    if status.st_uid not in (_ROOT_UID, os.geteuid()):
        return f"{place} belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return ""  # the mode of a link means nothing
    # In a sticky directory, such as /tmp, nobody can move what belongs to another; but anybody can add to it.
    if is_way and status.st_mode & stat.S_ISVTX:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return f"{place} can be written by anybody (mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
        return f"{place} can be written by its group {status.st_gid} (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _is_private_group(gid: int) -> bool:
    """Tell whether a group is this user's alone, as many systems make one for each user and let it write."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and gid == user.pw_gid and set(group.gr_mem) <= {user.pw_name}
