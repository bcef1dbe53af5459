"""Simulates rank 0 of a very large world: its shards of tensors without memory, and the messages of the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.digest import hash_bytes
from holdfast.distributed.talk import wire
from holdfast.distributed.talk.collectives import Collectives
from holdfast.distributed.talk.rounds import RoundCall, SingleProcessRounds
from holdfast.repo.format.boxes import Box, cut_rows, volume
from holdfast.repo.format.chunk import ChunkRef, Location
from holdfast.repo.format.entry import Entry

_HIDDEN: Final = 4096
_LAYER: Final = {
    "attention.wq": (_HIDDEN, _HIDDEN),
    "attention.wk": (_HIDDEN, _HIDDEN),
    "attention.wv": (_HIDDEN, _HIDDEN),
    "attention.wo": (_HIDDEN, _HIDDEN),
    "feed_forward.w1": (3 * _HIDDEN, _HIDDEN),
    "feed_forward.w2": (_HIDDEN, 3 * _HIDDEN),
    "feed_forward.w3": (3 * _HIDDEN, _HIDDEN),
    "attention_norm": (_HIDDEN,),
    "ffn_norm": (_HIDDEN,),
}
_DTYPE: Final = torch.bfloat16
ITEM_BYTES: Final = 2
_PRIME: Final = (1 << 127) - 1

Shapes = Mapping[str, tuple[int, ...]]


def make_shapes(count: int) -> dict[str, tuple[int, ...]]:
    """Return the parameters of a transformer with as many layers as are needed for `count`."""
    named = [(f"layers.{number // len(_LAYER)}.{name}", shape)
             for number, (name, shape) in enumerate(list(_LAYER.items()) * -(-count // len(_LAYER)))]  # fmt: skip
    return dict(named[:count])


def cut_shape(shape: tuple[int, ...], rank: int, ranks: int) -> Box:
    """Return the rows of a tensor that a rank has, cut as torch does it."""
    rows = -(-shape[0] // ranks)
    start = min(rank * rows, shape[0])
    return Box((start, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:]))


@contextmanager
def be_first(ranks: int) -> Iterator[DeviceMesh]:
    """Act as rank 0 of a world without other processes, and yield a mesh of all its ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield DeviceMesh("cpu", torch.arange(ranks), _init_backend=False)
    finally:
        dist.destroy_process_group()


def make_state(shapes: Shapes, mesh: DeviceMesh) -> dict[str, DTensor]:
    """Return rank 0's shard of each parameter, without memory for it."""
    item = torch.empty(1, dtype=_DTYPE)
    state = {}
    for name, shape in shapes.items():
        stride = torch.empty(shape, device="meta").stride()
        local = item.expand(cut_shape(shape, 0, mesh.size()).sizes)
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
    return state


class EchoRounds(SingleProcessRounds):
    """The rounds of a coordinator; all other ranks send the coordinator's own message, or a simulated one."""

    def __init__(self, ranks: int) -> None:
        """Simulate a world of `ranks` ranks."""
        super().__init__()
        self._ranks = ranks
        self._call = RoundCall("", "")
        self.size_bytes = 0

    def arrive(self, call: RoundCall, message: Sequence[bytes]) -> None:
        """Record the call and its message."""
        super().arrive(call, message)
        self._call = call

    def collect(self) -> list[bytes]:
        """Return one message per rank."""
        others = [self._message] * (self._ranks - 1)
        if self._call.step == "cover":
            others = self._complete()
        self.size_bytes += sum(map(len, others))
        return [self._message, *others]

    def _complete(self) -> list[bytes]:
        """Return sketches that add up to zero with the coordinator's own: those of ranks without a first item.

        Computing them all from their boxes would take longer than the rest of the benchmark; the sketches have the
        same length either way. The last one is chosen so that the sum is zero.
        """
        total, _ = wire.decode(self._message)
        step = _PRIME // 3
        rest = (-total - step * (self._ranks - 2)) % _PRIME
        totals = [*[step] * (self._ranks - 2), rest][: self._ranks - 1]
        return [b"".join(wire.encode((each, []))) for each in totals]


class EchoRanks(Collectives):
    """The coordinator of very many simulated ranks."""

    def __init__(self, ranks: int) -> None:
        """Simulate a world of `ranks` ranks."""
        super().__init__(group=None)
        self.echo = EchoRounds(ranks)
        self._rounds = self.echo
        self.rank, self.world_size, self.is_coordinator = 0, ranks, True


def make_ref(name: str, box: Sequence[int], size_bytes: int, pack: int = 0) -> ChunkRef:
    """Return a reference to a chunk that does not exist."""
    digest = hash_bytes(f"{name} {box}".encode())
    location = Location(make_id(pack), 4096, size_bytes, 0, digest[:16])
    return ChunkRef(digest, size_bytes, location, box=tuple(box))


def make_id(number: int) -> str:
    """Return the id of a file that does not exist."""
    return f"{number:024x}-{hash_bytes(number.to_bytes(8, 'little')).hex()[:16]}"


def make_part(shapes: Shapes, rank: int, ranks: int) -> list[Entry]:
    """Return the entries of a rank's part manifest."""
    entries = []
    for name, shape in shapes.items():
        boxes = cut_rows(cut_shape(shape, rank, ranks), shape, ITEM_BYTES)
        places = [(*box.starts, *box.sizes) for box in boxes]
        sizes = [ITEM_BYTES * volume(box) for box in boxes]
        if len(shape) == 1:
            places = [(ITEM_BYTES * box.starts[0], size) for box, size in zip(boxes, sizes, strict=True)]
        chunks = [make_ref(name, place, size, rank) for place, size in zip(places, sizes, strict=True)]
        if chunks:
            entries.append(Entry(name, ITEM_BYTES * math.prod(shape), tuple(chunks), dims=len(shape)))
    return entries
