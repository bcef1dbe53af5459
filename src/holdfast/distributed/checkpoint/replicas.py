"""Reads what all ranks load only once: each rank reads a share and sends it to the others, if that is faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Final, Literal

import torch
from typing_extensions import Self

from holdfast.digest import hash_bytes
from holdfast.distributed.checkpoint.module_sync import TensorFacts, gather_tables
from holdfast.distributed.checkpoint.plan import plan_shares
from holdfast.distributed.talk.collectives import Collectives
from holdfast.distributed.talk.sending import Sender, open_carrier
from holdfast.repo.format.boxes import whole
from holdfast.repo.read.reader import SnapshotReader
from holdfast.snapshot.load.batches import view_tensor_memory
from holdfast.snapshot.load.entries import ReadTarget

_log = logging.getLogger(__name__)

MIN_BYTES: Final = 64 << 20
"""Below this size every rank reads everything itself, without a measurement."""
SAMPLE_BYTES: Final = 8 << 20
"""How much is read and sent to measure which is faster."""
MIN_READ_S: Final = 1.0
"""If reading everything takes less than this, the ranks are not connected."""
_MARGIN: Final = 0.8
"""Sending must take less than this share of the time of reading, because the measurement is not exact."""


class ReplicaExchange:
    """Lets each rank read a share of the entries that all ranks load in place, and send it to the others.

    Use it in a `with`.
    """

    def __init__(
        self,
        ranks: Collectives,
        reader: SnapshotReader,
        *,
        mode: Literal["auto", "broadcast"] = "broadcast",
        timeout_s: float,
    ) -> None:
        """Exchange between `ranks`; with mode="auto", only if a measurement shows that to be faster."""
        self._ranks = ranks
        self._reader = reader
        self._mode = mode
        self._timeout_s = timeout_s
        self._stack = ExitStack()
        self._sender: Sender | None = None
        self._shares: list[list[torch.Tensor]] = []

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections to the other ranks."""
        self._stack.__exit__(kind, error, trace)

    def choose(self, places: Mapping[int, ReadTarget]) -> Collection[int]:
        """Return the numbers of the entries that this rank need not read, because another rank sends them."""
        numbers, table = _describe(places)
        tables = gather_tables(self._ranks, table)
        if tables is not None:
            table = {name: facts for name, facts in table.items() if all(each.get(name) == facts for each in tables)}
        # An entry that is tied to another one uses the same memory, so it is not read separately.
        read = [name for name in sorted(table) if table[name][-1] not in table]
        sizes = [table[name][0] for name in read]
        if not read or not self._is_faster(sizes, [places[numbers[name]] for name in read]):
            return ()
        shares = plan_shares(sizes, self._ranks.world_size)
        named = [[read[at] for at in share] for share in shares]
        self._shares = [[_find_memory(places[numbers[name]]) for name in names] for names in named]
        mine = set(named[self._ranks.rank])
        return {numbers[name] for name in table if name not in mine}

    def send(self) -> None:
        """Send what this rank has read, and receive what the others have read; call it after all ranks have read."""
        if not self._shares:
            return
        sender = self._connect()
        with sender.sending("broadcast"):
            for rank, memory in enumerate(self._shares):
                sender.send_bytes(memory, rank)

    def _connect(self) -> Sender:
        """Return the sender; the first call connects the ranks, so all must make it."""
        if self._sender is None:
            carrier = self._stack.enter_context(open_carrier(self._ranks, timeout_s=self._timeout_s))
            self._sender = Sender(self._ranks, carrier, timeout_s=self._timeout_s)
        return self._sender

    def _is_faster(self, sizes: Sequence[int], places: Sequence[ReadTarget]) -> bool:
        """Return whether to send. All ranks return the same: they have the same sizes, and the coordinator decides."""
        if self._mode == "broadcast":
            return True
        if sum(sizes) < MIN_BYTES:
            return False
        sample = _plan_sample(sizes)
        scale = sum(sizes) / sum(sample.values())
        # Not into the target: the load may still be refused, and then the target must be unchanged.
        memory = [torch.empty(size_bytes, dtype=torch.uint8) for size_bytes in sample.values()]

        def read() -> None:
            for at, each in zip(sample, memory, strict=True):
                self._reader.read_into(places[at].entry, 0, each.numpy().data)

        # All ranks read at the same time, as in the real load, because they may share a disk or a network.
        read_s = scale * self._ranks.all_reduce("measure reading", lambda: _time(read), max)
        if read_s < MIN_READ_S:
            return False
        send_s = scale * self._measure_sending(memory)
        return bool(self._ranks.broadcast("choose", lambda: self._decide(read_s, send_s)))

    def _measure_sending(self, memory: Sequence[torch.Tensor]) -> float:
        """Return how long the slowest rank takes to send or receive the sample, in seconds."""
        sender = self._connect()
        with sender.sending("try sending"):
            sender.send_bytes([memory[0][:1]], 0)  # warm up: the first bytes on a connection take longer
        with sender.sending("measure sending"):
            seconds = _time(partial(sender.send_bytes, memory, 0))
        return float(self._ranks.all_reduce("compare times", lambda: seconds, max))

    def _decide(self, read_s: float, send_s: float) -> bool:
        """Return whether to send: each rank then reads only its share, and everything is sent once."""
        shared_s = read_s / self._ranks.world_size + send_s
        is_faster = shared_s < _MARGIN * read_s
        text = "estimated %.1f s if every rank reads everything, %.1f s if each reads a share and sends it: %s"
        _log.info(text, read_s, shared_s, "sending" if is_faster else "every rank reads")
        return is_faster


def _time(act: Callable[[], None]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def _plan_sample(sizes: Sequence[int]) -> dict[int, int]:
    """Return how many bytes to read of which entries, the largest entries first."""
    sample: dict[int, int] = {}
    room = SAMPLE_BYTES
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        if room <= 0:
            break
        sample[at] = min(room, sizes[at])
        room -= sample[at]
    return sample


def _describe(places: Mapping[int, ReadTarget]) -> tuple[dict[str, int], dict[str, TensorFacts]]:
    """Return the entries that are loaded whole into contiguous memory: their numbers, and facts to compare, by name."""
    numbers: dict[str, int] = {}
    table: dict[str, TensorFacts] = {}
    first: dict[tuple[torch.device, int, int], str] = {}
    for number, place in sorted(places.items(), key=lambda item: item[1].entry.name):
        entry = place.entry
        if not entry.size_bytes or not _is_whole(place):
            continue
        memory = _find_memory(place)
        content = hash_bytes(b"".join(chunk.digest for chunk in entry.chunks)).hex()
        key = (memory.device, memory.data_ptr(), entry.size_bytes)
        tied = first.setdefault(key, entry.name)
        numbers[entry.name] = number
        table[entry.name] = [entry.size_bytes, content, memory.device.type, "" if tied == entry.name else tied]
    return numbers, table


def _is_whole(place: ReadTarget) -> bool:
    if place.pieces is None:
        return place.size_bytes == place.entry.size_bytes
    if len(place.pieces) != 1:
        return False
    box, tensor = place.pieces[0]
    return box == whole(tuple(place.tensor.shape)) and tensor.is_contiguous()


def _find_memory(place: ReadTarget) -> torch.Tensor:
    """Return the memory into which a whole entry is loaded, as a tensor of bytes."""
    return view_tensor_memory(place.tensor if place.pieces is None else place.pieces[0].tensor, place.entry.size_bytes)
