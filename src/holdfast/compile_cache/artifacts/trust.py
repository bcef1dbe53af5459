"""Decides whether an artifact may be loaded: signed with the reader's secret, or in a store only the reader can write.

An artifact is code. Without this check, everyone who can write to a store could run code in every process that reads
it.
"""

from __future__ import annotations

import hmac
import logging
import os
from dataclasses import dataclass
from typing import Final

from holdfast.compile_cache.artifacts.catalog import StoredVariant
from holdfast.compile_cache.artifacts.ownership import check_ownership
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


def is_signed(found: StoredVariant, statement: bytes, secret: bytes | None) -> bool:
    """Return whether the statement was signed with this secret."""
    return secret is not None and hmac.compare_digest(found.mac, sign(statement, secret))


def verify_trusted(store: ObjectStore, found: StoredVariant, statement: bytes, trust: Trust) -> None:
    """Raise Untrusted unless all artifacts are trusted, this one is signed, or only this user can write to it."""
    if not (trust.everything or is_signed(found, statement, trust.secret)):
        _verify_store(store, found, trust)


def verify_promising(store: ObjectStore, found: StoredVariant, trust: Trust) -> None:
    """Raise Untrusted before an artifact is read, if there is no signature to check and other users could write it."""
    if not (trust.everything or (found.mac and trust.secret)):
        _verify_store(store, found, trust)


def _verify_store(store: ObjectStore, found: StoredVariant, trust: Trust) -> None:
    doubt = check_store_trust(store, found)
    if doubt:
        raise Untrusted(
            f"{found.name!r} in {store.url} is refused, because loading it runs its code:"
            f" {_describe_mac(found, trust)}, and {doubt}. Sign artifacts with a key that all users of the store share"
            f" ({KEY_FILE_VARIABLE} or key_file=), or pass trust=True if you trust everyone who can write there",
            name=found.name,
        )


def check_store_trust(store: ObjectStore, found: StoredVariant) -> str:
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
    if found.snapshot is None:
        return "its record cannot be read"
    record = generation_key(snapshot_stem(found.name), found.snapshot.generation)
    keys = [PACKS, MANIFESTS, SNAPSHOTS, find_shelf(found.name), record]
    return check_ownership(store.url, [os.path.join(store.url, key.rstrip("/")) for key in keys])


def _describe_mac(found: StoredVariant, trust: Trust) -> str:
    if not found.mac:
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
