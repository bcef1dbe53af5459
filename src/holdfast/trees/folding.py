"""Folds long lists of leaves for people: repeated layers become one line with `#`, and RNG state becomes one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

MIN_REPEATS: Final = 3
"""Fewer leaves than this are listed one by one."""
MIN_VALUES: Final = 8
"""Fewer plain values than this are listed one by one, unless they are equal."""
_PLACE: Final = "#"
_RNG_LEAVES: Final = ("python.version", "python.words", "numpy.bit_generator", "torch")
"""Leaves below the name of an `RngState`, by which it is recognised."""
RNG_LABEL: Final = "RNG state"


@dataclass(frozen=True, slots=True)
class FoldableLeaf:
    """One line of a list of leaves."""

    name: str
    label: str
    """What the leaf is; leaves are folded only if it is equal, or if they are plain values."""
    is_plain: bool
    """Whether it is a plain value, whose label is the value itself."""


@dataclass(frozen=True, slots=True)
class Fold:
    """One line of a folded list."""

    name: str
    """The name of the leaf; of several, their common name with `#` for each number that differs."""
    label: str
    """What the leaf is; of several, with their number: `6 x float32 (64, 64)`."""
    members: tuple[int, ...]
    """The positions of its leaves in the list."""


def fold_leaves(leaves: Sequence[FoldableLeaf]) -> list[Fold]:
    """Return the folded list, each line at the place of its first leaf."""
    rng = {position: prefix for prefix in _find_rng_prefixes(leaves) for position in _list_below(leaves, prefix)}
    groups: dict[tuple[str, ...], list[int]] = {}
    for position, leaf in enumerate(leaves):
        key = ("rng", rng[position]) if position in rng else _find_group(leaf)
        groups.setdefault(key, []).append(position)
    folds = [fold for key, members in groups.items() for fold in _fold_group(key, members, leaves)]
    return sorted(folds, key=lambda fold: fold.members[0])


def _fold_group(key: tuple[str, ...], members: list[int], leaves: Sequence[FoldableLeaf]) -> Iterator[Fold]:
    if key[0] == "rng":
        yield Fold(key[1] or "(the tree)", f"{RNG_LABEL}, {len(members)} values", tuple(members))
        return
    names, labels = [leaves[at].name for at in members], [leaves[at].label for at in members]
    least = MIN_REPEATS if len(set(labels)) == 1 else MIN_VALUES
    if len(members) < least or len(set(names)) < len(names):
        yield from (Fold(name, label, (at,)) for name, label, at in zip(names, labels, members, strict=True))
    else:
        yield Fold(_join_names(names), _join_labels(labels), tuple(members))


def _find_group(leaf: FoldableLeaf) -> tuple[str, ...]:
    """Return what leaves that are folded have in common: the name without its numbers, and what they are."""
    keys = [_PLACE if _is_number(key) else key for key in leaf.name.split(".")]
    return ("plain" if leaf.is_plain else leaf.label, *keys)


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdigit()


def _join_names(names: Sequence[str]) -> str:
    """Return the common name, with `#` where they differ."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(keys[0] if len(set(keys)) == 1 else _PLACE for keys in columns)


def _join_labels(labels: Sequence[str]) -> str:
    """Return the common label and the number; of different values, the first and the last."""
    if len(set(labels)) == 1:
        return f"{len(labels)} x {labels[0]}"
    return f"{len(labels)} values: {labels[0]}, {labels[1]} ... {labels[-1]}"


def _find_rng_prefixes(leaves: Sequence[FoldableLeaf]) -> list[str]:
    """Return the names under which an `RngState` was saved; "" if it is the whole tree."""
    names = {leaf.name for leaf in leaves}
    first = _RNG_LEAVES[0]
    found = [name.removesuffix(first) for name in names if name == first or name.endswith(f".{first}")]
    return [prefix.removesuffix(".") for prefix in found if all(f"{prefix}{leaf}" in names for leaf in _RNG_LEAVES)]


def _list_below(leaves: Sequence[FoldableLeaf], prefix: str) -> list[int]:
    return [at for at, leaf in enumerate(leaves) if not prefix or leaf.name.startswith(f"{prefix}.")]
