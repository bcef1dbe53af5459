"""What is said of values that ranks should hold alike and do not: refused if it was declared, told if it was not."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.errors import Mismatch

_MAX_NAMED: Final = 20


def tell_difference(name: str, holders: Sequence[int], tables: Sequence[Mapping[bytes, bytes]], key: bytes) -> str:
    """Say who holds what of an entry that was declared the same on all its holders; tables are fingerprints by rank."""
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
    """Warn that each rank's value was kept of what nobody has declared to be its own."""
    shown = ", ".join(divergent[:_MAX_NAMED]) + (
        f" and {len(divergent) - _MAX_NAMED} more" if len(divergent) > _MAX_NAMED else ""
    )
    warnings.warn(
        f"{name!r}: not the same on all ranks: {shown}. Each rank's was kept: as many ranks get their own back, another"
        " number gets that of the lowest. Say holdfast.per_rank(...) where it is meant to be so",
        stacklevel=2,
    )
