"""Which leaves of a target a load has written so far, and the sentence about them in every error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from holdfast.errors import HoldfastError
from holdfast.texts import add_note, list_some

_LISTED: Final = 50
"""How many leaves a sentence lists before it only counts them."""


class AddressRange(NamedTuple):
    """A range of memory addresses on one device."""

    device: str
    start: int
    stop: int


class WrittenLeaf(NamedTuple):
    """A leaf of the target, or an object in it, that a load writes to."""

    key: Hashable
    """The key of the leaf in the journal."""
    name: str
    spans: tuple[AddressRange, ...] = ()
    """The memory that it occupies; empty if it is not a tensor."""
    is_tensor: bool = False
    """The memory is all of its state; an object may have more."""


class Overwritten(NamedTuple):
    """What a load has changed in its target."""

    whole: tuple[str, ...]
    """Leaves that have the new value."""
    partly: tuple[str, ...]
    """Leaves that may have a mixture of the old and the new value."""


class Journal:
    """Records when the write of a leaf begins and ends. Any thread may call `begin` and `end`."""

    def __init__(self) -> None:
        self.where = "the target"
        """Names the target in the sentence."""
        self.list_leaves: Callable[[], Sequence[WrittenLeaf]] = tuple
        """Returns all leaves that may be written to; called only when there is an error to report."""
        self._expected: Counter[Hashable] = Counter()
        # Single operations on sets and lists are atomic, so no lock is needed.
        self._begun: set[Hashable] = set()
        self._ended: list[Hashable] = []

    def expect(self, key: Hashable, parts: int = 1) -> None:
        """Record that a leaf is written in several parts; it is complete when all of them have ended."""
        self._expected[key] += parts

    def begin(self, key: Hashable) -> None:
        """Record that the write of a leaf begins."""
        self._begun.add(key)

    def end(self, key: Hashable) -> None:
        """Record that one part of a leaf is written."""
        self._ended.append(key)

    @contextmanager
    def writing(self, keys: Sequence[Hashable]) -> Iterator[None]:
        """Record that these leaves are being written, and are complete when the `with` ends without an error."""
        for key in keys:
            self.expect(key)
            self.begin(key)
        yield
        self._ended += keys

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Record that these leaves have their old values again."""
        self._begun.difference_update(keys)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Add what was overwritten to an error that ends the `with`; without any write the error is unchanged."""
        try:
            yield
        except BaseException as error:
            self.report(error)
            raise

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was written."""
        return not self._begun

    def find_overwritten(self, leaves: Sequence[WrittenLeaf]) -> Overwritten:
        """Return which of these leaves were written; a write to shared memory counts for every leaf that shares it."""
        ended = Counter(self._ended)
        whole = {key for key in self._begun if ended[key] >= self._expected[key]}
        partly = self._begun - whole
        states = ["partly" if leaf.key in partly else "whole" if leaf.key in whole else "" for leaf in leaves]
        found = list(states)
        for one, other in _iter_sharing(leaves):
            for number, neighbour in ((one, other), (other, one)):
                if states[neighbour] == "partly" and found[number] != "partly":
                    found[number] = "partly"
                elif states[neighbour] == "whole" and not found[number]:
                    is_same = leaves[number].is_tensor and leaves[number].spans == leaves[neighbour].spans
                    found[number] = "whole" if is_same else "partly"
        by_state: dict[str, dict[str, None]] = {"whole": {}, "partly": {}, "": {}}
        for leaf, state in zip(leaves, found, strict=True):
            by_state[state][leaf.name] = None
        return Overwritten(tuple(sorted(by_state["whole"])), tuple(sorted(by_state["partly"])))

    def report(self, error: BaseException) -> None:
        """Add what was overwritten to an error: as attributes, and as a sentence in its text or in a note.

        Without any write the error is unchanged.
        """
        if self.is_empty:
            return
        found = self.find_overwritten(self.list_leaves())
        # Through `__dict__`, because the exception's class may refuse to set attributes.
        vars(error).update(overwritten=found.whole + found.partly, partly_written=found.partly)
        add_sentence(error, self.describe(found))

    def describe(self, found: Overwritten) -> str:
        """Return the sentence for an error."""
        parts = [f"Before this error, the load had written to {self.where}"]
        if found.whole:
            parts.append(f"New values: {_list_names(found.whole)}")
        if found.partly:
            parts.append(f"Perhaps a mixture of old and new: {_list_names(found.partly)}")
        return ". ".join([*parts, "Everything else is unchanged"])


def add_sentence(error: BaseException, text: str) -> None:
    """Add a sentence to the text of a Holdfast error, or as a note to any other; only once per error."""
    if isinstance(error, HoldfastError):
        if text not in str(error):
            error.args = (f"{str(error).rstrip(' .')}. {text}", *error.args[1:])
        return
    add_note(error, text)


def _list_names(names: Sequence[str]) -> str:
    return list_some([name or "the tree" for name in names], _LISTED)


def _iter_sharing(leaves: Sequence[WrittenLeaf]) -> Iterator[tuple[int, int]]:
    """Yield pairs of leaves, by number, that share memory."""
    spans = sorted((span, number) for number, leaf in enumerate(leaves) for span in leaf.spans)
    around: list[tuple[AddressRange, int]] = []
    for span, number in spans:
        around = [item for item in around if item[0].device == span.device and item[0].stop > span.start]
        for _, other in around:
            if other != number:
                yield other, number
        around.append((span, number))


def find_address_range(tensor: torch.Tensor, size_bytes: int) -> tuple[AddressRange, ...]:
    """Return the addresses of a tensor's first bytes; empty if it has no memory."""
    start = tensor.data_ptr() if size_bytes else 0
    return (AddressRange(str(tensor.device), start, start + size_bytes),) if start else ()
