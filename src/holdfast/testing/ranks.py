"""Ranks on one machine: a function run by several processes that form a process group, and ranks that die on cue."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # there, and not declared as exported

_HOST: Final = "127.0.0.1"
_PRELOADED: Final = ("torch.distributed", "holdfast.distributed.talk.collectives")
"""Loaded once by the process that ranks are forked from: a rank then starts in milliseconds, not in seconds."""
_GRACE_S: Final = 2.0
"""How long the others have for their answer when one rank has failed: they may wait for it for ever."""
_LOOK_S: Final = 0.02


class RanksFailed(Exception):
    """Some ranks raised, died or gave no answer; `reasons` says what is known of each."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items())))
        self.reasons = dict(reasons)


@dataclass(frozen=True, slots=True)
class RankFault:
    """A signal sent to a rank from outside: `after_s` seconds after it began, and once the file `marker` exists."""

    signal: Signals = SIGKILL
    after_s: float = 0.0
    marker: Path | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Stands in the results for a rank of which no answer was expected."""

    rank: int


@dataclass(frozen=True, slots=True)
class _Job:
    """What a rank process is to do."""

    rank: int
    size: int
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    backend: str | None
    timeout_s: float


@dataclass(slots=True)
class _Rank:
    """A rank process as its parent sees it."""

    process: ForkServerProcess
    connection: Connection
    began: float = field(default_factory=time.monotonic)


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    faults: Mapping[int, RankFault] | None = None,
    lost: Collection[int] = (),
    hosted_apart: bool = False,
    preload: Sequence[str] = (),
    **kwargs: Any,
) -> list[Any]:
    """Run `function(rank, *args, **kwargs)` on `size` ranks of one group; return their results, by rank.

    The function is one of a module, its arguments and results can be pickled. Every call has fresh processes; none
    outlives it. A rank that raises, dies or is silent for `timeout_s` makes RanksFailed, with its traceback.

    Args:
        size: how many ranks.
        function: what each of them runs, with the default group made.
        args: given to the function, after the rank.
        timeout_s: how long all of it may take; after that the stacks of all ranks go to standard error.
        backend: of the group; None makes no group.
        faults: signals to send to ranks, of which no answer is then expected.
        lost: ranks that end or stop themselves, of which no answer is expected either.
        hosted_apart: have the calling process host the group's store, as launchers do, in place of rank 0.
        preload: modules to load once for all ranks of all calls, which makes them start faster; heeded by the first.
        kwargs: given to the function.
    """
    faults = faults or {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *preload])
    ranks: list[_Rank] = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            job = _Job(rank, size, function, args, kwargs, backend, timeout_s)
            process = context.Process(target=_serve, args=(job, theirs), name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours))
        # It ends with its last reference, which is this.
        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False) if hosted_apart else None
        if backend is None:
            for one in ranks:
                one.connection.send(0)
        else:
            _introduce(ranks, store)
        return _Answers(ranks, faults, {*faults, *lost}).wait(timeout_s)
    finally:
        for one in ranks:
            # The last word was sent to those that end by themselves; a stopped one hears nothing but this.
            one.process.join(_GRACE_S if one.connection.closed else 0)
            one.process.kill()
            one.process.join()
            one.connection.close()


def _introduce(ranks: Sequence[_Rank], store: TCPStore | None) -> None:
    """Tell all ranks where their store is: here, or at rank 0, which tells where."""
    try:
        port = store.port if store else 0
        for number, one in enumerate(ranks):
            one.connection.send(port)
            if number == 0 and not port:
                port = one.connection.recv()
    except (EOFError, BrokenPipeError) as error:
        raise RanksFailed({0: "a rank could not start; can its function be imported? See standard error"}) from error


class _Answers:
    """Collects what the ranks answer, and sends signals when it is time."""

    def __init__(self, ranks: Sequence[_Rank], faults: Mapping[int, RankFault], unexpected: Collection[int]) -> None:
        self._ranks = ranks
        self._faults = dict(faults)
        self._unexpected = unexpected
        self._pending = {rank for rank in range(len(ranks)) if rank not in unexpected}
        self._results: list[Any] = [Lost(rank) for rank in range(len(ranks))]
        self._reasons: dict[int, str] = {}

    def wait(self, timeout_s: float) -> list[Any]:
        """Return the results of all, or raise RanksFailed."""
        deadline = time.monotonic() + timeout_s
        while (self._pending or self._faults) and time.monotonic() < deadline:
            self._send_signals()
            ready = wait([self._ranks[rank].connection for rank in self._pending], _LOOK_S)
            for rank in [rank for rank in self._pending if self._ranks[rank].connection in ready]:
                self._take(rank)
                if rank in self._reasons:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if self._reasons or self._pending or self._faults:
            silent = "no answer" if self._reasons else f"no answer within {timeout_s:g} s"
            unhurt = dict.fromkeys(self._faults, "its fault was not due before the end")
            raise RanksFailed({**unhurt, **dict.fromkeys(self._pending, silent), **self._reasons})
        self._dismiss()
        return self._results

    def _take(self, rank: int) -> None:
        self._pending.discard(rank)
        try:
            is_result, value = self._ranks[rank].connection.recv()
        except EOFError:
            self._ranks[rank].process.join(_GRACE_S)
            self._reasons[rank] = f"ended with code {self._ranks[rank].process.exitcode} and no answer"
            return
        if is_result:
            self._results[rank] = value
        else:
            self._reasons[rank] = value

    def _send_signals(self) -> None:
        now = time.monotonic()
        for rank, fault in list(self._faults.items()):
            is_time = now - self._ranks[rank].began >= fault.after_s
            if is_time and (fault.marker is None or fault.marker.exists()):
                del self._faults[rank]
                with suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(self._ranks[rank].process.pid or 0, fault.signal)

    def _dismiss(self) -> None:
        for rank, one in enumerate(self._ranks):
            if rank not in self._unexpected:
                one.connection.send(not self._unexpected)
                one.connection.close()


def _serve(job: _Job, connection: Connection) -> None:
    """Be one rank: make the group, run the function, answer, and stay until all have."""
    faulthandler.dump_traceback_later(job.timeout_s)
    # As launchers do: ranks that each take all cores for a sum get in each other's way.
    torch.set_num_threads(1)
    try:
        _join(job, connection)
        answer = (True, job.function(job.rank, *job.args, **job.kwargs))
    except BaseException:  # noqa: BLE001 - whatever ends it is the answer
        answer = (False, traceback.format_exc())
    try:
        connection.send(answer)
    except Exception:  # noqa: BLE001 - a result that cannot be pickled may raise anything
        connection.send((False, traceback.format_exc()))
    # A group whose ranks leave one by one may abort the process, and one that has lost ranks cannot meet.
    if _wait_dismissal(connection) and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    else:
        _end()


def _join(job: _Job, connection: Connection) -> None:
    port = connection.recv()
    if job.backend is None:
        return
    timeout = timedelta(seconds=job.timeout_s)
    store = TCPStore(_HOST, port, job.size, is_master=not port, timeout=timeout, wait_for_workers=False)
    if not port:
        connection.send(store.port)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.size, timeout=timeout)


def _wait_dismissal(connection: Connection) -> bool:
    try:
        return bool(connection.recv())
    except EOFError:
        return False


def _end() -> NoReturn:
    os._exit(0)
