"""Iterates over the files of a local store in key order, and stats no more names than needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice

from holdfast.objects.local.files import FileStat

FindNames = Callable[[str], Sequence[str]]
"""Returns the requested keys in a directory; the argument is empty or ends in a slash."""
FindStats = Callable[[str, Sequence[str]], Mapping[str, FileStat | None]]
"""Returns the stat of keys in a directory; None for keys to skip."""


def iter_in_key_order(
    base: str, find_names: FindNames, find_stats: FindStats, *, batch: int
) -> Iterator[tuple[str, FileStat]]:
    """Yield each key below `base` that is not a directory, with its stat; `batch` names are stat-ed at a time."""
    names: list[str] = []
    ahead: dict[str, Iterator[str]] = {}
    known: dict[str, FileStat | None] = {}

    def enter(directory: str) -> None:
        keys = sorted(find_names(directory))
        ahead[directory] = iter(keys)
        for key in keys:
            heappush(names, key)

    # Every key below the directory `k` is greater than `k`: taking the least name, and putting back the names
    # below it if it is a directory, yields keys in order however directories nest.
    enter(base)
    while names:
        key = heappop(names)
        if key not in known:
            # The keys of one directory come in order, so the following ones are needed next.
            directory = key[: key.rfind("/") + 1]
            known.update(find_stats(directory, list(islice(ahead[directory], batch))))
        status = known.pop(key)
        if status is None:
            continue
        if status.kind == "directory":
            enter(key + "/")
        else:
            yield key, status
