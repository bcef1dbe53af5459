"""Which fragment of the index may know a digest: a table in memory, so that a look-up searches one of them or none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_SEVERAL: Final = 255
"""What a slot holds that more than one fragment has digests in."""


class Guide:
    """One byte for each range of 4-byte digest prefixes: who has a digest there, nobody, or more than one."""

    def __init__(self, num_slots: int) -> None:
        """Guide to nothing yet, with `num_slots` (a power of two, at most 2^32) ranges."""
        self._slots = bytearray(num_slots)
        self._shift = 33 - num_slots.bit_length()
        self._numbers: dict[str, int] = {}
        self._last = 0
        # By what a slot may hold: whom to search.
        self._choices: list[tuple[str, ...]] = [()] * (_SEVERAL + 1)

    @property
    def num_slots(self) -> int:
        """How many ranges it tells apart; with as many digests, most look-ups search everywhere."""
        return len(self._slots)

    def add(self, key: str, prefixes: Iterable[int]) -> None:
        """Send look-ups to the fragment `key` for each of these prefixes."""
        number = self._numbers[key] = self._choose_number()
        if number != _SEVERAL:
            self._choices[number] = (key,)
        self._choices[_SEVERAL] = tuple(self._numbers)
        slots, shift, choices = self._slots, self._shift, self._choices
        for prefix in prefixes:
            slot = prefix >> shift
            if slots[slot] != number:
                # What a fragment that was forgotten has left is as good as nothing.
                slots[slot] = _SEVERAL if choices[slots[slot]] else number

    def forget(self, key: str) -> None:
        """Send nobody to the fragment `key` any more."""
        number = self._numbers.pop(key, 0)
        if number != _SEVERAL:
            self._choices[number] = ()
        self._choices[_SEVERAL] = tuple(self._numbers)

    def find(self, prefix: int) -> tuple[str, ...]:
        """Return the keys of all fragments that may know a digest with this prefix."""
        return self._choices[self._slots[prefix >> self._shift]]

    def _choose_number(self) -> int:
        """Return a number that no fragment has, the one unused for longest; `_SEVERAL` if all are taken."""
        taken = set(self._numbers.values())
        for step in range(1, _SEVERAL):
            number = (self._last + step - 1) % (_SEVERAL - 1) + 1
            if number not in taken:
                self._last = number
                return number
        return _SEVERAL
