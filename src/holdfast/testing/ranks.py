"""Runs a function on several processes of one machine that form a process group, and kills some of them on request."""

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
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exists, but is not declared as exported

_HOST: Final = "127.0.0.1"
_PRELOADED: Final = ("torch.distributed", "holdfast.distributed.talk.collectives")
"""Imported once by the process that ranks are forked from, so that a rank starts in milliseconds, not in seconds."""
_GRACE_S: Final = 2.0
"""How long to wait for the other ranks after one has failed: they may be waiting for it for ever."""
_POLL_S: Final = 0.02


class RanksFailed(Exception):
    """Some ranks raised, died or did not answer; `reasons` has the reason for each."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items())))
        self.reasons = dict(reasons)


@dataclass(frozen=True, slots=True)
class RankFault:
    """A signal to send to a rank, `after_s` seconds after its start, and not before the file `marker` exists."""

    signal: Signals = SIGKILL
    after_s: float = 0.0
    marker: Path | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The result of a rank from which no answer was expected."""

    rank: int


@dataclass(frozen=True, slots=True)
class _Job:
    """The arguments of a rank process."""

    rank: int
    size: int
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    backend: str | None
    timeout_s: float


@dataclass(slots=True)
class _Rank:
    """A rank process and the connection to it, in the parent."""

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

    The function must be at the top level of a module; its arguments and results must be picklable. Every call starts
    new processes, and all of them have ended when it returns. Raises RanksFailed, with tracebacks, if a rank raises,
    dies or does not answer within `timeout_s`.

    Args:
        size: the number of ranks.
        function: runs on each rank, after the default process group was created.
        args: passed to the function, after the rank.
        timeout_s: limit for the whole call; after that, the stacks of all ranks are printed to standard error.
        backend: of the process group; None creates no group.
        faults: signals to send to ranks, from which no answer is then expected.
        lost: ranks that end or stop themselves; if one answers all the same, RanksFailed is raised.
        hosted_apart: host the group's store in the calling process, as launchers do, instead of on rank 0.
        preload: modules to import once for the ranks of all calls, so that they start faster; only the first call
            in a process can set it.
        kwargs: passed to the function.
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
        # The store lives as long as this reference to it.
        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False) if hosted_apart else None
        if backend is None:
            for one in ranks:
                one.connection.send(0)
        else:
            _send_port(ranks, store)
        return _Answers(ranks, faults, lost).wait(timeout_s)
    finally:
        for one in ranks:
            # A closed connection means that the rank was told to end by itself. Others are killed, stopped ones too.
            one.process.join(_GRACE_S if one.connection.closed else 0)
            one.process.kill()
            one.process.join()
            one.connection.close()


def _send_port(ranks: Sequence[_Rank], store: TCPStore | None) -> None:
    """Send the port of the group's store to all ranks; without `store`, rank 0 creates one and returns the port."""
    try:
        port = store.port if store else 0
        for number, one in enumerate(ranks):
            one.connection.send(port)
            if number == 0 and not port:
                port = one.connection.recv()
    except (EOFError, BrokenPipeError) as error:
        raise RanksFailed({0: "a rank could not start; can its function be imported? See standard error"}) from error


class _Answers:
    """Collects the answers of the ranks, and sends them signals when these are due."""

    def __init__(self, ranks: Sequence[_Rank], faults: Mapping[int, RankFault], lost: Collection[int]) -> None:
        self._ranks = ranks
        self._faults = dict(faults)
        self._lost = lost
        self._unexpected = {*faults, *lost}
        self._pending = {rank for rank in range(len(ranks)) if rank not in self._unexpected}
        self._results: list[Any] = [Lost(rank) for rank in range(len(ranks))]
        self._reasons: dict[int, str] = {}

    def wait(self, timeout_s: float) -> list[Any]:
        """Return the results of all ranks, or raise RanksFailed."""
        deadline = time.monotonic() + timeout_s
        while (self._pending or self._faults) and time.monotonic() < deadline:
            self._send_signals()
            ready = wait([self._ranks[rank].connection for rank in self._pending], _POLL_S)
            for rank in [rank for rank in self._pending if self._ranks[rank].connection in ready]:
                self._take(rank)
                if rank in self._reasons:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if self._reasons or self._pending or self._faults:
            silent = "no answer" if self._reasons else f"no answer within {timeout_s:g} s"
            unhurt = dict.fromkeys(self._faults, "its fault was not due before the timeout")
            raise RanksFailed({**unhurt, **dict.fromkeys(self._pending, silent), **self._reasons})
        for rank in filter(self._has_answered, self._lost):
            self._reasons[rank] = "answered, but was expected to end or stop itself: was its fault reached?"
        if self._reasons:
            raise RanksFailed(self._reasons)
        self._dismiss()
        return self._results

    def _has_answered(self, rank: int) -> bool:
        connection = self._ranks[rank].connection
        try:
            return connection.poll() and bool(connection.recv())
        except (EOFError, OSError):
            return False

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
                with suppress(ProcessLookupError):  # the rank has ended by itself
                    os.kill(self._ranks[rank].process.pid or 0, fault.signal)

    def _dismiss(self) -> None:
        for rank, one in enumerate(self._ranks):
            if rank not in self._unexpected:
                one.connection.send(not self._unexpected)
                one.connection.close()


def _serve(job: _Job, connection: Connection) -> None:
    """Run one rank: create the group, call the function, send the answer, and wait until all ranks have answered."""
    faulthandler.dump_traceback_later(job.timeout_s)
    # As launchers do: ranks that each use all cores slow each other down.
    torch.set_num_threads(1)
    try:
        _join(job, connection)
        answer = (True, job.function(job.rank, *job.args, **job.kwargs))
    except BaseException:  # noqa: BLE001 - any error is sent as the answer
        answer = (False, traceback.format_exc())
    try:
        connection.send(answer)
    except Exception:  # noqa: BLE001 - a result that cannot be pickled may raise anything
        connection.send((False, traceback.format_exc()))
    # If ranks leave a group one by one, the process may abort; after the loss of a rank, no barrier is possible.
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
