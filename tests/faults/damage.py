"""Ways in which stored bytes go bad, played on a memory store."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.objects.memory import MemoryStore


def replace(store: MemoryStore, key: str, data: bytes) -> None:
    """Put other bytes in the place of an object, as a disk may."""
    store.delete(key)
    store.create(key, data)


def flip(data: bytes, position: int) -> bytes:
    """Return `data` with one bit of the byte at `position` flipped."""
    changed = bytearray(data)
    changed[position] ^= 1 << random.Random(position).randrange(8)
    return bytes(changed)


def swap(store: MemoryStore, one: str, other: str) -> None:
    """Let two objects change places."""
    contents = store.contents()
    replace(store, one, contents[other])
    replace(store, other, contents[one])


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that happens to one object."""

    name: str
    act: Callable[[MemoryStore, str], None]

    def __str__(self) -> str:
        return self.name


def _change(change: Callable[[bytes], bytes]) -> Callable[[MemoryStore, str], None]:
    return lambda store, key: replace(store, key, change(store.contents()[key]))


def _delete(store: MemoryStore, key: str) -> None:
    store.delete(key)


FLIPPED_EARLY: Final = Damage("a bit flipped early on", _change(lambda data: flip(data, 70)))
FLIPPED_LATE: Final = Damage("a bit flipped late", _change(lambda data: flip(data, len(data) - 5)))
HALVED: Final = Damage("cut in half", _change(lambda data: data[: len(data) // 2]))
EMPTIED: Final = Damage("emptied", _change(lambda _data: b""))
ZEROED: Final = Damage("zeroed", _change(lambda data: bytes(len(data))))
SCRAMBLED: Final = Damage("scrambled", _change(lambda data: random.Random(0).randbytes(len(data))))
DELETED: Final = Damage("deleted", _delete)

DAMAGES: Final = (FLIPPED_EARLY, FLIPPED_LATE, HALVED, EMPTIED, ZEROED, SCRAMBLED, DELETED)
