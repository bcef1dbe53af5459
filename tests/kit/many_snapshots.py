"""Stores of many snapshots, made in memory and put into the small S3 server as they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache

from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.format.layout import CONFIG
from tests.kit.s3_server import S3Server, Stored
from tests.kit.saving import new_repo, noise, save_bytes

EVERY_S = 60.0
_AT_ONCE = 100
"""Snapshots saved to one store in memory, whose listings take longer the more it holds."""


def fill_server(server: S3Server, count: int, *, prefix: str = "store") -> None:
    """Put a store of snapshots `run/step-0`, `run/step-1` ... into the server, a minute apart, the last one now."""
    for key, data, modified_s in _make_objects(count):
        server.objects[f"{prefix}/{key}"] = Stored(data, modified_s)


@cache
def _make_objects(count: int) -> tuple[tuple[str, bytes, float], ...]:
    """Return the keys of a store, the bytes of its objects, and when these were stored."""
    first_s = time.time() - count * EVERY_S
    parts = [range(start, min(start + _AT_ONCE, count)) for start in range(0, count, _AT_ONCE)]
    return tuple(found for steps in parts for found in _iter_saved(steps, first_s))


def _iter_saved(steps: range, first_s: float) -> Iterator[tuple[str, bytes, float]]:
    """Save some snapshots to a store of their own; together they are one store, whose config is that of the first."""
    clock = VirtualClock(start_s=first_s + steps[0] * EVERY_S)
    store = MemoryStore(clock=clock)
    repo = new_repo(store)
    for step in steps:
        save_bytes(repo, f"run/step-{step}", {"x": noise(600, step)}, metadata={"metrics": {"loss": 1 / (step + 1)}})
        clock.advance(EVERY_S)
    for info in store.iter_objects(""):
        if steps[0] == 0 or not info.key.startswith(CONFIG):
            yield info.key, store.read(info.key, limit_bytes=info.size_bytes), info.modified_s
