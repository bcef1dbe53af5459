"""Measures digests by plain torch operations on the CPU, against torch's content-store hash and the blake3 package.

That is what can be measured without a GPU. It says nothing about the speed of a GPU, where the same operations run; it
does say what they cost compared with the hash that torch computes there for its own content store. One thread, in CPU
seconds. Torch's hash is compiled before it is timed. Ours is not, except in the row that says so: to compile it takes
most of a minute, and no backend does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from unittest.mock import patch

import torch
from torch.utils._content_store import hash_storage

from bench.kit.measure import Contestant, Goal, Result, Sizes, Timings, WrongResult, race, random_bytes
from bench.kit.trained_states import one_thread
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.tensors.device_digest.choice import DigestBackend, digest_pieces
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece
from holdfast.tensors.device_digest.torch_ops import _Compressor
from holdfast.tensors.memory import wrap_memory

_SHARE: Final = 16
"""The bytes to hash are this fraction of what a save is measured with: plain operations are slow on a CPU."""
_SMALL_BYTES: Final = 3001
_CONTENT_STORE: Final = "torch's content-store hash"
_SHA1: Final = "torch's content-store hash, stable (SHA-1)"
_PACKAGE: Final = "blake3 package"
_COMPILED: Final = "digests by compiled torch operations, chunks"


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure chunks, chunks at odd addresses, and many small pieces."""
    memory = wrap_memory(random_bytes(sizes.save_bytes // _SHARE, seed=7))
    data = DeviceBytes.from_memory(memory)
    workloads = {
        "digests by torch operations, chunks": _cut(data, 0, CHUNK_BYTES),
        "digests by torch operations, chunks at odd addresses": _cut(data, 3, CHUNK_BYTES),
        f"digests by torch operations, pieces of {_SMALL_BYTES} bytes": _cut(data, 0, _SMALL_BYTES),
    }
    contestants = {name: _hashing(pieces, "torch") for name, pieces in workloads.items()}
    chunks = next(iter(workloads.values()))
    contestants[_COMPILED] = _hashing_compiled(chunks)
    contestants[_PACKAGE] = _hashing(chunks, "cpu")
    contestants[_CONTENT_STORE] = _content_store(memory, stable=False)
    contestants[_SHA1] = _content_store(memory, stable=True)
    with one_thread():
        timings = race(contestants, rounds=max(sizes.rounds, 2))
    size = data.size_bytes
    names = [*workloads, _COMPILED]
    rows = [_make_row(name, _CONTENT_STORE, timings, size, Goal("ratio", ">=", 3.0)) for name in names]
    rows += [_make_row(name, _PACKAGE, timings, size, None) for name in names]
    return [*rows, _make_row(_PACKAGE, _SHA1, timings, size, None)]


def _cut(data: DeviceBytes, first: int, step: int) -> list[DevicePiece]:
    size = data.size_bytes
    return [DevicePiece(data, at, min(at + step, size)) for at in range(first, size, step)]


def _hashing(pieces: list[DevicePiece], backend: DigestBackend) -> Contestant:
    expected = digest_pieces(pieces, backend="cpu")

    def verify(result: object) -> None:
        if result != expected:
            raise WrongResult(f"the backend {backend!r} returned digests that are not those of the blake3 package")

    return Contestant(
        lambda: digest_pieces(pieces, backend=backend),
        prepare=lambda: _discard(digest_pieces(pieces[:1], backend=backend)),
        verify=verify,
    )


def _hashing_compiled(pieces: list[DevicePiece]) -> Contestant:
    """Return the backend "torch" with its compression compiled by inductor, which is done before this returns."""
    plain = _hashing(pieces, "torch")
    compress = torch.compile(_Compressor.compress, dynamic=True)

    def act() -> object:
        with patch.object(_Compressor, "compress", compress):
            return plain.run()

    act()
    return Contestant(act, verify=plain.verify)


def _content_store(memory: torch.Tensor, *, stable: bool) -> Contestant:
    storage = memory.untyped_storage()
    expected = hash_storage(storage, stable_hash=stable)

    def verify(result: object) -> None:
        if result != expected:
            raise WrongResult(f"torch's content store returned {result}, then {expected}")

    return Contestant(lambda: hash_storage(storage, stable_hash=stable), verify=verify)


def _discard(_: object) -> None:
    """Do nothing with a result that only warmed something up."""


def _make_row(name: str, against: str, timings: Mapping[str, Timings], size_bytes: int, goal: Goal | None) -> Result:
    gigabytes = size_bytes / 1e9
    own, other = timings[name].cpu_seconds, timings[against].cpu_seconds
    return Result(
        name,
        gigabytes / min(own),
        "GB per CPU second",
        against,
        gigabytes / min(other),
        goal,
        f"best of {len(own)}; by the clock {gigabytes / timings[name].best:.3f} GB/s",
        {name: own, against: other},
        {name: gigabytes / min(own), against: gigabytes / min(other)},
    )
