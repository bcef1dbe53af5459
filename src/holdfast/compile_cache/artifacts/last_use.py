"""Records when artifacts were last used: one record per day lists the keys that were hit. Does not need torch.

Reading never writes, so a hit by itself is not recorded. A process that may write to the store records its hits
separately, at most once per day and key. `prune` uses these records to delete the artifacts that were not used for the
longest time; nothing else depends on them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from holdfast.compile_cache.artifacts.catalog import DAY_S, StoredVariant
from holdfast.errors import HoldfastError, NameInUse, NotFound
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import RESERVED
from holdfast.repo.format.record import Fields
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, delete_snapshot, iter_names, read_name
from holdfast.repo.write.writer import Request, WriteOptions, save

USES: Final = f"{RESERVED}compiled-use/"
_ATTEMPTS: Final = 4


class KeyUses(NamedTuple):
    """The recorded uses of one key."""

    last_s: float
    days: int
    """The number of days on which it was used, as far as their records are kept."""


def record_use(repo: Repository, hits: Iterable[StoredVariant]) -> bool:
    """Record that these artifacts were used today. Return whether anything was written. Raises no HoldfastError.

    Artifacts saved within the last day, or already recorded today by any process, are skipped: of a thousand processes
    that start with the same artifacts, one writes.
    """
    now_s = repo.store.clock()
    keys = {hit.key_digest for hit in hits if hit.snapshot and now_s - hit.snapshot.time_s > DAY_S}
    try:
        return bool(keys) and _add(repo, USES + _format_day(now_s), keys)
    except HoldfastError:
        return False  # use records are optional: a read-only or full store is not an error


def read_uses(store: ObjectStore) -> dict[str, KeyUses]:
    """Return when each key was last used, where recorded, to within a day; and how often. Lists all names."""
    return _find_uses(_list_days(store))


def delete_old_uses(store: ObjectStore, *, kept: set[str]) -> int:
    """Delete records older than a day that are not the last use of any key in `kept`. Return how many."""
    days = _list_days(store)
    uses = _find_uses(days)
    oldest_s = store.clock() - DAY_S
    idle = [
        day for day in days if not any(uses[key].last_s == day.time_s for key in kept.intersection(_parse_keys(day)))
    ]
    names = [day.name for day in idle if day.time_s < oldest_s]
    for name in names:
        with suppress(NameInUse, NotFound):
            delete_snapshot(store, name)
    return len(names)


def _list_days(store: ObjectStore) -> list[CommittedSnapshot]:
    return [found for found in iter_names(store, USES) if isinstance(found, CommittedSnapshot)]


def _find_uses(days: Iterable[CommittedSnapshot]) -> dict[str, KeyUses]:
    uses: dict[str, KeyUses] = {}
    for day in days:
        for key in set(_parse_keys(day)):
            last_s, count = uses.get(key, (0.0, 0))
            uses[key] = KeyUses(max(last_s, day.time_s), count + 1)
    return uses


def _add(repo: Repository, name: str, keys: set[str]) -> bool:
    for _ in range(_ATTEMPTS):
        existing = read_name(repo.store, name).snapshot
        known = set(_parse_keys(existing)) if existing else set()
        if keys <= known:
            return False
        try:
            save(
                repo,
                Request(
                    name,
                    [],
                    options=WriteOptions(metadata={"used": sorted(known | keys)}, overwrite=existing is not None),
                ),
            )
        except NameInUse:
            continue  # another process has added its keys: read them and add these
        return True
    return False


def _parse_keys(snapshot: CommittedSnapshot) -> tuple[str, ...]:
    try:
        return Fields(snapshot.name, snapshot.metadata).texts("used")
    except HoldfastError:
        return ()  # malformed: the uses of that day are unknown


def _format_day(time_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(time_s))
