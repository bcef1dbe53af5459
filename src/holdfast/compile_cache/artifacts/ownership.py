"""Who could have written a file: its owner, mode and ACL, and those of every directory and link that leads to it."""

from __future__ import annotations

import errno
import os
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import Final

_MAX_LINKS: Final = 40
_ROOT_UID: Final = 0

_ACLS: Final = ("system.posix_acl_access", "system.posix_acl_default", "system.nfs4_acl", "system.richacl")
"""Where Linux keeps access control lists. One that says no more than the mode is not kept as a POSIX one."""
_NO_ACL: Final = frozenset({errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP})


def check_ownership(path: str, below: Sequence[str] = ()) -> str:
    """Say how somebody else than this user or root could have put something at `path`, or at those below; "" if nobody.

    Whoever can write to a directory can put another one in the place of what is in it, unless the directory is sticky.
    Every directory on the way that is at fault is named, each with the command that cures it.
    """
    try:
        *way, _ = _iter_way(path)
        faults = [_find_fault(place, status, is_way=True) for place, status in way]
        tree = os.path.realpath(path) if below else ""
        ends = [_find_fault(path, os.stat(path), is_way=False, tree=tree)]
        ends += [_find_fault_below(place, os.lstat(place), tree=tree) for place in below]
        # One command cures everything below, so the first of these faults is enough.
        faults.append(next(filter(None, ends), ""))
        return "; ".join(dict.fromkeys(filter(None, faults)))  # links can lead through a directory twice
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


def _find_fault_below(place: str, status: os.stat_result, *, tree: str) -> str:
    # Where it leads was not walked, and nothing that Holdfast writes is one.
    if stat.S_ISLNK(status.st_mode):
        return f"{place} is a link"
    return _find_fault(place, status, is_way=False, tree=tree)


def _find_fault(place: str, status: os.stat_result, *, is_way: bool, tree: str = "") -> str:
    """Say who else can write to `place`, and the command that ends it: for all of `tree`, if that is given."""
    if status.st_uid not in (_ROOT_UID, os.geteuid()):
        return f"{place} belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return ""  # the mode of a link means nothing
    recursive, target = ("-R ", shlex.quote(tree)) if tree else ("", shlex.quote(place))
    # First, for the group's bits of the mode are then the most that any entry of the list may do.
    if _has_acl(place):
        return f"{place} has an access control list, which may let others write: run `setfacl {recursive}-b {target}`"
    # In a sticky directory, such as /tmp, nobody can move what belongs to another; but anybody can add to it.
    if is_way and status.st_mode & stat.S_ISVTX:
        return ""
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_mode & stat.S_IWOTH:
        return f"{place} can be written by anybody ({mode}): run `chmod {recursive}go-w {target}`"
    # Also if the group seems to be this user's own: whom a group holds, this machine's tables do not fully tell.
    if status.st_mode & stat.S_IWGRP:
        return f"{place} can be written by its group {status.st_gid} ({mode}): run `chmod {recursive}g-w {target}`"
    return ""


def _has_acl(place: str) -> bool:
    """Tell whether a file or directory has an access control list, or a default one for what is made in it."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "access control lists cannot be read on this system", place)
    for name in _ACLS:
        try:
            os.getxattr(place, name, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_ACL:
                raise
        else:
            return True
    return False
