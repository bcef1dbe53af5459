"""How much the cache may hold: which keys go by size, age or system, and their deletion; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.compile_cache.artifacts.catalog import StoredVariant, iter_artifacts
from holdfast.compile_cache.artifacts.last_use import forget_uses, read_uses
from holdfast.errors import Corrupt, NameInUse, NewerFormat, NotFound
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.names.snapshots import delete_held, read_name

SYSTEM: Final = "system"
"""The part of a key that says what a graph was compiled for."""


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """What the cache may hold; what breaks any of these goes."""

    max_bytes: int | None = None
    """Of all artifacts together, as if they shared nothing: from the most recently used on, what fits stays."""
    max_age_s: float | None = None
    """Since a key was last used or, if that is not known, saved."""
    systems: frozenset[str] = frozenset()
    """Digests of this part of keys, as they are for this machine: keys of other machines go. Empty keeps all."""

    def __post_init__(self) -> None:
        """Refuse what would limit nothing, or everything by mistake."""
        if self.max_bytes is None and self.max_age_s is None and not self.systems:
            raise ValueError("give at least one limit: --max-size, --max-age or --other-systems")
        if min(self.max_bytes or 0, self.max_age_s or 0.0) < 0 or math.isnan(self.max_age_s or 0.0):
            raise ValueError("limits of a cache cannot be negative")


@dataclass(frozen=True, slots=True)
class StoredKey:
    """All variants of one key: they are kept or deleted together."""

    digest: str
    variants: tuple[StoredVariant, ...]
    """By number."""
    used_s: float
    """When it was last used or, if that is not known, saved."""

    @property
    def size_bytes(self) -> int:
        """How large its variants are."""
        return sum(found.size_bytes for found in self.variants)

    @property
    def is_damaged(self) -> bool:
        """Tell whether none of it can be used."""
        return all(found.trouble for found in self.variants)


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """One key, and why it goes; without a reason it stays."""

    key: StoredKey
    reason: str


@dataclass(frozen=True, slots=True)
class LimitsPlan:
    """What goes and what stays, the most recently used first."""

    verdicts: tuple[LimitDecision, ...]

    @property
    def delete(self) -> tuple[StoredKey, ...]:
        """The keys to delete."""
        return tuple(verdict.key for verdict in self.verdicts if verdict.reason)

    @property
    def keep(self) -> tuple[StoredKey, ...]:
        """The keys to keep."""
        return tuple(verdict.key for verdict in self.verdicts if not verdict.reason)


def read_stored(store: ObjectStore) -> list[StoredKey]:
    """Read which keys there are, the most recently used first; lists all names of the store."""
    return group_keys(iter_artifacts(store), read_uses(store))


def group_keys(artifacts: Iterable[StoredVariant], uses: Mapping[str, float]) -> list[StoredKey]:
    """Return the keys that artifacts belong to, the most recently used first; pure."""
    groups: dict[str, list[StoredVariant]] = {}
    for found in artifacts:
        # What has no key by its name stands for itself.
        groups.setdefault(found.key_digest or found.name, []).append(found)
    keys = []
    for digest, variants in groups.items():
        saved_s = max((found.snapshot.time_s for found in variants if found.snapshot), default=0.0)
        in_order = tuple(sorted(variants, key=lambda found: found.number))
        keys.append(StoredKey(digest, in_order, max(saved_s, uses.get(digest, 0.0))))
    return sorted(keys, key=lambda key: (-key.used_s, key.digest))


def plan_limits(keys: Sequence[StoredKey], limits: CacheLimits, *, now_s: float) -> LimitsPlan:
    """Decide for each key; pure."""
    verdicts = []
    kept_bytes = 0
    for key in sorted(keys, key=lambda key: (-key.used_s, key.digest)):
        reason = _find_reason(key, limits, now_s)
        if not reason and limits.max_bytes is not None and kept_bytes + key.size_bytes > limits.max_bytes:
            reason = "over the size"
        kept_bytes += 0 if reason else key.size_bytes
        verdicts.append(LimitDecision(key, reason))
    return LimitsPlan(tuple(verdicts))


def plan_clear(keys: Sequence[StoredKey]) -> LimitsPlan:
    """Decide to delete everything; pure."""
    return LimitsPlan(tuple(LimitDecision(key, "everything goes") for key in keys))


def apply_limits(store: ObjectStore, plan: LimitsPlan) -> list[StoredVariant]:
    """Delete what the plan says, but for what was overwritten since it was made; returns what was deleted.

    Records of use that tell nothing of the keys that stay go as well. Bytes are freed by `gc`.
    """
    deleted = [found for key in plan.delete for found in _delete_key(store, key)]
    forget_uses(store, kept={key.digest for key in plan.keep})
    return deleted


def _find_reason(key: StoredKey, limits: CacheLimits, now_s: float) -> str:
    if key.is_damaged:
        return "damaged"
    systems = {found.digests.get(SYSTEM, "") for found in key.variants if not found.trouble}
    if limits.systems and not limits.systems & systems:
        return "of another system"
    if limits.max_age_s is not None and now_s - key.used_s > limits.max_age_s:
        return "not used for long"
    return ""


def _delete_key(store: ObjectStore, key: StoredKey) -> list[StoredVariant]:
    deleted = []
    # The last one first: as long as there is one, those before it have never been away.
    for found in reversed(key.variants):
        try:
            state = read_name(store, found.name)
            if state.snapshot and found.snapshot and state.snapshot.write_id == found.snapshot.write_id:
                delete_held(store, state)
                deleted.append(found)
        except (NameInUse, Corrupt, NewerFormat, NotFound):
            continue  # changed meanwhile, or a damaged record, which only a repair can remove
    return deleted
