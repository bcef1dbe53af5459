"""What all ranks hold the same of, read once: each rank reads a share of it and sends that to the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist

from holdfast.digest import hash_bytes
from holdfast.distributed.collectives import Collectives
from holdfast.distributed.module_sync import Facts, Sender, gather_tables
from holdfast.distributed.split import plan_shares
from holdfast.repo.boxes import whole
from holdfast.snapshot.entries import InPlace, view_place


class Replicas:
    """One rank's part in reading, for all, what all of them want in memory that is there."""

    def __init__(self, ranks: Collectives, group: dist.ProcessGroup | None, *, timeout_s: float) -> None:
        """Choose nothing yet."""
        self._ranks = ranks
        self._sender = Sender(ranks, group, timeout_s=timeout_s)
        self._shares: list[list[torch.Tensor]] = []

    def choose(self, places: Mapping[int, InPlace]) -> Collection[int]:
        """Return the entries that this rank need not read, for another does."""
        numbers, table = _describe(places)
        tables = gather_tables(self._ranks, table)
        if tables is not None:
            table = {name: facts for name, facts in table.items() if all(each.get(name) == facts for each in tables)}
        # What is tied to another is there with that.
        read = [name for name in sorted(table) if table[name][-1] not in table]
        shares = plan_shares([table[name][0] for name in read], self._ranks.world_size)
        named = [[read[at] for at in share] for share in shares]
        self._shares = [[_find_memory(places[numbers[name]]) for name in names] for names in named]
        mine = set(named[self._ranks.rank])
        return {numbers[name] for name in table if name not in mine}

    def send(self) -> None:
        """Send what this rank has read, and take what the others have; all ranks must be done with reading."""
        self._ranks.all_gather("broadcast", self._send)

    def _send(self) -> None:
        for rank, memory in enumerate(self._shares):
            self._sender.send_bytes(memory, rank)


def _describe(places: Mapping[int, InPlace]) -> tuple[dict[str, int], dict[str, Facts]]:
    """Return the numbers of entries that are wanted as a whole and in a row, and what must be the same of each."""
    numbers: dict[str, int] = {}
    table: dict[str, Facts] = {}
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


def _is_whole(place: InPlace) -> bool:
    if place.pieces is None:
        return place.size_bytes == place.entry.size_bytes
    if len(place.pieces) != 1:
        return False
    box, tensor = place.pieces[0]
    return box == whole(tuple(place.tensor.shape)) and tensor.is_contiguous()


def _find_memory(place: InPlace) -> torch.Tensor:
    """Return the memory of a place that wants all of an entry, as a tensor of bytes."""
    return view_place(place.tensor if place.pieces is None else place.pieces[0].tensor, place.entry.size_bytes)
