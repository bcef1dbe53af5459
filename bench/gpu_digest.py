"""Checks and measures digests on a GPU: `make gpu-test`. Without a GPU it says so, and measures nothing.

Prints GB/s of each backend for pieces of 1 MiB, and for comparison torch's content-store hash (not a cryptographic one,
and not the same on every device) and a copy of the bytes to the host; then the seconds of saves to a directory. Exits
with 1 after a wrong digest, or a save that cannot be read back.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

import holdfast
from bench.kit.measure import random_bytes
from holdfast.digest import hash_bytes
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.write.writer import SaveResult
from holdfast.tensors.device_digest.choice import DigestBackend, choose_backend, digest_pieces, list_accelerators
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece
from holdfast.tensors.memory import view_bytes, wrap_memory

NO_GPU: Final = "no GPU: nothing was measured"
_SIZE_BYTES: Final = 1 << 30
_CHECKED_BYTES: Final = 256 << 20
_CHECKED_PIECES: Final = 2000
_ROUNDS: Final = 5
_TENSOR_ITEMS: Final = 1 << 21
"""Values of each of the hundred tensors that are saved: 8 MiB."""


def list_backends(device: torch.device) -> list[DigestBackend]:
    """Return the backends to check and to measure on a device."""
    chosen = choose_backend(device).backend
    return ["triton", "torch"] if chosen == "triton" else [chosen]


def make_pieces(data: DeviceBytes, dice: random.Random) -> list[DevicePiece]:
    """Return pieces of random lengths, short ones and some of more than a chunk, at random offsets."""
    lengths = [dice.randrange(1 << dice.randrange(1, 22)) for _ in range(_CHECKED_PIECES)]
    lengths = [min(length, data.size_bytes) for length in lengths]
    starts = [dice.randrange(data.size_bytes - length + 1) for length in lengths]
    return [DevicePiece(data, start, start + length) for start, length in zip(starts, lengths, strict=True)]


def count_wrong(memory: torch.Tensor, backend: DigestBackend) -> int:
    """Return how many of many digests on a device differ from those of the CPU."""
    pieces = make_pieces(DeviceBytes.from_memory(memory), random.Random(1))
    # A transposed matrix: its bytes have to be gathered.
    matrix = DeviceBytes.from_tensor(memory[: 4096 * 1024].view(torch.int32).view(1024, 1024).t())
    pieces += [DevicePiece(matrix, 0, matrix.size_bytes), DevicePiece(matrix, 5, 70_001)]
    found = digest_pieces(pieces, backend=backend)
    host = view_bytes(memory.cpu())
    expected = [hash_bytes(host[piece.start : piece.stop]) for piece in pieces[:-2]]
    gathered = view_bytes(matrix.read(0, matrix.size_bytes).cpu())
    expected += [hash_bytes(gathered), hash_bytes(gathered[5:70_001])]
    return sum(digest != other for digest, other in zip(found, expected, strict=True))


def list_work(memory: torch.Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is timed, by name: each handles all bytes of `memory`."""
    from torch.utils._content_store import hash_storage

    data = DeviceBytes.from_memory(memory[16:])
    size = data.size_bytes
    for backend in [*list_backends(memory.device), "cpu"]:
        for name, first in (("", 0), (", unaligned", 3)):
            pieces = [DevicePiece(data, at, min(at + CHUNK_BYTES, size)) for at in range(first, size, CHUNK_BYTES)]
            yield f"digests by {backend}{name}", _bind(digest_pieces, pieces, backend)
    yield "torch's content-store hash", lambda: hash_storage(memory.untyped_storage())
    pinned = torch.empty(memory.numel(), dtype=torch.uint8, pin_memory=True)
    yield "copy to pinned memory of the host", lambda: pinned.copy_(memory)
    yield "copy to the host", memory.cpu


def _bind(compute: Callable[..., object], pieces: list[DevicePiece], backend: str) -> Callable[[], object]:
    return lambda: compute(pieces, backend=backend)


def measure(work: Callable[[], object]) -> float:
    """Return the seconds of the best of several rounds, after one that is not counted."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        torch.accelerator.synchronize()
        started = time.perf_counter()
        work()
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def list_saves(folder: Path, device: torch.device) -> Iterator[tuple[str, float, bool]]:
    """Yield saves of a tree on a device: what has changed, the seconds, and whether the snapshot is what was saved."""
    tree = {str(at): torch.randn(_TENSOR_ITEMS, device=device) for at in range(100)}
    changes = {"all is new": 100, "nothing has changed": 0, "1 % has changed": 1, "all has changed": 100}
    for name, changed in changes.items():
        for at in range(changed):
            tree[str(at)].add_(1)
        for way in ("save", "save_async, until it returns"):
            with holdfast.open(folder / way) as store:
                torch.accelerator.synchronize()
                started = time.perf_counter()
                handle = store.save(name, tree) if way == "save" else store.save_async(name, tree)
                seconds = time.perf_counter() - started
                if not isinstance(handle, SaveResult):
                    handle.wait()
                found = store.load(name, device=device)
            is_right = all(torch.equal(found[key], tensor) for key, tensor in tree.items())
            yield f"{way}, {name}", seconds, is_right


def main() -> int:
    """Check and measure the first accelerator."""
    devices = list_accelerators()
    if not devices:
        print(NO_GPU)
        return 0
    device = devices[0]
    choice = choose_backend(device)
    print(f"{device}: {choice.backend}, {choice.reason}")
    memory = wrap_memory(random_bytes(_SIZE_BYTES, seed=1)).to(device)
    wrong = {each: count_wrong(memory[:_CHECKED_BYTES], each) for each in list_backends(device)}
    print(f"wrong digests of {_CHECKED_PIECES + 2} by each backend: {wrong}")
    if choice.has_wrong or any(wrong.values()):
        return 1
    seconds = {name: measure(work) for name, work in list_work(memory)}
    copy = seconds["copy to pinned memory of the host"]
    for name, found in seconds.items():
        print(f"{name:36} {memory.numel() / found / 1e9:9.1f} GB/s  {copy / found:7.1f} times the copy to the host")
    with tempfile.TemporaryDirectory() as folder:
        saves = list(list_saves(Path(folder), device))
    for name, found, is_right in saves:
        print(f"{name:50} {found:7.3f} s{'' if is_right else '  WRONG'}")
    return 0 if all(is_right for *_, is_right in saves) else 1


if __name__ == "__main__":
    sys.exit(main())
