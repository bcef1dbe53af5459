"""An in-memory table of which index fragment may contain a digest, so that a lookup searches one fragment or none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_SEVERAL: Final = 255
"""Value of a slot in which more than one fragment has digests."""


class Guide:
    """One byte per range of 4-byte digest prefixes: the fragment with digests there, none, or several."""

    def __init__(self, num_slots: int) -> None:
        """Divide the prefixes into `num_slots` ranges, a power of two up to 2^32; no fragment is added yet."""
        self._slots = bytearray(num_slots)
        self._shift = 33 - num_slots.bit_length()
        self._numbers: dict[str, int] = {}
        self._last = 0
        # For each value of a slot, the fragments to search.
        self._choices: list[tuple[str, ...]] = [()] * (_SEVERAL + 1)

    @property
    def num_slots(self) -> int:
        """The number of ranges; with as many digests as ranges, most lookups search every fragment."""
        return len(self._slots)

    def add(self, key: str, prefixes: Iterable[int]) -> None:
        """Add the fragment `key`: lookups of these prefixes search it."""
        number = self._numbers[key] = self._choose_number()
        if number != _SEVERAL:
            self._choices[number] = (key,)
        self._choices[_SEVERAL] = tuple(self._numbers)
        slots, shift, choices = self._slots, self._shift, self._choices
        for prefix in prefixes:
            slot = prefix >> shift
            if slots[slot] != number:
                # A slot with the number of a forgotten fragment counts as empty.
                slots[slot] = _SEVERAL if choices[slots[slot]] else number

    def forget(self, key: str) -> None:
        """Remove the fragment `key`: no lookup searches it any more."""
        number = self._numbers.pop(key, 0)
        if number != _SEVERAL:
            self._choices[number] = ()
        self._choices[_SEVERAL] = tuple(self._numbers)

    def find(self, prefix: int) -> tuple[str, ...]:
        """Return the keys of all fragments that may contain a digest with this prefix."""
        return self._choices[self._slots[prefix >> self._shift]]

    def _choose_number(self) -> int:
        """Return an unused number, the one unused for longest; `_SEVERAL` if all are in use."""
        taken = set(self._numbers.values())
        for step in range(1, _SEVERAL):
            number = (self._last + step - 1) % (_SEVERAL - 1) + 1
            if number not in taken:
                self._last = number
                return number
        return _SEVERAL
