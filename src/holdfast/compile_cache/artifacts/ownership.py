"""Checks which users could have written a file: by owner, mode and ACL of it and of every directory and link above."""

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
"""Attributes in which Linux stores access control lists. A POSIX list that only repeats the mode is not stored."""
_NO_ACL: Final = frozenset({errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP})


def check_ownership(path: str, below: Sequence[str] = ()) -> str:
    """Return how another user than this one or root could have written to `path` or to paths in `below`; "" if none.

    A user who can write to a directory can also replace what is in it, unless the directory is sticky. So every
    directory on the way is checked. Each problem is named with the command that fixes it.
    """
    try:
        *above, _ = _iter_way(path)
        faults = [_find_fault(each, status, is_above=True) for each, status in above]
        tree = os.path.realpath(path) if below else ""
        ends = [_find_fault(path, os.stat(path), is_above=False, tree=tree)]
        ends += [_find_fault_below(each, os.lstat(each), tree=tree) for each in below]
        # One recursive command fixes the whole tree, so the first of these faults is enough.
        faults.append(next(filter(None, ends), ""))
        return "; ".join(dict.fromkeys(filter(None, faults)))  # links can pass through a directory twice
    except OSError as error:
        return f"{error.filename} cannot be checked ({error.strerror})"


def _iter_way(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each directory and link on the way to `path`, following links one by one, and last its target."""
    here, links = "/", 0
    ahead = [part for part in reversed(os.path.abspath(path).split("/")) if part]
    yield here, os.lstat(here)
    while ahead:
        part = ahead.pop()
        if part == os.pardir:
            here = os.path.dirname(here)
            continue
        entry = os.path.join(here, part)
        status = os.lstat(entry)
        yield entry, status
        if not stat.S_ISLNK(status.st_mode):
            here = entry
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(0, "too many links", entry)
        target = os.readlink(entry)
        here = "/" if os.path.isabs(target) else here
        ahead += [part for part in reversed(target.split("/")) if part not in ("", os.curdir)]


def _find_fault_below(path: str, status: os.stat_result, *, tree: str) -> str:
    # Holdfast writes no links, and the directories above the target of this one were not checked.
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link"
    return _find_fault(path, status, is_above=False, tree=tree)


def _find_fault(path: str, status: os.stat_result, *, is_above: bool, tree: str = "") -> str:
    """Return who else can write to `path`, and the command that fixes it: for all of `tree`, if that is not empty."""
    if status.st_uid not in (_ROOT_UID, os.geteuid()):
        return f"{path} belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return ""  # the mode of a link means nothing
    recursive, target = ("-R ", shlex.quote(tree)) if tree else ("", shlex.quote(path))
    # Check the ACL before the mode: with an ACL, the group bits of the mode are only the mask of its entries.
    if _has_acl(path):
        return f"{path} has an access control list, which may let others write: run `setfacl {recursive}-b {target}`"
    # In a sticky directory such as /tmp, users cannot move files of other users, but anyone can add files.
    if is_above and status.st_mode & stat.S_ISVTX:
        return ""
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_mode & stat.S_IWOTH:
        return f"{path} can be written by anybody ({mode}): run `chmod {recursive}go-w {target}`"
    # Also if the group has the name of this user: the local tables need not list all members of a group.
    if status.st_mode & stat.S_IWGRP:
        return f"{path} can be written by its group {status.st_gid} ({mode}): run `chmod {recursive}g-w {target}`"
    return ""


def _has_acl(path: str) -> bool:
    """Return whether a file or directory has an access control list, or a default one for new files in it."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "access control lists cannot be read on this system", path)
    for name in _ACLS:
        try:
            os.getxattr(path, name, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_ACL:
                raise
        else:
            return True
    return False
