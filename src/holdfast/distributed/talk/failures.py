"""Failures of ranks: from an exception to a RankFailure, to bytes and back, and to a RankError."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from holdfast.distributed.talk import wire
from holdfast.errors import HoldfastError, RankError, RankFailure

MAX_READ: Final = 64
"""How many failures of a step a rank reads. If a thousand ranks fail, the first ones are enough to find the cause."""
_MAX_MESSAGE: Final = 4096
_MAX_TRACE: Final = 1 << 15
_MAX_RANKS_NAMED: Final = 8
_SHOWN: Final = 3
"""How many failures the text of an error describes; its attribute `failures` has all of them."""

# Type names of failures without an exception: a rank that gives no sign of life, one that closed too early, one that
# called another step, and a connection that was lost.
GONE: Final = "RankGone"
LEFT: Final = "RankLeft"
MISMATCH: Final = "StepMismatch"
LOST: Final = "ConnectionLost"


def describe_error(rank: int, error: BaseException) -> RankFailure:
    """Return the class, text and traceback of `error`; works for any exception."""
    # TracebackException also formats exceptions whose __str__ raises, and it follows causes.
    trace = traceback.TracebackException.from_exception(error)
    name = _name_type(type(error))
    # If too long, keep the end of the traceback: it shows where the error was raised.
    return RankFailure(rank, name, str(trace)[:_MAX_MESSAGE], "".join(trace.format())[-_MAX_TRACE:])


def _name_type(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_caused_by(error: RankError, *kinds: type[HoldfastError]) -> bool:
    """Return whether each rank that failed has raised an error of these classes; the same answer on all ranks."""
    names = {_name_type(kind) for kind in _iter_subclasses(kinds)}
    return bool(error.failures) and all(failure.type_name in names for failure in error.failures.values())


def _iter_subclasses(kinds: Iterable[type[HoldfastError]]) -> Iterator[type[HoldfastError]]:
    for kind in kinds:
        yield kind
        yield from _iter_subclasses(kind.__subclasses__())


def encode_failures(failures: Iterable[RankFailure]) -> list[wire.Frame]:
    """Encode failures as a message."""
    return wire.encode([(one.rank, one.type_name, one.message, one.traceback_text) for one in failures])


def decode_failures(data: bytes) -> list[RankFailure]:
    """Decode the failures of a message."""
    return [RankFailure(*fields) for fields in wire.decode(data)]


def make_error(step: str, failures: Sequence[RankFailure], *, rank: int, world_size: int) -> RankError:
    """Return the RankError of a step: the ranks that failed, their errors, and the first traceback of another rank."""
    by_rank = {one.rank: one for one in sorted(failures, key=lambda one: one.rank)}
    shown = [f"rank {one.rank}: {one.type_name}: {one.message}" for one in list(by_rank.values())[:_SHOWN]]
    if len(by_rank) > _SHOWN:
        shown.append(f"and {len(by_rank) - _SHOWN} more, see `.failures`")
    who = "this rank" if list(by_rank) == [rank] else name_ranks(by_rank)
    first = next((one.traceback_text for one in by_rank.values() if one.traceback_text and one.rank != rank), "")
    text = f"step {step!r} failed on rank {rank} of {world_size}, because of {who}: " + "; ".join(shown)
    return RankError(f"{text}\n{first}".rstrip(), step=step, failures=by_rank)


def make_lost_error(step: str, reason: str, *, rank: int, world_size: int) -> RankError:
    """Return the RankError for when the process that hosts the group's store cannot be reached."""
    text = (
        f"step {step!r} failed on rank {rank} of {world_size}: the process that hosts the group's store (rank 0, or "
        f"the launcher) is gone or cannot be reached ({reason}); restart the job"
    )
    return RankError(text, step=step)


def name_ranks(ranks: Iterable[int]) -> str:
    """Format ranks for a message: "no rank", "rank 2 twice", "ranks 0, 1 and 5", "ranks 0-63"."""
    # Not Counter(ranks): of a mapping, that would take the values as counts.
    counts = Counter(iter(ranks))
    if not counts:
        return "no rank"
    if len(counts) == 1:
        ((rank, count),) = counts.items()
        return f"rank {rank}" + {1: "", 2: " twice"}.get(count, f", {count} times")
    runs = _join_runs(sorted(counts))
    if len(runs) > _MAX_RANKS_NAMED:
        return f"{len(counts)} ranks, {', '.join(runs[:_MAX_RANKS_NAMED])} among them"
    return f"ranks {', '.join(runs[:-1])} and {runs[-1]}" if len(runs) > 1 else f"ranks {runs[0]}"


def _join_runs(ranks: Sequence[int]) -> list[str]:
    """Return sorted ranks as texts; three or more consecutive ranks become one range, such as "4-7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return texts
