"""A store in memory that wants many requests at once, as one whose requests wait for a server does."""

from __future__ import annotations

from dataclasses import replace

from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import StoreTraits


class WaitingStore(MemoryStore):
    """A MemoryStore that is asked on several threads."""

    at_once = 64

    @property
    def traits(self) -> StoreTraits:
        return replace(super().traits, requests_at_once=self.at_once)
