"""Answers about the compile cache: its entries, and why one was not a hit of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.compile_cache.artifacts.limits import StoredKey, read_stored
from holdfast.compile_cache.artifacts.why import describe_key, explain_key
from holdfast.errors import NotFound
from holdfast.json_text import Json
from holdfast.repo.handle.repository import Repository
from holdfast.serving.answer import choose_sort

MAX_KEYS: Final = 2000
"""Keys of one page."""
_SORTS: Final = ("used_s", "used_days", "key", "bytes", "seconds", "torch")


def describe_cache(keys: Sequence[StoredKey], sort: str, offset: int, limit: int) -> dict[str, Json]:
    """Return a part of the keys of the cache, as `holdfast cache ls --json` prints them."""
    by = choose_sort(sort, _SORTS)
    rows = sorted(keys, key=lambda key: _find_order(key, by), reverse=sort.startswith("-"))
    return {
        "total": len(keys),
        "offset": offset,
        "bytes": sum(key.size_bytes for key in keys),
        "damaged": sum(any(variant.trouble for variant in key.variants) for key in keys),
        "keys": [describe_key(key) for key in rows[offset : offset + limit]],
    }


def _find_order(key: StoredKey, by: str) -> tuple[float | str, ...]:
    match by:
        case "used_s":
            return (key.used_s, key.digest)
        case "used_days":
            return (key.used_days, key.digest)
        case "bytes":
            return (key.size_bytes, key.digest)
        case "seconds":
            return (max(variant.seconds for variant in key.variants), key.digest)
        case "torch":
            return (key.variants[0].torch, key.digest)
        case _:
            return (key.digest,)


def describe_miss(repo: Repository, digest: str) -> dict[str, Json]:
    """Return why a graph had to be compiled: how its key differs from the most similar other one. Raises NotFound."""
    keys = [key for key in read_stored(repo.store) if not key.is_damaged]
    own = next((key for key in keys if key.digest == digest), None)
    if own is None:
        raise NotFound(f"there is no key {digest[:80]!r} in the cache that can be read", name=digest)
    others = [key for key in keys if key is not own]
    lines = explain_key(repo, own, others).splitlines() if others else ["It is the only graph in the cache."]
    return {"key": digest, "lines": lines}
