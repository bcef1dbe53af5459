"""What became of ranks, as text that can travel: from an exception to a RankFailure, and from these to a RankError."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from typing import Final

from holdfast.distributed.talk import wire
from holdfast.errors import RankError, RankFailure

MAX_TOLD: Final = 64
"""How many failures a rank reads of a step: when all of a thousand fail, the first ones tell why."""
_MAX_MESSAGE: Final = 4096
_MAX_TRACE: Final = 1 << 15
_SHOWN: Final = 3
"""Failures that an error's text spells out; all are attributes."""

GONE: Final = "RankGone"
LEFT: Final = "RankLeft"
ASTRAY: Final = "StepMismatch"
LOST: Final = "ConnectionLost"
"""Type names of failures that no exception stands for: silent too long, closed too early, another step, cut off."""


def describe_error(rank: int, error: BaseException) -> RankFailure:
    """Return what `error` says, in full: its class, its text and its traceback; works for any exception at all."""
    # Formats what cannot say its own text, and follows causes.
    trace = traceback.TracebackException.from_exception(error)
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    # The end of a traceback is where it was raised.
    return RankFailure(rank, name, str(trace)[:_MAX_MESSAGE], "".join(trace.format())[-_MAX_TRACE:])


def encode_failures(failures: Iterable[RankFailure]) -> list[wire.Frame]:
    """Return failures as a message."""
    return wire.encode([(one.rank, one.type_name, one.message, one.traceback_text) for one in failures])


def decode_failures(data: bytes) -> list[RankFailure]:
    """Return the failures of a message."""
    return [RankFailure(*fields) for fields in wire.decode(data)]


def make_error(step: str, failures: Sequence[RankFailure], *, rank: int, world_size: int) -> RankError:
    """Return the error of a step for this rank: who failed and of what, the first in full."""
    by_rank = {one.rank: one for one in sorted(failures, key=lambda one: one.rank)}
    shown = [f"rank {one.rank}: {one.type_name}: {one.message}" for one in list(by_rank.values())[:_SHOWN]]
    if len(by_rank) > _SHOWN:
        shown.append(f"and {len(by_rank) - _SHOWN} more, see `.failures`")
    who = "this rank" if list(by_rank) == [rank] else name_ranks(by_rank)
    first = next((one.traceback_text for one in by_rank.values() if one.traceback_text and one.rank != rank), "")
    text = f"step {step!r} failed on rank {rank} of {world_size}, because of {who}: " + "; ".join(shown)
    return RankError(f"{text}\n{first}".rstrip(), step=step, failures=by_rank)


def make_lost_error(step: str, reason: str, *, rank: int, world_size: int) -> RankError:
    """Return the error for when the ranks can no longer reach each other: who hosts their store is gone."""
    text = (
        f"step {step!r} failed on rank {rank} of {world_size}: the process that hosts the group's store (rank 0, or "
        f"the launcher) is gone or cannot be reached ({reason}); restart the job"
    )
    return RankError(text, step=step)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as a person writes them: `rank 1`, `ranks 1, 2`, `ranks 0, 1, 2, 3 and 20 more`."""
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
