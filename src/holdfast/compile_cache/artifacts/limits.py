"""Limits of the cache: plans which keys to delete by size, age or system, and deletes them. Does not need torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.compile_cache.artifacts.catalog import StoredVariant, iter_artifacts
from holdfast.compile_cache.artifacts.storing import KeyUses, delete_old_uses, read_uses
from holdfast.errors import Corrupt, NameInUse, NewerFormat, NotFound
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.names.snapshots import delete_if_unchanged, read_name

SYSTEM: Final = "system"
"""The part of a key that describes the machine and software a graph was compiled for."""


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Limits of the cache. A key that exceeds any of them is deleted."""

    max_bytes: int | None = None
    """Total size of all artifacts before deduplication. The most recently used keys that fit are kept."""
    max_age_s: float | None = None
    """Maximum time since a key was last used or, if that is not known, saved."""
    systems: frozenset[str] = frozenset()
    """Digests of the `system` part to keep; keys with others are deleted. Empty keeps all systems."""

    def __post_init__(self) -> None:
        """Raise ValueError if there is no limit, or a negative one."""
        if self.max_bytes is None and self.max_age_s is None and not self.systems:
            raise ValueError("give at least one limit: --max-size, --max-age or --other-systems")
        if min(self.max_bytes or 0, self.max_age_s or 0.0) < 0 or math.isnan(self.max_age_s or 0.0):
            raise ValueError("a limit of the cache cannot be negative")


@dataclass(frozen=True, slots=True)
class StoredKey:
    """All variants of one key. They are kept or deleted together."""

    digest: str
    variants: tuple[StoredVariant, ...]
    """Sorted by variant number."""
    used_s: float
    """When it was last used or, if that is not known, saved."""
    used_days: int = 0
    """On how many days a process has loaded it, as far as that is recorded; the day of the save does not count."""

    @property
    def size_bytes(self) -> int:
        """Total size of its variants before deduplication."""
        return sum(variant.size_bytes for variant in self.variants)

    @property
    def is_damaged(self) -> bool:
        """Whether none of its variants can be used."""
        return all(variant.trouble for variant in self.variants)


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """One key, and the reason to delete it; it is kept if the reason is empty."""

    key: StoredKey
    reason: str


@dataclass(frozen=True, slots=True)
class LimitsPlan:
    """Which keys to delete and to keep, the most recently used first."""

    decisions: tuple[LimitDecision, ...]

    @property
    def delete(self) -> tuple[StoredKey, ...]:
        """The keys to delete."""
        return tuple(decision.key for decision in self.decisions if decision.reason)

    @property
    def keep(self) -> tuple[StoredKey, ...]:
        """The keys to keep."""
        return tuple(decision.key for decision in self.decisions if not decision.reason)


def read_stored(store: ObjectStore) -> list[StoredKey]:
    """Read all keys, the most recently used first. Lists all names of the store."""
    return group_keys(iter_artifacts(store), read_uses(store))


def group_keys(artifacts: Iterable[StoredVariant], uses: Mapping[str, KeyUses]) -> list[StoredKey]:
    """Group artifacts by key, the most recently used first. Does no I/O."""
    groups: dict[str, list[StoredVariant]] = {}
    for variant in artifacts:
        # An artifact whose name contains no key forms a group by itself.
        groups.setdefault(variant.key_digest or variant.name, []).append(variant)
    keys = []
    for digest, variants in groups.items():
        saved_s = max((variant.snapshot.time_s for variant in variants if variant.snapshot), default=0.0)
        in_order = tuple(sorted(variants, key=lambda variant: variant.number))
        last_s, days = uses.get(digest, (0.0, 0))
        keys.append(StoredKey(digest, in_order, max(saved_s, last_s), days))
    return sorted(keys, key=lambda key: (-key.used_s, key.digest))


def plan_limits(keys: Sequence[StoredKey], limits: CacheLimits, *, now_s: float) -> LimitsPlan:
    """Decide for each key whether to delete it. Does no I/O."""
    decisions = []
    kept_bytes = 0
    for key in sorted(keys, key=lambda key: (-key.used_s, key.digest)):
        reason = _find_reason(key, limits, now_s)
        if not reason and limits.max_bytes is not None and kept_bytes + key.size_bytes > limits.max_bytes:
            reason = "over the size limit"
        kept_bytes += 0 if reason else key.size_bytes
        decisions.append(LimitDecision(key, reason))
    return LimitsPlan(tuple(decisions))


def plan_clear(keys: Sequence[StoredKey]) -> LimitsPlan:
    """Return a plan that deletes every key. Does no I/O."""
    return LimitsPlan(tuple(LimitDecision(key, "the cache is cleared") for key in keys))


def apply_limits(store: ObjectStore, plan: LimitsPlan) -> list[StoredVariant]:
    """Delete the keys of the plan, except those overwritten since it was made. Return the deleted artifacts.

    Also deletes records of use that no remaining key needs. Run `gc` to free the space.
    """
    deleted = [variant for key in plan.delete for variant in _delete_key(store, key)]
    delete_old_uses(store, kept={key.digest for key in plan.keep})
    return deleted


def _find_reason(key: StoredKey, limits: CacheLimits, now_s: float) -> str:
    if key.is_damaged:
        return "damaged"
    systems = {variant.digests.get(SYSTEM, "") for variant in key.variants if not variant.trouble}
    if limits.systems and not limits.systems & systems:
        return "compiled for another system"
    if limits.max_age_s is not None and now_s - key.used_s > limits.max_age_s:
        return "not used within the age limit"
    return ""


def _delete_key(store: ObjectStore, key: StoredKey) -> list[StoredVariant]:
    deleted = []
    # In reverse order, so that an interrupted deletion leaves variants 0 to n without a gap.
    for variant in reversed(key.variants):
        try:
            state = read_name(store, variant.name)
            if state.snapshot and variant.snapshot and state.snapshot.write_id == variant.snapshot.write_id:
                delete_if_unchanged(store, state)
                deleted.append(variant)
        except (NameInUse, Corrupt, NewerFormat, NotFound):
            continue  # changed since the plan was made, or a damaged record, which only `repair` can remove
    return deleted
