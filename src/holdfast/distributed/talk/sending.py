"""Sends the bytes of tensors from one rank to all, on connections of our own: if that fails, the user's group works on.

A collective that some ranks have begun and others never will leaves a process group in disorder: what is called next
meets what is left over, or waits for ever. So nothing is sent over a group that belongs to the user if that can be
helped. Who sends makes a gloo backend for that alone, out of sight of torch's own list of groups, and drops it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from holdfast.distributed.talk.collectives import Collectives
from holdfast.distributed.talk.failures import LOST, make_error
from holdfast.errors import RankFailure
from holdfast.snapshot.into.in_place import mark_written
from holdfast.tensors.memory import new_memory, view_raw, view_storage

BUCKET_BYTES: Final = 250 << 20
"""How much is sent at once, and how much memory that may take."""
_CPU: Final = "cpu"


class Carrier(Protocol):
    """What can give all ranks the bytes that one of them has."""

    def choose_device(self, device: torch.device) -> torch.device:
        """Return where to send from what lies on a device: that itself, or another if it cannot be sent from there."""

    def broadcast(self, memory: torch.Tensor, src: int) -> Any:
        """Begin to send, or to receive, all of some memory; return torch's handle for that."""


class _OwnCarrier:
    """A gloo backend of our own."""

    def __init__(self, store: Store, *, rank: int, size: int, timeout_s: float) -> None:
        self._backend: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        self._store = store
        self._rank = rank

    def close(self) -> None:
        """End the connections; waits for what is under way to be given up."""
        with suppress(RuntimeError):  # the store may be gone, too
            # Where gloo has told the others its address. All have connected, or failed.
            self._store.delete_key(f"0/{self._rank}")
        self._backend = None

    def choose_device(self, device: torch.device) -> torch.device:
        return torch.device(_CPU)

    def broadcast(self, memory: torch.Tensor, src: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        return self._backend.broadcast([memory], options)


class _GroupCarrier:
    """The user's group, where only that can send: from a device, or in a build without gloo."""

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
    """Connect the ranks for as long as the `with` lasts; all must, in a step of its own.

    The user's group is used only if it can send from one of these devices, which ours cannot, or if there is no gloo.
    """
    is_direct = ranks.world_size > 1 and any(kind != _CPU and kind in _list_kinds(group) for kind in devices)
    if ranks.world_size == 1 or is_direct or not dist.is_gloo_available():
        yield _GroupCarrier(group)
        return
    made: list[_OwnCarrier] = []
    try:
        _run(ranks, "connect", lambda: made.append(_connect_watched(ranks, timeout_s)))
        yield made[0]
    finally:
        # Whoever still waits for this rank is told so by the end of the connection. That may take until what is under
        # way has been given up, for which nobody here has to wait.
        threading.Thread(target=_drop, args=(made,), name="holdfast-drop", daemon=True).start()


def _connect_watched(ranks: Collectives, timeout_s: float) -> _OwnCarrier:
    """Connect in a thread: it waits for the others without a word, however long they have been gone."""
    reply: Future[_OwnCarrier] = Future()

    def work() -> None:
        try:
            reply.set_result(_connect(ranks, timeout_s))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the reply
            reply.set_exception(error)

    threading.Thread(target=work, name="holdfast-connect", daemon=True).start()
    wait_watched(reply.done, ranks, limit_s=3 * timeout_s, what="the ranks could not connect to each other")
    try:
        return reply.result()
    except RuntimeError as error:  # whatever has become of the others, or of the network
        raise _Cut(_first_line(error)) from error


def _connect(ranks: Collectives, timeout_s: float) -> _OwnCarrier:
    # Longer than the others are waited for: it does not know who is missing.
    limit_s = 2 * timeout_s
    return _OwnCarrier(ranks.make_store("bytes"), rank=ranks.rank, size=ranks.world_size, timeout_s=limit_s)


def _drop(made: list[_OwnCarrier]) -> None:
    while made:
        made.pop().close()


def wait_watched(is_done: Callable[[], bool], ranks: Collectives, *, limit_s: float, what: str) -> None:
    """Wait in a step for what other ranks have a part in; whoever fails, or gives no sign of life, ends this."""
    deadline = time.monotonic() + limit_s
    check_lives = ranks.watch_others()
    pause_s = 1e-4
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {limit_s:g} s, though all give signs of life; look at their network")
        ranks.beat()
        ranks.check_failures()
        check_lives()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)


def _run(ranks: Collectives, step: str, act: Callable[[], None]) -> None:
    """Do in a step what needs connections; raise RankError, on all ranks, if one of them ends.

    Its end tells nothing of why: so whoever sees that goes on to where all meet, and there the one who has failed
    tells so, or is missed.
    """

    def attempt() -> str:
        try:
            act()
        except _Cut as cut:
            return str(cut)
        return ""

    told = ranks.all_gather(step, attempt)
    failures = [RankFailure(rank, LOST, text) for rank, text in enumerate(told) if text]
    if failures:
        raise make_error(step, failures, rank=ranks.rank, world_size=ranks.world_size)


class Sender:
    """Sends tensors of one rank to all others, as bytes, many at once; all ranks send the same in the same order."""

    def __init__(
        self, ranks: Collectives, carrier: Carrier, *, bucket_bytes: int = BUCKET_BYTES, timeout_s: float
    ) -> None:
        """Send by a carrier between the ranks that talk by `ranks`."""
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket must hold something")
        self._ranks = ranks
        self._carrier = carrier
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s

    def run(self, step: str, act: Callable[[], None]) -> None:
        """Send in a step that all ranks take part in; what goes wrong is a RankError that names whom it concerns."""
        _run(self._ranks, step, act)

    def send(self, tensors: Sequence[torch.Tensor], src: int) -> None:
        """Give all ranks the values that ordinary tensors have on rank `src`; in a step, by `run`."""
        if not 0 <= src < self._ranks.world_size:
            raise ValueError(f"src={src}: there are {self._ranks.world_size} ranks in the group")
        if self._ranks.world_size == 1:
            return
        is_source = self._ranks.rank == src
        # What does not lie in a row is sent by way of memory where it does.
        rows = [(each, each if each.is_contiguous() else _copy_row(each)) for each in tensors]
        self.send_bytes([_view(row) for _, row in rows], src)
        if not is_source:
            for tensor, row in rows:
                if row is not tensor:
                    view_raw(tensor).copy_(view_raw(row))
            mark_written(tensors)

    def send_bytes(self, memory: Sequence[torch.Tensor], src: int) -> None:
        """Give all ranks the bytes that rank `src` has in each of these; what is there is overwritten."""
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
        except RuntimeError as error:  # whatever has become of the connection
            raise _Cut(_first_line(error)) from error
        what = f"what rank {src} sends did not arrive"
        wait_watched(work.is_completed, self._ranks, limit_s=2 * self._timeout_s, what=what)
        try:
            work.wait()  # says if it has failed
        except RuntimeError as error:
            raise _Cut(_first_line(error)) from error


class _Cut(Exception):
    """A connection has ended before all was sent."""


def _first_line(error: RuntimeError) -> str:
    return f"the connection between the ranks has ended: {str(error).partition(chr(10))[0][:300]}"


def _view(tensor: torch.Tensor) -> torch.Tensor:
    start = int(tensor.storage_offset()) * tensor.element_size()
    return view_storage(tensor.untyped_storage(), start, start + tensor.numel() * tensor.element_size())


def _copy_row(tensor: torch.Tensor) -> torch.Tensor:
    return view_raw(tensor).contiguous()


def _iter_buckets(memory: Iterable[torch.Tensor], limit_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield pieces of memory, given as tensors of bytes, in lists that a limit allows; what is larger is cut."""
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
