"""When artifacts were last used: a record for each day, which lists the keys that were hit; needs no torch.

Reading never writes, so a hit by itself leaves no trace. A process that may write records its hits, once and at most
for a day: `prune` then knows what is in use. Nothing depends on it but the order in which artifacts go.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from holdfast.compile_cache.artifacts.catalog import StoredVariant
from holdfast.errors import HoldfastError, NameInUse, NotFound
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import RESERVED
from holdfast.repo.format.record import Fields
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import Snapshot, delete_snapshot, iter_names, read_name
from holdfast.repo.write.writer import Request, save

USES: Final = f"{RESERVED}compiled-use/"
DAY_S: Final = 86400.0
_ATTEMPTS: Final = 4


def record_use(repo: Repository, hits: Iterable[StoredVariant]) -> bool:
    """Record that these artifacts were used today; returns whether anything was written. Raises no HoldfastError.

    Nothing is written for what was saved within the last day, or recorded today by anybody: of a thousand processes
    that start with the same artifacts, one writes.
    """
    now_s = repo.store.clock()
    keys = {hit.key_digest for hit in hits if hit.snapshot and now_s - hit.snapshot.time_s > DAY_S}
    try:
        return bool(keys) and _add(repo, USES + _format_day(now_s), keys)
    except HoldfastError:
        return False  # a store that cannot be written to, or is full, is no reason to trouble anybody


def read_uses(store: ObjectStore) -> dict[str, float]:
    """Return when each key was last used, as far as that was recorded, give or take a day; lists all names."""
    return _find_latest(_list_days(store))


def forget_uses(store: ObjectStore, *, kept: set[str]) -> int:
    """Delete the records of days, today's aside, that are not the last on which a key of `kept` was used."""
    days = _list_days(store)
    latest = _find_latest(days)
    oldest_s = store.clock() - DAY_S
    idle = [day for day in days if not any(latest[key] == day.time_s for key in kept.intersection(_parse_keys(day)))]
    names = [day.name for day in idle if day.time_s < oldest_s]
    for name in names:
        with suppress(NameInUse, NotFound):
            delete_snapshot(store, name)
    return len(names)


def _list_days(store: ObjectStore) -> list[Snapshot]:
    return [found for found in iter_names(store, USES) if isinstance(found, Snapshot)]


def _find_latest(days: Iterable[Snapshot]) -> dict[str, float]:
    uses: dict[str, float] = {}
    for day in days:
        for key in _parse_keys(day):
            uses[key] = max(uses.get(key, 0.0), day.time_s)
    return uses


def _add(repo: Repository, name: str, keys: set[str]) -> bool:
    for _ in range(_ATTEMPTS):
        held = read_name(repo.store, name).snapshot
        known = set(_parse_keys(held)) if held else set()
        if keys <= known:
            return False
        try:
            save(repo, Request(name, [], metadata={"used": sorted(known | keys)}, overwrite=held is not None))
        except NameInUse:
            continue  # somebody else has added theirs: add ours to that
        return True
    return False


def _parse_keys(snapshot: Snapshot) -> tuple[str, ...]:
    try:
        return Fields(snapshot.name, snapshot.metadata).texts("used")
    except HoldfastError:
        return ()  # not of this form: then nothing is known of that day


def _format_day(time_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(time_s))
