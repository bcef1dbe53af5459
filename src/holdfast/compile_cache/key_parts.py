"""What a key consists of: nine parts, each with a digest of its own, so that a miss is explained; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.digest import hash_kind
from holdfast.repo.format.record import Json, canonical_json

PARTS: Final = ("graph", "constants", "inputs", "aliasing", "custom_ops", "flags", "config", "options", "system")


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a compiled graph depends on: two graphs with one key may use each other's artifacts."""

    digest: str
    """Hex: the BLAKE3 of the nine digests."""
    digests: Mapping[str, str]
    """Part -> hex."""
    parts: Mapping[str, Json]
    """Part -> what was hashed."""


class Uncacheable(Exception):
    """A graph has no key: something in it, or around it, may differ without showing."""

    def __init__(self, reason: str) -> None:
        """Take the reason as a sentence, without a full stop."""
        super().__init__(reason)
        self.reason = reason


class UnknownCode(Uncacheable):
    """A graph has no key because code that it depends on has no digest; torch's own caches do not look at such code."""


def digest_part(part: str, value: Json) -> str:
    """Return the digest of one part, in hex."""
    return hash_kind(f"compiled {part}", [canonical_json(value)]).hex()


def hash_parts(parts: Mapping[str, Json]) -> GraphKey:
    """Return the key that these nine parts make up."""
    assert tuple(parts) == PARTS, "all nine, in order"
    digests = {part: digest_part(part, value) for part, value in parts.items()}
    digest = hash_kind("compiled", [bytes.fromhex(digests[part]) for part in PARTS]).hex()
    return GraphKey(digest, digests, parts)
