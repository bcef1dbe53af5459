"""Reports replicas that differ between ranks: an error if they were declared replicas, otherwise a warning."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.errors import Mismatch

_MAX_NAMED: Final = 20


def tell_difference(name: str, holders: Sequence[int], tables: Sequence[Mapping[bytes, bytes]], key: bytes) -> str:
    """Return a line that groups the ranks `holders` by their value of a declared replica.

    `tables` has, for each rank, the fingerprints of its entries; `key` is that of the replica.
    """
    groups: dict[bytes, list[str]] = defaultdict(list)
    for rank in holders:
        groups[tables[rank][key]].append(str(rank))
    views = " and ".join(f"ranks {', '.join(found[:_MAX_NAMED])}" for found in groups.values())
    return f"{name}: declared a replica, but {views} hold different values"


def verify_alike(problems: Sequence[str]) -> None:
    """Raise Mismatch if declared replicas differ."""
    if problems:
        raise Mismatch("\n  ".join(["replicas differ; nothing was written:", *problems]), problems=tuple(problems))


def warn_of_divergent(name: str, divergent: Sequence[str]) -> None:
    """Warn of entries that differ between ranks without being declared per rank; every rank's value was saved."""
    shown = ", ".join(divergent[:_MAX_NAMED]) + (
        f" and {len(divergent) - _MAX_NAMED} more" if len(divergent) > _MAX_NAMED else ""
    )
    warnings.warn(
        f"{name!r}: not the same on all ranks: {shown}. The value of each rank was saved. Loaded on as many ranks, each"
        " gets its own; on another number, all get that of the lowest rank. Mark such values with"
        " holdfast.per_rank(...) if they are meant to differ",
        stacklevel=2,
    )
