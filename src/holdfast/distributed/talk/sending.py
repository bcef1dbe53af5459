"""Sends the bytes of tensors from one rank to all, over private connections that leave the user's group intact.

If some ranks start a collective and others never do, the process group is broken: its next collective mixes with the
unfinished one, or hangs. So the user's group is avoided where possible. Instead a gloo backend is created for one
transfer. It is not registered in torch's list of groups, and is dropped afterwards.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from holdfast.distributed.talk.collectives import Collectives
from holdfast.distributed.talk.failures import LOST, make_error
from holdfast.errors import RankFailure
from holdfast.objects.thread_pool import BackgroundThread, let_end
from holdfast.snapshot.into.in_place import mark_written
from holdfast.tensors.memory import new_memory, view_raw, view_storage

BUCKET_BYTES: Final = 250 << 20
"""The most that is sent at once, and the most memory that the buffer for it takes."""
_CPU: Final = "cpu"


class Carrier(Protocol):
    """Broadcasts bytes from one rank to all."""

    def choose_device(self, device: torch.device) -> torch.device:
        """Return the device to send data of `device` from: itself, or another one if it cannot send directly."""

    def broadcast(self, memory: torch.Tensor, src: int) -> Any:
        """Start to send `memory`, on rank `src`, or to receive into it; return torch's handle."""


class _OwnCarrier:
    """Broadcasts over a private gloo backend."""

    def __init__(self, store: Store, *, rank: int, size: int, timeout_s: float) -> None:
        self._backend: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        self._store = store
        self._rank = rank

    def close(self) -> None:
        """Close the connections; waits until pending transfers are aborted."""
        with suppress(RuntimeError):  # the store may be gone, too
            # The key under which gloo published its address. By now all ranks have connected, or failed.
            self._store.delete_key(f"0/{self._rank}")
        self._backend = None

    def choose_device(self, device: torch.device) -> torch.device:
        return torch.device(_CPU)

    def broadcast(self, memory: torch.Tensor, src: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        return self._backend.broadcast([memory], options)


class _GroupCarrier:
    """Broadcasts over the user's group: for devices that gloo cannot send from, or in a build without gloo."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def choose_device(self, device: torch.device) -> torch.device:
        kinds = _list_kinds(self._group)
        return device if device.type in kinds or not kinds[0] else torch.device(kinds[0])

    def broadcast(self, memory: torch.Tensor, src: int) -> Any:
        return dist.broadcast(memory, group=self._group, group_src=src, async_op=True)


def _list_kinds(group: dist.ProcessGroup | None) -> list[str]:
    return [each.partition(":")[0] for each in dist.get_backend_config(group).split(",")]


@contextmanager
def open_carrier(
    ranks: Collectives, *, timeout_s: float, group: dist.ProcessGroup | None = None, devices: Iterable[str] = ()
) -> Iterator[Carrier]:
    """Connect the ranks for the duration of the `with`; all ranks must call this, outside of other steps.

    The user's group is used only if it can send from one of `devices`, other than the CPU, or if torch has no gloo.
    """
    is_direct = ranks.world_size > 1 and any(kind != _CPU and kind in _list_kinds(group) for kind in devices)
    if ranks.world_size == 1 or is_direct or not dist.is_gloo_available():
        yield _GroupCarrier(group)
        return
    made: list[_OwnCarrier] = []
    try:
        with _sending(ranks, "connect"):
            made.append(_connect_watched(ranks, timeout_s))
        yield made[0]
    finally:
        # Closing the connection ends the waits of other ranks for this one. It blocks until pending transfers are
        # aborted, so it is done in the background.
        BackgroundThread(partial(_drop, made), "holdfast-drop", stop=let_end).start()


def _connect_watched(ranks: Collectives, timeout_s: float) -> _OwnCarrier:
    """Connect in a thread, because gloo's connecting blocks without checking that the other ranks are alive."""
    reply: Future[_OwnCarrier] = Future()

    def work() -> None:
        try:
            reply.set_result(_connect(ranks, timeout_s))
        except Exception as error:  # noqa: BLE001 - raised again where the reply is awaited
            reply.set_exception(error)

    BackgroundThread(work, "holdfast-connect", stop=let_end).start()
    wait_watched(reply.done, ranks, limit_s=3 * timeout_s, what="the ranks could not connect to each other")
    try:
        return reply.result()
    except RuntimeError as error:  # gloo raises it for any failure of a peer or of the network
        raise _ConnectionLost(_describe_lost(error)) from error


def _connect(ranks: Collectives, timeout_s: float) -> _OwnCarrier:
    # Longer than `timeout_s`: gloo's own timeout would not name the missing rank, ours does.
    limit_s = 2 * timeout_s
    return _OwnCarrier(ranks.make_store("bytes"), rank=ranks.rank, size=ranks.world_size, timeout_s=limit_s)


def _drop(made: list[_OwnCarrier]) -> None:
    while made:
        made.pop().close()


def wait_watched(is_done: Callable[[], bool], ranks: Collectives, *, limit_s: float, what: str) -> None:
    """Wait, within a step, for something that depends on other ranks; raise RankError if one fails or is silent."""
    deadline = time.monotonic() + limit_s
    check_lives = ranks.watch_others()
    pause_s = 1e-4
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {limit_s:g} s, although all are alive; check the network between them")
        ranks.beat()
        ranks.check_failures()
        check_lives()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)


@contextmanager
def _sending(ranks: Collectives, step: str) -> Iterator[None]:
    """Make the body of the `with`, which uses connections, a step; raise RankError on all ranks if one is lost.

    A lost connection does not say why it was lost. So a rank that loses one still joins the all_gather. There the rank
    that has failed reports its error, or is found to be missing.
    """
    with ranks.gathering(step) as gathering:
        gathering.given = ""
        try:
            yield
        except _ConnectionLost as lost:
            gathering.given = str(lost)
    failures = [RankFailure(rank, LOST, text) for rank, text in enumerate(gathering.values) if text]
    if failures:
        raise make_error(step, failures, rank=ranks.rank, world_size=ranks.world_size)


class Sender:
    """Sends tensors of one rank to all others, as buckets of bytes; all ranks make the same calls in the same order."""

    def __init__(
        self, ranks: Collectives, carrier: Carrier, *, bucket_bytes: int = BUCKET_BYTES, timeout_s: float
    ) -> None:
        """Send over `carrier`; `ranks` reports failures, and `timeout_s` limits the wait for a silent rank."""
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: must be at least 1")
        self._ranks = ranks
        self._carrier = carrier
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s

    def sending(self, step: str) -> AbstractContextManager[None]:
        """Make the body of the `with`, which sends, a step of all ranks; a failure is raised as a RankError."""
        return _sending(self._ranks, step)

    def send(self, tensors: Sequence[torch.Tensor], src: int) -> None:
        """Copy the values of ordinary tensors from rank `src` to all ranks; call it within `sending`."""
        if not 0 <= src < self._ranks.world_size:
            raise ValueError(f"src={src}: the group has {self._ranks.world_size} ranks, numbered from 0")
        if self._ranks.world_size == 1:
            return
        is_source = self._ranks.rank == src
        # Tensors that are not contiguous are sent through a contiguous copy.
        rows = [(each, each if each.is_contiguous() else _copy_contiguous(each)) for each in tensors]
        self.send_bytes([_view(row) for _, row in rows], src)
        if not is_source:
            for tensor, row in rows:
                if row is not tensor:
                    view_raw(tensor).copy_(view_raw(row))
            mark_written(tensors)

    def send_bytes(self, memory: Sequence[torch.Tensor], src: int) -> None:
        """Overwrite each of these memories, on all ranks, with the bytes that it has on rank `src`."""
        by_kind: dict[str, list[torch.Tensor]] = defaultdict(list)
        for each in memory:
            by_kind[each.device.type].append(each)
        for kind in sorted(by_kind):
            device = self._carrier.choose_device(by_kind[kind][0].device)
            for bucket in _iter_buckets(by_kind[kind], self._bucket_bytes):
                self._send_bucket(bucket, device, src)

    def _send_bucket(self, parts: Sequence[torch.Tensor], device: torch.device, src: int) -> None:
        is_source = self._ranks.rank == src
        is_direct = len(parts) == 1 and parts[0].device == device
        flat = parts[0] if is_direct else new_memory(sum(part.numel() for part in parts), device)
        sizes = [part.numel() for part in parts]
        if is_source and not is_direct:
            for target, part in zip(torch.split(flat, sizes), parts, strict=True):
                target.copy_(part)
        self._broadcast(flat, src)
        if not is_source and not is_direct:
            for part, received in zip(parts, torch.split(flat, sizes), strict=True):
                part.copy_(received)

    def _broadcast(self, flat: torch.Tensor, src: int) -> None:
        try:
            work = self._carrier.broadcast(flat, src)
        except RuntimeError as error:  # torch raises it for any failure of the connection
            raise _ConnectionLost(_describe_lost(error)) from error
        what = f"the bytes that rank {src} sends did not arrive"
        wait_watched(work.is_completed, self._ranks, limit_s=2 * self._timeout_s, what=what)
        try:
            work.wait()  # raises if the transfer has failed
        except RuntimeError as error:
            raise _ConnectionLost(_describe_lost(error)) from error


class _ConnectionLost(Exception):
    """A connection was closed before everything was sent."""


def _describe_lost(error: RuntimeError) -> str:
    return f"the connection between the ranks was lost: {str(error).partition(chr(10))[0][:300]}"


def _view(tensor: torch.Tensor) -> torch.Tensor:
    start = int(tensor.storage_offset()) * tensor.element_size()
    return view_storage(tensor.untyped_storage(), start, start + tensor.numel() * tensor.element_size())


def _copy_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return view_raw(tensor).contiguous()


def _iter_buckets(memory: Iterable[torch.Tensor], limit_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of bytes in lists of at most `limit_bytes` together; larger tensors are split."""
    bucket: list[torch.Tensor] = []
    room = limit_bytes
    for each in memory:
        start = 0
        while start < each.numel():
            piece = each[start : start + room]
            bucket.append(piece)
            start, room = start + piece.numel(), room - piece.numel()
            if room == 0:
                yield bucket
                bucket, room = [], limit_bytes
    if bucket:
        yield bucket
