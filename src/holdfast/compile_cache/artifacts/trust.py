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
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from holdfast.compile_cache.artifacts.catalog import StoredVariant
from holdfast.digest import authenticate, hash_kind
from holdfast.errors import Corrupt, HoldfastError, NewerFormat, Untrusted
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import MANIFESTS, PACKS, SNAPSHOTS, find_shelf, generation_key, snapshot_stem
from holdfast.repo.format.record import MAX_RECORD_BYTES, decode_record
from holdfast.repo.names.snapshots import CommittedSnapshot, parse_snapshot

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

    The record is read again, from the handle that was checked, and must be that of the variant: the name may have
    belonged to another file when the variant was read. Checking the record is enough: it contains the digest of the
    manifest, which contains the digests of all bytes, and reading verifies these.
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
    keys = [key.rstrip("/") for key in (PACKS, MANIFESTS, SNAPSHOTS, find_shelf(variant.name), record)]
    with ExitStack() as handles:
        opened, doubt = open_checked(store.url, keys, handles)
        if doubt:
            return doubt
        # The type was found by path before, and another filesystem may have been there.
        if LocalStore(opened[0].alias).is_network:
            return "the store is on a network filesystem, where other machines can write as any user"
        return "" if _read_snapshot(opened[-1]) == variant.snapshot else "its record was replaced while it was read"


def _read_snapshot(record: _Opened) -> CommittedSnapshot | None:
    """Return the snapshot of a record that is held open; None if it has none."""
    try:
        fields = decode_record(record.read(MAX_RECORD_BYTES + 4096), key=record.path)
        return parse_snapshot(fields) if fields else None
    except (Corrupt, NewerFormat, OSError):
        return None


def _describe_mac(variant: StoredVariant, trust: Trust) -> str:
    if not variant.mac:
        return "it is not signed"
    return "its signature does not match the key" if trust.secret else "there is no key to check its signature with"


def _read_file(path: str) -> bytes:
    with ExitStack() as handles:
        opened, fault = open_checked(path, (), handles)
        if not opened:
            raise HoldfastError(f"the key file {path} cannot be read: {fault}")
        if fault:
            raise HoldfastError(f"the key file {path} is refused, because other users could replace the key: {fault}")
        if opened[0].status.st_mode & 0o044:
            _log.warning(
                "the key file %s can be read by other users, who could sign artifacts; run chmod 600 on it", path
            )
        try:
            return opened[0].read(MAX_SECRET_BYTES + 1)
        except OSError as error:
            raise HoldfastError(f"the key file {path} cannot be read: {error.strerror}") from error


def _derive(text: bytes, *, where: str) -> bytes:
    # Strip the newline that most tools write at the end of a file, so that a file and a variable give the same key.
    material = text.strip()
    if not MIN_SECRET_BYTES <= len(material) <= MAX_SECRET_BYTES:
        raise HoldfastError(
            f"{where}: a key has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, this one has {len(material)};"
            " create one with `openssl rand -hex 32`"
        )
    return bytes(hash_kind("compile cache secret", [material]))


@contextmanager
def as_private_file(data: bytes, name: str, parent: str | None = None) -> Iterator[str]:
    """Write bytes into a new file, in a temporary directory, and yield a path for the loader of shared libraries.

    The path leads to the directory by an open handle: others who can write to the directory for temporary files cannot
    put another file there. The file is deleted at the end; the mapping of a loaded library stays valid.
    """
    folder = tempfile.mkdtemp(prefix="holdfast-kernels-", dir=parent)
    with ExitStack() as cleanup:
        cleanup.callback(_remove_folder, folder)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        cleanup.callback(os.close, handle)
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise OSError(errno.EPERM, "another user has replaced this directory", folder)
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=handle)
        cleanup.callback(os.unlink, name, dir_fd=handle)
        with open(file, "wb") as target:
            target.write(data)
        yield f"/proc/self/fd/{handle}/{name}" if sys.platform == "linux" else os.path.join(folder, name)


def _remove_folder(folder: str) -> None:
    # By rmdir: if another user has put a directory of his own there, its content stays.
    with suppress(OSError):
        os.rmdir(folder)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file, directory or link that is held open: what was checked is then what is read, whatever becomes of its name.

    A handle of O_PATH, which needs no permission to read.
    """

    path: str
    handle: int
    status: os.stat_result

    @property
    def alias(self) -> str:
        """A path that leads to what is held open."""
        return f"/proc/self/fd/{self.handle}"

    def read(self, limit_bytes: int) -> bytes:
        """Return the bytes of the file, at most so many."""
        if not stat.S_ISREG(self.status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", self.path)
        with open(self.alias, "rb") as file:
            return file.read(limit_bytes)


def open_checked(path: str, below: Sequence[str], handles: ExitStack) -> tuple[list[_Opened], str]:
    """Open `path`, and keys below it of which each follows its parent; return them, and how others could write to them.

    Each is opened relative to the handle of its parent, and is checked by its own handle. A user who can write to a
    directory can also replace what is in it, unless the directory is sticky. So every directory on the way is checked.
    Each problem is named with the command that fixes it; "" if there is none.
    """
    try:
        *above, opened = _iter_path(path, handles)
        tree = opened.path if below else ""
        found = {"": _Opened(path, opened.handle, opened.status)}
        for key in below:
            parent, _, name = key.rpartition("/")
            found[key] = _open(name, found[parent], handles)
        faults = [_check_path(each, is_above=True) for each in above]
        # First the last one, the record: it needs a second command. One command fixes everything else in the tree.
        ends = [_check_path_below(found[key], tree=tree, is_record=key == below[-1]) for key in reversed(below)]
        ends.append(_check_path(found[""], is_above=False, tree=tree))
        faults.append(next(filter(None, ends), ""))
        return list(found.values()), "; ".join(dict.fromkeys(filter(None, faults)))  # links can pass a directory twice
    except OSError as error:
        return [], f"{error.filename} cannot be checked ({error.strerror})"


def _open(name: str, parent: _Opened | None, handles: ExitStack) -> _Opened:
    path = os.path.join(parent.path, name) if parent else name
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "access control lists cannot be read on this system", path)
    try:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent.handle if parent else None)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    handles.callback(os.close, handle)
    return _Opened(path, handle, os.fstat(handle))


def _iter_path(path: str, handles: ExitStack) -> Iterator[_Opened]:
    """Yield each directory and link on the way to `path`, following links one by one, and last its target."""
    above, links = [_open("/", None, handles)], 0
    ahead = [part for part in reversed(os.path.abspath(path).split("/")) if part]
    yield above[0]
    while ahead:
        part = ahead.pop()
        if part == os.pardir:
            above = above[:-1] or above  # the parent of the root is the root
            continue
        entry = _open(part, above[-1], handles)
        yield entry
        if not stat.S_ISLNK(entry.status.st_mode):
            above.append(entry)
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(0, "too many links", entry.path)
        target = os.readlink("", dir_fd=entry.handle)
        if os.path.isabs(target):
            del above[1:]
        ahead += [part for part in reversed(target.split("/")) if part not in ("", os.curdir)]


def _check_path_below(opened: _Opened, *, tree: str, is_record: bool) -> str:
    # Holdfast writes no links, and the directories above the target of this one were not checked.
    if stat.S_ISLNK(opened.status.st_mode):
        return f"{opened.path} is a link"
    fault = _check_path(opened, is_above=False, tree=tree)
    if not fault or not is_record or opened.status.st_uid not in _list_owners():
        return fault
    # Nothing shows later who has written into it until now.
    return f"{fault}, then `holdfast -s {shlex.quote(tree)} cache clear --yes`, since others may have changed it"


def _list_owners() -> tuple[int, int]:
    return _ROOT_UID, os.geteuid()


def _check_path(opened: _Opened, *, is_above: bool, tree: str = "") -> str:
    """Return who else can write to a path, and the command that fixes it: for all of `tree`, if that is not empty."""
    path, status = opened.path, opened.status
    if status.st_uid not in _list_owners():
        return f"{path} belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return ""  # Linux ignores the mode of a link
    recursive, target = ("-R ", shlex.quote(tree)) if tree else ("", shlex.quote(path))
    # Check the ACL before the mode: with an ACL, the group bits of the mode are only the mask of its entries.
    if _has_acl(opened):
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


def _has_acl(opened: _Opened) -> bool:
    """Return whether a file or directory has an access control list, or a default one for new files in it."""
    for name in _ACLS:
        try:
            os.getxattr(opened.alias, name)
        except OSError as error:
            if error.errno not in _NO_ACL:
                raise OSError(error.errno, error.strerror, opened.path) from None
        else:
            return True
    return False
