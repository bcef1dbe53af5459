"""Folds long lists of leaves for people: repeated layers become one line with `#`, and RNG state becomes one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

MIN_REPEATS: Final = 3
"""Fewer leaves than this are listed one by one."""
MIN_VALUES: Final = 8
"""Fewer plain values than this are listed one by one, unless they are equal."""
_PLACE: Final = "#"
_NUMBER: Final = re.compile(r"(?<![^.])[0-9]+(?![^.])")
"""A key of a name that is a number."""
_RNG_LEAVES: Final = ("python.version", "python.words", "numpy.bit_generator", "torch")
"""Leaves below the name of an `RngState`, by which it is recognised."""
RNG_LABEL: Final = "RNG state"


class Foldable(Protocol):
    """One line of a list of leaves."""

    @property
    def name(self) -> str:
        """The name of the leaf."""

    @property
    def label(self) -> str:
        """What the leaf is; leaves are folded only if it is equal, or if they are plain values."""

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain value, whose label is the value itself."""


class FoldableLeaf(NamedTuple):
    """A line that has nothing else."""

    name: str
    label: str
    is_plain: bool


@dataclass(frozen=True, slots=True)
class Fold:
    """One line of a folded list."""

    name: str
    """The name of the leaf; of several, their common name with `#` for each number that differs."""
    label: str
    """What the leaf is; of several, with their number: `6 x float32 (64, 64)`."""
    members: tuple[int, ...]
    """The positions of its leaves in the list."""


def fold_leaves(leaves: Sequence[Foldable]) -> list[Fold]:
    """Return the folded list, each line at the place of its first leaf."""
    rng = {position: prefix for prefix in _find_rng_prefixes(leaves) for position in _list_below(leaves, prefix)}
    groups: dict[tuple[str, str, str], list[int]] = {}
    for position, leaf in enumerate(leaves):
        key = ("rng", rng[position], "") if position in rng else _find_group(leaf)
        groups.setdefault(key, []).append(position)
    folds = [fold for key, members in groups.items() for fold in _fold_group(key, members, leaves)]
    return sorted(folds, key=lambda fold: fold.members[0])


def _fold_group(key: tuple[str, str, str], members: list[int], leaves: Sequence[Foldable]) -> Iterator[Fold]:
    if key[0] == "rng":
        yield Fold(key[1] or "(the tree)", f"{RNG_LABEL}, {len(members)} values", tuple(members))
        return
    names, labels = [leaves[at].name for at in members], [leaves[at].label for at in members]
    least = MIN_REPEATS if len(set(labels)) == 1 else MIN_VALUES
    if len(members) < least or len(set(names)) < len(names):
        yield from (Fold(name, label, (at,)) for name, label, at in zip(names, labels, members, strict=True))
    else:
        yield Fold(_join_names(names), _join_labels(labels), tuple(members))


def _find_group(leaf: Foldable) -> tuple[str, str, str]:
    """Return what leaves that are folded have in common: the name without its numbers, and what they are."""
    pattern = _NUMBER.sub(_PLACE, leaf.name)
    return ("plain", "", pattern) if leaf.is_plain else ("stored", leaf.label, pattern)


def _join_names(names: Sequence[str]) -> str:
    """Return the common name, with `#` where they differ; they differ in numbers at most."""
    first = names[0].split(".")
    equal = {at for at, key in enumerate(first) if _NUMBER.fullmatch(key) or key == _PLACE}
    # Numbers of layers differ in the second name already, so that few names are looked at.
    for name in names[1:]:
        if not equal:
            break
        keys = name.split(".")
        equal = {at for at in equal if keys[at] == first[at]}
    pattern = _NUMBER.sub(_PLACE, names[0]).split(".")
    return ".".join(first[at] if at in equal else key for at, key in enumerate(pattern))


def _join_labels(labels: Sequence[str]) -> str:
    """Return the common label and the number; of different values, the first and the last."""
    if len(set(labels)) == 1:
        return f"{len(labels)} x {labels[0]}"
    return f"{len(labels)} values: {labels[0]}, {labels[1]} ... {labels[-1]}"


def _find_rng_prefixes(leaves: Sequence[Foldable]) -> list[str]:
    """Return the names under which an `RngState` was saved; "" if it is the whole tree."""
    names = {leaf.name for leaf in leaves}
    first = _RNG_LEAVES[0]
    found = [name.removesuffix(first) for name in names if name == first or name.endswith(f".{first}")]
    return [prefix.removesuffix(".") for prefix in found if all(f"{prefix}{leaf}" in names for leaf in _RNG_LEAVES)]


def _list_below(leaves: Sequence[Foldable], prefix: str) -> list[int]:
    return [at for at, leaf in enumerate(leaves) if not prefix or leaf.name.startswith(f"{prefix}.")]
