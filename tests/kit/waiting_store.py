"""A store in memory that wants many requests at once, as one whose requests wait for a server does."""

from __future__ import annotations

from dataclasses import replace

from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import StoreTraits


def let_wait(traits: StoreTraits, at_once: int) -> StoreTraits:
    """Return the traits of a store whose requests wait for a server, which answers `at_once` of them best."""
    return replace(
        traits,
        requests_at_once=at_once,
        reads_at_once=at_once,
        wait_bytes=1 << 20,
        cheap_listings=False,
        reliable_times=True,
        compresses=True,
    )


class WaitingStore(MemoryStore):
    """A MemoryStore that is asked on several threads."""

    at_once = 64

    @property
    def traits(self) -> StoreTraits:
        return let_wait(super().traits, self.at_once)
