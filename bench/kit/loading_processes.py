"""Processes that load the same state at the same time, and count what each of them reads from the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch

from bench.kit.measure import WrongResult
from bench.kit.peers import HOLDFAST, find_peers
from bench.kit.states import State
from holdfast.digest import hash_bytes

_TIMEOUT_S: Final = 120.0
_COUNTS: Final = Path("/proc/self/io")
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of each tensor."""


@dataclass(frozen=True, slots=True)
class Loaders:
    """Running processes, each with everything imported."""

    pipes: tuple[Connection, ...]

    def load(self, count: int, peer: str, folder: Path) -> int:
        """Let `count` processes load at once; return how many bytes they have read from the disk together."""
        found = self._ask(count, (peer, folder))
        return sum(each for each in found if isinstance(each, int))

    def verify(self, count: int, expected: bytes) -> None:
        """Raise unless each of the last loads returned a state with this digest; releases the states."""
        if any(found != expected for found in self._ask(count, None)):
            raise WrongResult("a process has loaded another state than the one that was saved")

    def _ask(self, count: int, order: tuple[str, Path] | None) -> list[object]:
        for pipe in self.pipes[:count]:
            pipe.send(order)
        return [_receive(pipe) for pipe in self.pipes[:count]]


@contextmanager
def starting_loaders(count: int, like: State) -> Iterator[Loaders]:
    """Start `count` processes that load states of the same names, shapes and dtypes as `like`."""
    context = get_context("spawn")
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in like.items()}
    pipes, processes = [], []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, layout), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is seen here
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            _receive(pipe)
        yield Loaders(tuple(pipes))
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(_TIMEOUT_S)


def digest_state(state: State) -> bytes:
    """Return one digest of the names and bytes of all tensors."""
    digests = [name.encode() + hash_bytes(memoryview(tensor.view(-1).view(torch.uint8).numpy().data))
               for name, tensor in sorted(state.items())]  # fmt: skip
    return hash_bytes(b"".join(digests))


def _receive(pipe: Connection) -> object:
    if not pipe.poll(_TIMEOUT_S):
        raise TimeoutError(f"a process that loads has not answered for {_TIMEOUT_S:.0f} s")
    return pipe.recv()


def _serve(pipe: Connection, layout: Layout) -> None:
    """Load or describe a state for each message, until the other end is closed."""
    peers = {peer.name: peer for peer in [HOLDFAST, *find_peers()]}
    like = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
    loaded: State = {}
    pipe.send(0)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order is None:
            pipe.send(digest_state(loaded))
            loaded = {}
            continue
        name, folder = order
        before = _count_read_bytes()
        loaded = peers[name].load(folder, like)
        pipe.send(_count_read_bytes() - before)


def _count_read_bytes() -> int:
    """Return how many bytes this process has requested from disks; pages that others have requested do not count."""
    lines = _COUNTS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
