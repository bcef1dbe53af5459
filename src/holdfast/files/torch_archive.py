"""Finds where the tensors of a file of `torch.save` are, by its zip directory and the shapes in its pickle."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import BinaryIO, Final

from holdfast.errors import BadFile
from holdfast.files.pickle_shapes import PickledTensor, parse_tensors
from holdfast.files.zip_records import PICKLE, find_records
from holdfast.repo.format.grid import ITEM_BYTES, Extent

MAX_DIRECTORY_BYTES: Final = 2 << 20
"""A longer directory is not read. 2 MiB list about 30,000 storages."""
MAX_PICKLE_BYTES: Final = 8 << 20
"""A longer pickle is not read; each storage is then cut without regard to rows."""
_STORAGES: Final = "data/"


def read_torch_archive(file: BinaryIO, size_bytes: int) -> list[Extent]:
    """Return the tensors of a file that has `size_bytes`, and the storages whose tensors are not known; [] if none."""

    def read(start: int, stop: int) -> bytes:
        file.seek(start)
        return file.read(stop - start)

    try:
        records = find_records(read, size_bytes, where="the file", max_directory_bytes=MAX_DIRECTORY_BYTES)
    except (BadFile, OSError, struct.error):
        return []
    storages = {
        name.removeprefix(_STORAGES): Extent(start, stop)
        for name, (start, stop) in records.items()
        if name.startswith(_STORAGES) and start < stop
    }
    if not _are_disjoint(storages.values()):
        return []
    start, stop = records[PICKLE]
    tensors = _parse_tensors(read(start, stop)) if stop - start <= MAX_PICKLE_BYTES else {}
    return [extent for key, storage in storages.items() for extent in _place(tensors.get(key, ()), storage)]


def _parse_tensors(pickle: bytes) -> Mapping[str, Sequence[PickledTensor]]:
    """Return the tensors that the pickle describes, by the key of their storage; none if it cannot be parsed."""
    by_key: dict[str, list[PickledTensor]] = defaultdict(list)
    try:
        for tensor in parse_tensors(pickle):
            by_key[tensor.key].append(tensor)
    except ValueError:
        return {}
    return by_key


def _place(tensors: Sequence[PickledTensor], storage: Extent) -> list[Extent]:
    """Return the tensors in a storage; the storage itself if one does not fit into it, or some overlap in part."""
    try:
        found = list(_iter_placed(tensors, storage))
    except ValueError:
        return [storage]
    # Tensors of the same bytes, such as tied weights, are cut as the first of them.
    distinct = {(each.start, each.stop): each for each in reversed(found)}.values()
    return [*distinct] if distinct and _are_disjoint(distinct) else [storage]


def _iter_placed(tensors: Sequence[PickledTensor], storage: Extent) -> Iterator[Extent]:
    """Yield the tensors that have no gaps between their items; raises ValueError if one does not fit."""
    for tensor in tensors:
        count = math.prod(tensor.shape)
        if not count:
            continue
        # A storage without a dtype states bytes; its items are known if the tensor is all of it.
        item_bytes, rest = divmod(storage.stop - storage.start, tensor.storage_items if tensor.is_typed else count)
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True)) + 1
        start = storage.start + tensor.offset * item_bytes
        stop = start + reach * item_bytes
        if rest or item_bytes not in ITEM_BYTES or stop > storage.stop:
            raise ValueError("a tensor does not fit into its storage")
        if count == reach:
            yield Extent(start, stop, item_bytes, tensor.shape if _is_in_order(tensor) else ())


def _is_in_order(tensor: PickledTensor) -> bool:
    """Return whether the items are in C order."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def _are_disjoint(extents: Iterable[Extent]) -> bool:
    return all(left.stop <= right.start for left, right in pairwise(sorted(extents)))
