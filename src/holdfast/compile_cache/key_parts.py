"""The nine parts of a graph key, each with its own digest so that a miss can be explained. Does not need torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.digest import hash_kind
from holdfast.json_text import Json, canonical_json

PARTS: Final = ("graph", "constants", "inputs", "aliasing", "custom_ops", "flags", "config", "options", "system")


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Everything that a compiled graph depends on. Graphs with equal keys may use each other's artifacts."""

    digest: str
    """BLAKE3 of the nine part digests, in hex."""
    digests: Mapping[str, str]
    """Part name -> digest of that part, in hex."""
    parts: Mapping[str, Json]
    """Part name -> the value that was hashed."""


class Uncacheable(Exception):
    """A graph has no key because something that can change its compiled code cannot be described."""

    def __init__(self, reason: str) -> None:
        """Store `reason`, a sentence without a full stop that is shown to the user."""
        super().__init__(reason)
        self.reason = reason


class UnknownCode(Uncacheable):
    """A graph has no key because it depends on code without a digest. Torch's caches ignore changes to such code."""


def digest_part(part: str, value: Json) -> str:
    """Return the digest of one key part, in hex."""
    return hash_kind(f"compiled {part}", [canonical_json(value)]).hex()


def hash_parts(parts: Mapping[str, Json]) -> GraphKey:
    """Return the key of these parts; `parts` has all nine, in the order of `PARTS`."""
    assert tuple(parts) == PARTS, "a key has all nine parts, in order"
    digests = {part: digest_part(part, value) for part, value in parts.items()}
    digest = hash_kind("compiled", [bytes.fromhex(digests[part]) for part in PARTS]).hex()
    return GraphKey(digest, digests, parts)
