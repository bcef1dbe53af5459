"""Checks that the boxes that ranks store make up each global tensor exactly once, and describes what is wrong.

A sketch is a random measure of boxes. Per tensor and dim a seed gives every coordinate x a random number G(x), but for
G(0) = 0 and G(length) = 1. A box weighs the product over its dims of G(stop) - G(start), times a random number of
its tensor. Weights add up like volumes do, so boxes that are a tensor exactly once weigh what the whole does. Where
they are not, the difference is a polynomial in random numbers that is not zero, and its value modulo a prime of 127
bits is zero by accident once in about 2**120 saves.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from holdfast.digest import Seeded
from holdfast.distributed.talk.failures import name_ranks
from holdfast.repo.format.boxes import Box, Coordinates, contains, overlap, volume, whole

_PRIME: Final = (1 << 127) - 1
"""Modulus of all sums. It is prime because a polynomial has few zeros only over a field."""
_SEED_BYTES: Final = 8

BoxItem = tuple[str, str, Coordinates, Box]
"""Name, dtype and global shape of a tensor, and one of its stored boxes."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """The sums of some boxes; merged over all ranks they show whether every tensor is stored exactly once."""

    total: int = 0
    """Weight of the boxes minus weight of the tensors whose origin they contain, modulo a prime."""
    origins: tuple[int, ...] = ()
    """Sorted 8-byte hashes of the tensors whose first item is stored. A hash that occurs twice is stored twice."""


def sketch_boxes(items: Iterable[BoxItem], seed: bytes) -> Sketch:
    """Sketch the boxes that one rank stores; `seed` is random for each save, and the same on all ranks.

    A tensor without items counts as stored by a rank that passes a box of it that starts at the origin.
    """
    seeded = Seeded(int.from_bytes(seed[:_SEED_BYTES].ljust(_SEED_BYTES, b"\0"), "big"))
    known: dict[tuple[str, str, Coordinates], bytes] = {}
    total = 0
    origins = []
    for name, dtype, shape, box in items:
        is_first = not any(box.starts)
        if volume(box) == 0 and not (is_first and 0 in shape):
            continue
        if is_first:
            origins.append(int.from_bytes(seeded(seed + name.encode(errors="surrogatepass"))[:8], "big"))
        if box == whole(shape):
            continue
        tensor = (name, dtype, shape)
        if tensor not in known:
            known[tensor] = seeded(_encode_tensor(seed, *tensor))
        difference = _weigh(box, shape, known[tensor], seeded) - (is_first and 0 not in shape)
        total += difference * int.from_bytes(known[tensor], "big")
    return Sketch(total % _PRIME, tuple(sorted(origins)))


def _encode_tensor(seed: bytes, name: str, dtype: str, shape: Coordinates) -> bytes:
    parts = (seed, name.encode(errors="surrogatepass"), dtype.encode(), struct.pack(f"<{len(shape)}q", *shape))
    return b"".join(struct.pack("<q", len(part)) + part for part in parts)


def _weigh(box: Box, shape: Coordinates, tensor: bytes, seeded: Seeded) -> int:
    """Return the weight of a box, without the factor of its tensor."""
    weight = 1
    for dim, (start, size, length) in enumerate(zip(box.starts, box.sizes, shape, strict=True)):
        if size != length or start:
            heights = [_hash_edge(edge, length, dim, tensor, seeded) for edge in (start, start + size)]
            weight = weight * (heights[1] - heights[0]) % _PRIME
    return weight


def _hash_edge(edge: int, length: int, dim: int, tensor: bytes, seeded: Seeded) -> int:
    # G(0) = 0 and G(length) = 1: a box that is whole along a dim has the factor 1 there.
    if edge in (0, length):
        return int(edge > 0)
    return int.from_bytes(seeded(tensor + struct.pack("<qq", dim, edge)), "big")


def merge(sketches: Iterable[Sketch]) -> Sketch:
    """Return the sketch of all boxes together."""
    total = 0
    origins: list[int] = []
    for sketch in sketches:
        total += sketch.total
        origins += sketch.origins
    return Sketch(total % _PRIME, tuple(sorted(origins)))


def is_covered(sketch: Sketch) -> bool:
    """Return whether every tensor of which any box is stored is stored exactly once."""
    return sketch.total % _PRIME == 0 and all(left != right for left, right in pairwise(sketch.origins))


@dataclass(frozen=True, slots=True)
class Problem:
    """A region of a tensor that no rank or several ranks store, or a dtype or shape that ranks disagree about."""

    name: str
    text: str
    """A sentence that names the tensor, the region and the ranks."""
    region: Box | None = None
    """None if the problem concerns the whole tensor."""
    ranks: tuple[int, ...] = ()
    """The ranks that store the region; a rank that stores it twice is listed twice."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, with the dtype and shape of the tensor on the rank that stores it."""

    rank: int
    name: str
    dtype: str
    shape: Coordinates
    box: Box


def find_problems(stored: Iterable[StoredBox]) -> list[Problem]:
    """Return every reason why a tensor is not stored exactly once. Slow, so it is used only if the sketches fail."""
    by_name: dict[str, list[StoredBox]] = defaultdict(list)
    for each in stored:
        by_name[each.name].append(each)
    problems = []
    for name, found in by_name.items():
        differences = _find_differences(name, found)
        problems += differences or find_gaps(name, found[0].shape, [(each.rank, each.box) for each in found])
    return problems


def _find_differences(name: str, stored: Sequence[StoredBox]) -> list[Problem]:
    problems = []
    for what in ("dtype", "shape"):
        ranks: dict[object, set[int]] = defaultdict(set)
        for each in stored:
            ranks[getattr(each, what)].add(each.rank)
        if len(ranks) > 1:
            views = " and ".join(f"{value} on {name_ranks(ranks[value])}" for value in ranks)
            all_ranks = tuple(sorted(set().union(*ranks.values())))
            problems.append(Problem(name, f"{name}: its {what} is {views}", ranks=all_ranks))
    return problems


def find_gaps(name: str, shape: Coordinates, stored: Sequence[tuple[int, Box]]) -> list[Problem]:
    """Return every region of a tensor that no rank stores, that several store, or that is outside of its shape.

    `stored` has the rank and the box of everything that is stored of it.
    """
    problems = [_describe_outside(name, shape, rank, box) for rank, box in stored if not contains(whole(shape), box)]
    if 0 in shape:
        ranks = sorted(rank for rank, box in stored if volume(box) == 0 and not any(box.starts))
        found = [] if len(ranks) == 1 else [(whole(shape), tuple(ranks))]
    else:
        inside = [(rank, overlap(whole(shape), box)) for rank, box in stored]
        found = _sweep([(rank, box) for rank, box in inside if box is not None], shape, 0)
    return problems + [_describe_region(name, shape, region, ranks) for region, ranks in found]


def _describe_outside(name: str, shape: Coordinates, rank: int, box: Box) -> Problem:
    region = name_region(box, tuple(stop + 1 for stop in box.stops))
    return Problem(name, f"{name}: rank {rank} holds {region}, outside of shape {shape}", box, (rank,))


def _describe_region(name: str, shape: Coordinates, region: Box, ranks: tuple[int, ...]) -> Problem:
    verb = "is" if region == whole(shape) or len(shape) > 2 else "are"
    return Problem(name, f"{name}: {name_region(region, shape)} {verb} held by {name_ranks(ranks)}", region, ranks)


_Found = list[tuple[Box, tuple[int, ...]]]


def _sweep(stored: Collection[tuple[int, Box]], shape: Coordinates, dim: int) -> _Found:
    """Return the regions, in the dims from `dim` on, that no box or several boxes cover, with the ranks of these."""
    if dim == len(shape) or not stored:
        ranks = tuple(sorted(rank for rank, _ in stored))
        return [] if len(ranks) == 1 else [(whole(shape[dim:]), ranks)]
    opening, closing = defaultdict(list), defaultdict(list)
    for number, (_, box) in enumerate(stored):
        opening[box.starts[dim]].append(number)
        closing[box.stops[dim]].append(number)
    boxes = list(stored)
    active: dict[int, tuple[int, Box]] = {}
    slabs: list[tuple[int, int, _Found]] = []
    for low, high in pairwise(sorted({0, shape[dim], *opening, *closing})):
        for number in closing[low]:
            del active[number]
        active.update((number, boxes[number]) for number in opening[low])
        found = _sweep(active.values(), shape, dim + 1)
        # Join neighbours with equal findings: the edge between them belongs to a box elsewhere.
        start = slabs.pop()[0] if slabs and slabs[-1][2] == found else low
        slabs.append((start, high, found))
    return [
        (Box((low, *inner.starts), (high - low, *inner.sizes)), ranks)
        for low, high, found in slabs
        for inner, ranks in found
    ]


def name_region(region: Box, shape: Coordinates) -> str:
    """Format a region for a message: items of one dim, rows and columns of two, an index expression of more."""
    if region == whole(shape):
        return "all of it"
    parts = [(f"{start}:{stop}", size == length) for (start, size), stop, length in _edges(region, shape)]
    if len(shape) > 2:
        return f"[{', '.join(':' if is_whole else text for text, is_whole in parts)}]"
    words = ("items",) if len(shape) == 1 else ("rows", "columns")
    named = zip(words, parts, strict=True)
    return ", ".join(f"{word} {text}" for word, (text, is_whole) in named if not is_whole)


def _edges(region: Box, shape: Coordinates) -> Iterable[tuple[tuple[int, int], int, int]]:
    return zip(zip(region.starts, region.sizes, strict=True), region.stops, shape, strict=True)
