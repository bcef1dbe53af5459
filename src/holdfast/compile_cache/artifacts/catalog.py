"""Which artifacts a store holds: their names, what their records say, and how they are found; needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.digest import DIGEST_BYTES
from holdfast.errors import Corrupt, NewerFormat
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import RESERVED, escape_name, split_stem, verify_name
from holdfast.repo.format.record import Fields, Json
from holdfast.repo.names.snapshots import DamagedName, NameState, Snapshot, iter_names, read_name

ARTIFACTS: Final = f"{RESERVED}compiled/"
"""What the names of artifacts begin with; the key's digest and the number of the variant follow."""
ARTIFACT_FORMAT: Final = 1

_NAME: Final = re.compile(rf"{re.escape(ARTIFACTS)}([0-9a-f]{{{2 * DIGEST_BYTES}}})/(0|[1-9][0-9]{{0,8}})\Z")
_ESCAPED_SLASH: Final = escape_name("a/").removeprefix("a")
_MAX_GAP: Final = 2
"""How many names without any record are passed over: whoever copied or deleted by name may have left a hole."""
_UNSIGNED: Final = frozenset({"content", "mac"})


@dataclass(frozen=True, slots=True)
class StoredVariant:
    """One variant of a key as its record tells it; nothing has vouched for it yet."""

    name: str
    key_digest: str
    """Hex; empty if the name is none of an artifact."""
    snapshot: Snapshot | None
    """None if its record is damaged."""
    guards: str = ""
    """When it fits, as an expression over sizes: known without reading the artifact."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Part of the key -> its digest in hex."""
    seconds: float = 0.0
    """How long it took to compile: what a hit saves."""
    torch: str = ""
    producer: str = ""
    content: str = ""
    """Digest of the statement that says what belongs together: finds accidents."""
    mac: str = ""
    """The same with a secret: finds forgers. Empty if it was saved without one."""
    trouble: Corrupt | NewerFormat | None = None
    """Why it cannot be used; reading it raises this."""

    @property
    def size_bytes(self) -> int:
        """How large it is, whatever it shares with others."""
        return self.snapshot.logical_bytes if self.snapshot else 0

    @property
    def number(self) -> int:
        """Which variant of its key it is; -1 if the name is none of an artifact."""
        split = _NAME.match(self.name)
        return int(split[2]) if split else -1


def artifact_name(key_digest: str, number: int) -> str:
    """Return the name of one variant of a key."""
    name = f"{ARTIFACTS}{key_digest}/{number}"
    assert _NAME.match(name), f"{key_digest!r} is a digest in hex, and {number} a small number"
    return name


def iter_variants(store: ObjectStore, key_digest: str) -> Iterator[StoredVariant]:
    """Yield the variants of a key, by exact names: no listing of the store. One that is damaged has `trouble`."""
    for state in iter_states(store, key_digest):
        if isinstance(state, StoredVariant):
            yield state
        elif state.snapshot:
            yield parse_found(state.snapshot)


def iter_states(store: ObjectStore, key_digest: str) -> Iterator[NameState | StoredVariant]:
    """Yield what each name of a key holds, in order, the last ones nothing; Found for a record that is damaged."""
    number = gap = 0
    while gap <= _MAX_GAP:
        name = artifact_name(key_digest, number)
        number += 1
        try:
            state = read_name(store, name)
        except (Corrupt, NewerFormat) as error:
            yield StoredVariant(name, key_digest, None, trouble=error)
            continue
        # A name that was deleted has a record that says so, and others may come after it.
        gap = 0 if state.next_generation else gap + 1
        yield state


def iter_artifacts(store: ObjectStore) -> Iterator[StoredVariant]:
    """Yield every artifact, in no order, damaged ones too; lists all names of the store."""
    for found in iter_names(store, ARTIFACTS):
        yield _describe_damaged(found) if isinstance(found, DamagedName) else parse_found(found)


def parse_found(snapshot: Snapshot) -> StoredVariant:
    """Return what the record of an artifact says; what is not of that form has `trouble`."""
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
    """Return the part of an artifact's metadata that its statement covers: all but what is made of that statement."""
    return {key: value for key, value in metadata.items() if key not in _UNSIGNED}


def find_key_digest(text: str, digests: set[str]) -> list[str]:
    """Return the keys that `text` may mean: digests that begin with it, given alone or as the name of an artifact."""
    start = verify_name(text).removeprefix(ARTIFACTS).partition("/")[0]
    return sorted(digest for digest in digests if digest.startswith(start))


def _parse_digests(fields: Fields) -> dict[str, str]:
    digests = fields.mapping("digests")
    if not all(isinstance(digest, str) for digest in digests.values()):
        raise Corrupt(f"record {fields.key}: field 'digests' does not hold texts", key=fields.key)
    return digests


def _describe_damaged(damaged: DamagedName) -> StoredVariant:
    """Return what the key of a damaged record tells, for its bytes tell nothing."""
    start = escape_name(ARTIFACTS)
    rest = split_stem(damaged.stem).removeprefix(start).replace(_ESCAPED_SLASH, "/")
    name = ARTIFACTS + rest
    split = _NAME.match(name)
    return StoredVariant(name, split[1] if split else "", None, trouble=damaged.error)
