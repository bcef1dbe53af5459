"""The artifacts of a store: their names, the contents of their records, and how to find them. Does not need torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.digest import DIGEST_BYTES
from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import RESERVED, escape_name, split_stem, verify_name
from holdfast.repo.format.record import Fields
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, NameState, iter_names, read_name

ARTIFACTS: Final = f"{RESERVED}compiled/"
"""Prefix of artifact names; the key's digest, a slash and the variant number follow."""
ARTIFACT_FORMAT: Final = 1
DAY_S: Final = 86400.0
"""The use of an artifact is recorded if its record is older."""

_NAME: Final = re.compile(rf"{re.escape(ARTIFACTS)}([0-9a-f]{{{2 * DIGEST_BYTES}}})/(0|[1-9][0-9]{{0,8}})\Z")
_ESCAPED_SLASH: Final = escape_name("a/").removeprefix("a")
_MAX_GAP: Final = 2
"""How many unused variant numbers in a row are skipped: copying or deleting single artifacts can leave gaps."""
_UNSIGNED: Final = frozenset({"content", "mac"})


@dataclass(frozen=True, slots=True)
class StoredVariant:
    """One variant of a key, as described by its record. The record is not trusted yet."""

    name: str
    key_digest: str
    """In hex; empty if the name is not that of an artifact."""
    snapshot: CommittedSnapshot | None
    """The snapshot that stores it; None if its record is damaged."""
    guards: str = ""
    """The sizes that it is valid for, as an expression; empty if it is valid for all."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Part of the key -> digest of that part, in hex."""
    seconds: float = 0.0
    """How long it took to compile, which is the time that a hit saves."""
    torch: str = ""
    """Version of torch that compiled it."""
    producer: str = ""
    """Name of the host that compiled it."""
    content: str = ""
    """Digest of the statement of its key, metadata and entries; detects accidental damage."""
    mac: str = ""
    """Signature of the same statement; detects forgery. Empty if it was saved without a secret."""
    trouble: Corrupt | NewerFormat | None = None
    """Why it cannot be used; reading the artifact raises this error."""

    @property
    def size_bytes(self) -> int:
        """Its size before deduplication."""
        return self.snapshot.logical_bytes if self.snapshot else 0

    @property
    def number(self) -> int:
        """The variant number in its name; -1 if the name is not that of an artifact."""
        split = _NAME.match(self.name)
        return int(split[2]) if split else -1


def artifact_name(key_digest: str, number: int) -> str:
    """Return the name of one variant of a key."""
    name = f"{ARTIFACTS}{key_digest}/{number}"
    assert _NAME.match(name), f"{key_digest!r} must be a digest in hex, and {number} a small number"
    return name


def iter_variants(store: ObjectStore, key_digest: str) -> Iterator[StoredVariant]:
    """Yield the variants of a key; damaged ones have `trouble`. Reads their records, which contain their guards.

    The store is not listed, and the artifacts themselves are not read.
    """
    for state in iter_states(store, key_digest):
        if isinstance(state, StoredVariant):
            yield state
        elif state.snapshot:
            yield parse_variant(state.snapshot)


def iter_states(store: ObjectStore, key_digest: str) -> Iterator[NameState | StoredVariant]:
    """Yield the state of each variant name of a key, in order; the last ones are unused.

    A damaged record yields a StoredVariant with `trouble` instead.
    """
    number = gap = 0
    while gap <= _MAX_GAP:
        name = artifact_name(key_digest, number)
        number += 1
        try:
            state = read_name(store, name)
        except (Corrupt, NewerFormat) as error:
            yield StoredVariant(name, key_digest, None, trouble=error)
            continue
        # A deleted name still has a record of its deletion, and more variants may follow it.
        gap = 0 if state.next_generation else gap + 1
        yield state


def iter_artifacts(store: ObjectStore) -> Iterator[StoredVariant]:
    """Yield every artifact, damaged ones included, in no particular order. Lists all names of the store."""
    for found in iter_names(store, ARTIFACTS):
        yield _describe_damaged(found) if isinstance(found, DamagedName) else parse_variant(found)


def parse_variant(snapshot: CommittedSnapshot) -> StoredVariant:
    """Parse the record of an artifact. If it is malformed, the result has `trouble`."""
    split = _NAME.match(snapshot.name)
    digest = split[1] if split else ""
    fields = Fields(snapshot.name, snapshot.metadata)
    try:
        if not split:
            raise Corrupt(f"{snapshot.name!r} is not the name of an artifact; delete it", key=snapshot.name)
        version = fields.integer("artifact")
        if version > ARTIFACT_FORMAT:
            raise NewerFormat(
                f"{snapshot.name!r} is an artifact of version {version},"
                f" this Holdfast reads up to {ARTIFACT_FORMAT}: upgrade"
            )
        return StoredVariant(
            snapshot.name,
            digest,
            snapshot,
            guards=fields.text("guards"),
            digests=_parse_digests(fields),
            seconds=fields.number("seconds"),
            torch=fields.text("torch"),
            producer=fields.text("producer"),
            content=fields.digest("content").hex(),
            mac=fields.digest("mac").hex() if fields.text("mac") else "",
        )
    except (Corrupt, NewerFormat) as error:
        return StoredVariant(snapshot.name, digest, snapshot, trouble=error)


def list_signed(metadata: Mapping[str, Json]) -> dict[str, Json]:
    """Return the metadata that the statement covers: all but the digest and signature computed from the statement."""
    return {key: value for key, value in metadata.items() if key not in _UNSIGNED}


def find_key_digest(text: str, digests: set[str]) -> list[str]:
    """Return the digests that match `text`: the prefix of a digest, or the name of an artifact."""
    start = verify_name(text).removeprefix(ARTIFACTS).partition("/")[0]
    return sorted(digest for digest in digests if digest.startswith(start))


def _parse_digests(fields: Fields) -> dict[str, str]:
    digests = fields.mapping("digests")
    if not all(isinstance(digest, str) for digest in digests.values()):
        raise Corrupt(f"record {fields.key}: field 'digests' contains a value that is not text", key=fields.key)
    return digests


def _describe_damaged(damaged: DamagedName) -> StoredVariant:
    """Describe a damaged record by its object key, since its bytes cannot be parsed."""
    start = escape_name(ARTIFACTS)
    rest = split_stem(damaged.stem).removeprefix(start).replace(_ESCAPED_SLASH, "/")
    name = ARTIFACTS + rest
    split = _NAME.match(name)
    return StoredVariant(name, split[1] if split else "", None, trouble=damaged.error)
