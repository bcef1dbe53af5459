"""Describes the keys of a compile cache as JSON, and how one differs from others. Does not need torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from holdfast.compile_cache.artifacts.artifact import read_parts
from holdfast.compile_cache.artifacts.catalog import StoredVariant
from holdfast.compile_cache.artifacts.limits import StoredKey
from holdfast.compile_cache.artifacts.why import Candidate, explain
from holdfast.compile_cache.key_parts import GraphKey
from holdfast.json_text import Json
from holdfast.repo.handle.repository import Repository
from holdfast.texts import format_utc


def explain_key(repo: Repository, key: StoredKey, others: Sequence[StoredKey]) -> str:
    """Return how a key differs from the most similar of the other keys: why they were no hits for it."""
    found = find_undamaged(key)
    own = GraphKey(found.key_digest, found.digests, read_parts(repo, found))
    stored = [find_undamaged(each) for each in others]
    candidates = [Candidate(each.name, each.digests, partial(read_parts, repo, each), each.guards) for each in stored]
    return explain(own, candidates).text


def find_undamaged(key: StoredKey) -> StoredVariant:
    """Return the first variant of a key that is not damaged; any of them has the parts of the key."""
    return next((found for found in key.variants if not found.trouble), key.variants[0])


def describe_key(key: StoredKey) -> dict[str, Json]:
    """Return a key and its variants as JSON."""
    return {
        "key": key.digest,
        "bytes": key.size_bytes,
        "used": format_utc(key.used_s),
        "used_s": key.used_s,
        "used_days": key.used_days,
        "variants": [_describe_variant(found) for found in key.variants],
    }


def _describe_variant(found: StoredVariant) -> dict[str, Json]:
    return {
        "name": found.name,
        "bytes": found.size_bytes,
        "guards": found.guards,
        "digests": dict(found.digests),
        "compile_seconds": found.seconds,
        "torch": found.torch,
        "producer": found.producer,
        "signed": bool(found.mac),
        "damaged": str(found.trouble) if found.trouble else None,
    }
