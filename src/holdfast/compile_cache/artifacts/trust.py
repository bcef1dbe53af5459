"""Decides whether an artifact may be loaded: signed with the reader's secret, or in a store only the reader can write.

An artifact is code. Without this check, everyone who can write to a store could run code in every process that reads
it.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.compile_cache.artifacts.catalog import StoredVariant
from holdfast.digest import authenticate, hash_kind
from holdfast.errors import HoldfastError, Untrusted
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import MANIFESTS, PACKS, SNAPSHOTS, find_shelf, generation_key, snapshot_stem

KEY_FILE_VARIABLE: Final = "HOLDFAST_CACHE_KEY_FILE"
KEY_VARIABLE: Final = "HOLDFAST_CACHE_KEY"
MIN_SECRET_BYTES: Final = 32
MAX_SECRET_BYTES: Final = 1 << 16

_log = logging.getLogger(__name__)

_MAX_LINKS: Final = 40
_ROOT_UID: Final = 0
_ACLS: Final = ("system.posix_acl_access", "system.posix_acl_default", "system.nfs4_acl", "system.richacl")
"""Attributes in which Linux stores access control lists. A POSIX list that only repeats the mode is not stored."""
_NO_ACL: Final = frozenset({errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class Trust:
    """What this process accepts as proof that an artifact may be loaded."""

    secret: bytes | None = None
    """The key that checks signatures; see `read_secret`."""
    everything: bool = False
    """Load every artifact; the user trusts everyone who can write to the store."""


def read_secret(key_file: str | os.PathLike[str] | None = None) -> bytes | None:
    """Return the secret from a file, or else from the environment, as 32 bytes; None if there is none.

    Raises HoldfastError if a secret is configured but cannot be used: without it, signed artifacts would be refused.
    """
    path = os.fspath(key_file) if key_file is not None else os.environ.get(KEY_FILE_VARIABLE, "")
    if path:
        return _derive(_read_file(path), where=path)
    text = os.environ.get(KEY_VARIABLE, "")
    return _derive(os.fsencode(text), where=f"${KEY_VARIABLE}") if text else None


def sign(statement: bytes, secret: bytes) -> str:
    """Return the signature of a statement, in hex."""
    return authenticate(statement, secret=secret).hex()


def is_signed(variant: StoredVariant, statement: bytes, secret: bytes | None) -> bool:
    """Return whether the statement was signed with this secret."""
    return secret is not None and hmac.compare_digest(variant.mac, sign(statement, secret))


def verify_trusted(store: ObjectStore, variant: StoredVariant, statement: bytes, trust: Trust) -> None:
    """Raise Untrusted unless all artifacts are trusted, this one is signed, or only this user can write to it."""
    if not (trust.everything or is_signed(variant, statement, trust.secret)):
        _verify_store(store, variant, trust)


def verify_can_be_trusted(store: ObjectStore, variant: StoredVariant, trust: Trust) -> None:
    """Raise Untrusted before an artifact is read, if there is no signature to check and other users could write it."""
    if not (trust.everything or (variant.mac and trust.secret)):
        _verify_store(store, variant, trust)


def _verify_store(store: ObjectStore, variant: StoredVariant, trust: Trust) -> None:
    doubt = check_store_trust(store, variant)
    if doubt:
        raise Untrusted(
            f"{variant.name!r} in {store.url} is refused, because loading it runs its code:"
            f" {_describe_mac(variant, trust)}, and {doubt}. Sign artifacts with a key that all users of the store"
            f" share ({KEY_FILE_VARIABLE} or key_file=), or pass trust=True if you trust everyone who can write there",
            name=variant.name,
        )


def check_store_trust(store: ObjectStore, variant: StoredVariant) -> str:
    """Return why other users could have written the record of an artifact; "" if none could.

    Checking the record is enough: it contains the digest of the manifest, which contains the digests of all bytes, and
    reading verifies these.
    """
    if isinstance(store, MemoryStore):
        return ""  # only this process can write to it
    if not isinstance(store, LocalStore):
        return "the store is not a local directory"
    if store.is_network:
        return "the store is on a network filesystem, where other machines can write as any user"
    if variant.snapshot is None:
        return "its record cannot be read"
    record = generation_key(snapshot_stem(variant.name), variant.snapshot.generation)
    keys = [PACKS, MANIFESTS, SNAPSHOTS, find_shelf(variant.name), record]
    return check_ownership(store.url, [os.path.join(store.url, key.rstrip("/")) for key in keys])


def _describe_mac(variant: StoredVariant, trust: Trust) -> str:
    if not variant.mac:
        return "it is not signed"
    return "its signature does not match the key" if trust.secret else "there is no key to check its signature with"


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise HoldfastError(f"the key file {path} cannot be read: {error.strerror}") from error
    fault = check_ownership(path)
    if fault:
        raise HoldfastError(f"the key file {path} is refused, because other users could replace the key: {fault}")
    if mode & 0o044:
        _log.warning("the key file %s can be read by other users, who could sign artifacts; run chmod 600 on it", path)
    return data


def _derive(text: bytes, *, where: str) -> bytes:
    # Strip the newline that most tools write at the end of a file, so that a file and a variable give the same key.
    material = text.strip()
    if not MIN_SECRET_BYTES <= len(material) <= MAX_SECRET_BYTES:
        raise HoldfastError(
            f"{where}: a key has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, this one has {len(material)};"
            " create one with `openssl rand -hex 32`"
        )
    return bytes(hash_kind("compile cache secret", [material]))


def check_ownership(path: str, below: Sequence[str] = ()) -> str:
    """Return how another user than this one or root could have written to `path` or to paths in `below`; "" if none.

    A user who can write to a directory can also replace what is in it, unless the directory is sticky. So every
    directory on the way is checked. Each problem is named with the command that fixes it.
    """
    try:
        *above, _ = _iter_path(path)
        faults = [_check_path(each, status, is_above=True) for each, status in above]
        tree = os.path.realpath(path) if below else ""
        ends = [_check_path(path, os.stat(path), is_above=False, tree=tree)]
        ends += [_check_path_below(each, os.lstat(each), tree=tree) for each in below]
        # One recursive command fixes the whole tree, so the first of these faults is enough.
        faults.append(next(filter(None, ends), ""))
        return "; ".join(dict.fromkeys(filter(None, faults)))  # links can pass through a directory twice
    except OSError as error:
        return f"{error.filename} cannot be checked ({error.strerror})"


def _iter_path(path: str) -> Iterator[tuple[str, os.stat_result]]:
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


def _check_path_below(path: str, status: os.stat_result, *, tree: str) -> str:
    # Holdfast writes no links, and the directories above the target of this one were not checked.
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link"
    return _check_path(path, status, is_above=False, tree=tree)


def _check_path(path: str, status: os.stat_result, *, is_above: bool, tree: str = "") -> str:
    """Return who else can write to `path`, and the command that fixes it: for all of `tree`, if that is not empty."""
    if status.st_uid not in (_ROOT_UID, os.geteuid()):
        return f"{path} belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return ""  # Linux ignores the mode of a link
    recursive, target = ("-R ", shlex.quote(tree)) if tree else ("", shlex.quote(path))
    # Check the ACL before the mode: with an ACL, the group bits of the mode are only the mask of its entries.
    if _has_acl(path):
        return f"{path} has an access control list, which may let others write: run `setfacl {recursive}-b {target}`"
    # In a sticky directory such as /tmp, users cannot move files of other users, but anyone can add files.
    if is_above and status.st_mode & stat.S_ISVTX:
        return ""
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_mode & stat.S_IWOTH:
        return f"{path} can be written by any user ({mode}): run `chmod {recursive}go-w {target}`"
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
