"""Answers about the compile cache: its entries, and why one was not a hit of another."""

from __future__ import annotations

from typing import Final

from holdfast.compile_cache.artifacts.described import describe_key, explain_key
from holdfast.compile_cache.artifacts.limits import read_stored
from holdfast.errors import NotFound
from holdfast.json_text import Json
from holdfast.repo.handle.repository import Repository

MAX_KEYS: Final = 2000
"""Keys in an answer; of more, those that were used last."""


def describe_cache(repo: Repository) -> dict[str, Json]:
    """Return the keys of the cache as `holdfast cache ls --json` prints them, the most recently used first."""
    keys = read_stored(repo.store)
    return {
        "total": len(keys),
        "bytes": sum(key.size_bytes for key in keys),
        "keys": [describe_key(key) for key in keys[:MAX_KEYS]],
    }


def describe_miss(repo: Repository, digest: str) -> dict[str, Json]:
    """Return why a graph had to be compiled: how its key differs from the most similar other one. Raises NotFound."""
    keys = [key for key in read_stored(repo.store) if not key.is_damaged]
    own = next((key for key in keys if key.digest == digest), None)
    if own is None:
        raise NotFound(f"there is no key {digest[:80]!r} in the cache that can be read", name=digest)
    others = [key for key in keys if key is not own]
    lines = explain_key(repo, own, others).splitlines() if others else ["It is the only graph in the cache."]
    return {"key": digest, "lines": lines}
