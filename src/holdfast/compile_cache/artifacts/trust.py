"""Whether an artifact may be run: signed with a secret that its reader has, or in a store that only its reader writes.

An artifact is code. Whoever can write to a store could otherwise run theirs in every process that reads it.
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
    """What makes an artifact of a store trustworthy to this process."""

    secret: bytes | None = None
    """What signatures are checked with; see `read_secret`."""
    everything: bool = False
    """The user has said so."""


def read_secret(key_file: str | os.PathLike[str] | None = None) -> bytes | None:
    """Return the secret of a file, else of the environment, as 32 bytes; None if there is none.

    Raises HoldfastError if one is named that cannot be used: to go on without would refuse what it was meant to admit.
    """
    place = os.fspath(key_file) if key_file is not None else os.environ.get(KEY_FILE_VARIABLE, "")
    if place:
        return _derive(_read_file(place), where=place)
    text = os.environ.get(KEY_VARIABLE, "")
    return _derive(os.fsencode(text), where=f"${KEY_VARIABLE}") if text else None


def sign(statement: bytes, secret: bytes) -> str:
    """Return the signature of a statement, in hex."""
    return authenticate(statement, secret=secret).hex()


def is_signed(found: StoredVariant, statement: bytes, secret: bytes | None) -> bool:
    """Tell whether somebody who has the secret made this statement."""
    return secret is not None and hmac.compare_digest(found.mac, sign(statement, secret))


def verify_trusted(store: ObjectStore, found: StoredVariant, statement: bytes, trust: Trust) -> None:
    """Raise Untrusted unless the user, a signature or the ownership of the store vouches for the statement."""
    if not (trust.everything or is_signed(found, statement, trust.secret)):
        _refuse_doubtful(store, found, trust)


def verify_promising(store: ObjectStore, found: StoredVariant, trust: Trust) -> None:
    """Raise Untrusted for what no signature can make up for, before memory is taken for what strangers have written."""
    if not (trust.everything or (found.mac and trust.secret)):
        _refuse_doubtful(store, found, trust)


def _refuse_doubtful(store: ObjectStore, found: StoredVariant, trust: Trust) -> None:
    doubt = check_store_trust(store, found)
    if doubt:
        raise Untrusted(
            f"{found.name!r} in {store.url} is refused, for to load it is to run it: {_describe_mac(found, trust)}, and"
            f" {doubt}. Sign artifacts with a key that all who share the store have ({KEY_FILE_VARIABLE} or key_file=),"
            " or say trust=True if you trust whoever can write there",
            name=found.name,
        )


def check_store_trust(store: ObjectStore, found: StoredVariant) -> str:
    """Return why others than this user might have written the record of an artifact; "" if nobody can have.

    The record is enough: it holds the digest of the manifest, and that the digests of all bytes, which reading checks.
    """
    if isinstance(store, MemoryStore):
        return ""  # whoever wrote there is this process
    if not isinstance(store, LocalStore):
        return "the store is not a directory of this machine"
    if store.is_network:
        return "other machines may write to its filesystem, as whom they like"
    if found.snapshot is None:
        return "its record cannot be read"
    record = generation_key(snapshot_stem(found.name), found.snapshot.generation)
    places = [PACKS, MANIFESTS, SNAPSHOTS, find_shelf(found.name), record]
    return check_ownership(store.url, [os.path.join(store.url, place.rstrip("/")) for place in places])


def _describe_mac(found: StoredVariant, trust: Trust) -> str:
    if not found.mac:
        return "it is not signed"
    return "its signature is not right" if trust.secret else "there is no key to check its signature with"


def _read_file(place: str) -> bytes:
    try:
        with open(place, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise HoldfastError(f"the key file {place} cannot be read: {error.strerror}") from error
    intruder = check_ownership(place)
    if intruder:
        raise HoldfastError(f"the key file {place} is refused, for others could choose the key: {intruder}")
    if mode & 0o044:
        _log.warning("the key file %s can be read by others, who could sign artifacts; run chmod 600 on it", place)
    return data


def _derive(text: bytes, *, where: str) -> bytes:
    # Without the newline that most tools end a file with, so that a file and a variable give the same key.
    material = text.strip()
    if not MIN_SECRET_BYTES <= len(material) <= MAX_SECRET_BYTES:
        raise HoldfastError(
            f"{where}: a key has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, this one has {len(material)};"
            " make one with `openssl rand -hex 32`"
        )
    return bytes(hash_kind("compile cache secret", [material]))
