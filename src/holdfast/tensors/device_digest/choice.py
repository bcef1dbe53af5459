"""BLAKE3 of tensors on their device, computed in the way that was chosen and checked there against the CPU."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Final, Literal, get_args

import torch

from holdfast.digest import Buffer, Digest, hash_parts
from holdfast.errors import DeviceFault, Unsupported
from holdfast.tensors.device_copy import WITH_STREAMS
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece, Kernels, cut_pieces, digest_by_tree
from holdfast.tensors.device_digest.torch_ops import TorchKernels
from holdfast.tensors.memory import view_bytes, wrap_memory

DigestBackend = Literal["cpu", "torch", "triton"]
DigestPieces = Callable[[Sequence[DevicePiece]], list[Digest]]
_CHECKED_BYTES: Final = 80_000
_EDGES: Final = (0, 1, 3, 4, 63, 64, 65, 1023, 1024, 1025, 2048, 3072, 5120, 65_536)
"""Lengths around the ends of words, blocks, leaves and subtrees."""
_CHECKED_RANDOM: Final = 18
_LONG_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """How digests are computed on a device, and why so."""

    backend: DigestBackend
    reason: str
    has_wrong: bool = False
    """Whether a backend was given up because it returned wrong digests."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Whether a backend can be used on a device, and if not, why."""

    is_usable: bool
    is_wrong: bool = False
    """It returned digests that are not those of the CPU."""
    problem: str = ""


def choose_backend(device: torch.device) -> BackendChoice:
    """Return how digests are computed on a device: the fastest way that gives the digests of the CPU there.

    The first call for a device checks that, which takes seconds if a kernel has to be compiled. A backend that fails
    gives a warning; after a wrong digest, bytes of the device are copied to the host. If the device has no memory left
    for the check, they are copied, too, and the next call checks again.
    """
    try:
        return _choose_checked(device)
    except torch.OutOfMemoryError:
        return BackendChoice("cpu", f"{device} has no memory left to check its kernels; bytes are copied to the host")


@cache
def _choose_checked(device: torch.device) -> BackendChoice:
    if device.type == "cpu":
        return BackendChoice("cpu", "the bytes are in the memory of the host")
    problems: list[str] = []
    has_wrong = False
    for backend in _list_candidates(device):
        verdict = _check(backend, device)
        if verdict.is_usable:
            return BackendChoice(backend, "; ".join([*problems, f"checked against the CPU on {device}"]))
        problems.append(f"{backend}: {verdict.problem}")
        has_wrong = verdict.is_wrong
        if has_wrong:
            break
    return BackendChoice("cpu", "; ".join([*problems, "bytes are copied to the host"]), has_wrong)


def list_accelerators() -> list[torch.device]:
    """Return the devices of this process besides the CPU."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    return [] if kind is None else [torch.device(kind.type, at) for at in range(torch.accelerator.device_count())]


def find_backend(backend: DigestBackend, device: torch.device) -> DigestPieces:
    """Return a backend for a device; raises Unsupported if it cannot be used there, or gives wrong digests."""
    if backend not in get_args(DigestBackend):
        raise ValueError(f"backend must be one of {', '.join(get_args(DigestBackend))}, not {backend!r}")
    if backend != choose_backend(device).backend:
        verdict = _check(backend, device)
        if not verdict.is_usable:
            raise Unsupported(f"digests cannot be computed on {device} by {backend}: {verdict.problem}")
    return _make_backend(backend, device)


def _list_candidates(device: torch.device) -> Sequence[DigestBackend]:
    has_triton = device.type in WITH_STREAMS and find_spec("triton") is not None
    return ("triton", "torch") if has_triton else ("torch",)


def find_kernels(device: torch.device) -> Kernels | None:
    """Return the kernels that hash on a device; None if its bytes are copied to the host."""
    backend = choose_backend(device).backend
    return None if backend == "cpu" else _make_kernels(backend, device)


@cache
def _make_backend(backend: DigestBackend, device: torch.device) -> DigestPieces:
    if backend == "cpu":
        return digest_on_cpu
    return partial(digest_by_tree, kernels=_make_kernels(backend, device), device=device)


@cache
def _make_kernels(backend: DigestBackend, device: torch.device) -> Kernels:
    if backend == "torch":
        return TorchKernels(device)
    from holdfast.tensors.device_digest.triton_launch import TritonKernels

    return TritonKernels(device)


@cache
def _check(backend: DigestBackend, device: torch.device) -> _Verdict:
    """Compare a backend with the CPU on lengths at edges and random ones, at random offsets; warns if it fails.

    Raises torch.OutOfMemoryError if there is no memory for that.
    """
    if backend == "cpu":
        return _Verdict(is_usable=True)
    if backend == "triton" and find_spec("triton") is None:
        return _Verdict(is_usable=False, problem="Triton is not installed")
    batches = make_check_batches(device)
    pieces = [piece for batch in batches for piece in batch]
    compute = _make_backend(backend, device)
    try:
        found = [digest for batch in batches for digest in compute(batch)]
    except torch.OutOfMemoryError:
        raise  # says nothing about the backend
    except DeviceFault:
        verdict = _Verdict(is_usable=False, is_wrong=True, problem="it returned a wrong digest of random bytes")
    except Exception as error:  # noqa: BLE001  # a compiler, a driver or a device that lacks an operation: any type
        verdict = _Verdict(is_usable=False, problem=f"it failed with {type(error).__name__}: {_first_line(error)}")
    else:
        pairs = zip(pieces, found, digest_on_cpu(pieces), strict=True)
        wrong = [piece.stop - piece.start for piece, digest, expected in pairs if digest != expected]
        if not wrong:
            return _Verdict(is_usable=True)
        problem = f"it returned wrong digests for {len(wrong)} of {len(pieces)} inputs, such as {wrong[0]} bytes"
        verdict = _Verdict(is_usable=False, is_wrong=True, problem=problem)
    warnings.warn(f"digests by {backend} are not used on {device}: {verdict.problem}", RuntimeWarning, stacklevel=2)
    return verdict


def make_check_batches(device: torch.device) -> list[list[DevicePiece]]:
    """Return pieces of many lengths at many offsets, always the same; torch's generators are not used.

    Kernels have a faster path for lanes that have only whole leaves, and one for whole blocks, so there are batches of
    these alone.
    """
    dice = random.Random(0)
    data = DeviceBytes.from_memory(wrap_memory(memoryview(bytearray(dice.randbytes(_CHECKED_BYTES)))).to(device))
    mixed = [*_EDGES, *(dice.randrange(6000) for _ in range(_CHECKED_RANDOM))]
    return [_place(data, lengths, dice) for lengths in (mixed, [_LONG_BYTES] * 6, [64, 65, 100, 128, 1024])]


def _place(data: DeviceBytes, lengths: Sequence[int], dice: random.Random) -> list[DevicePiece]:
    starts = [dice.randrange(data.size_bytes - length) for length in lengths]
    # Half of them begin at a multiple of 16, where Triton has another kernel.
    starts = [start - start % 16 if number % 2 else start for number, start in enumerate(starts)]
    return [DevicePiece(data, start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def digest_on_cpu(pieces: Iterable[DevicePiece]) -> list[Digest]:
    """Return the digest of each piece; bytes of another device are copied to the host, at most PART_BYTES at a time."""
    return [hash_parts(_iter_copies(piece)) for piece in pieces]


def _iter_copies(piece: DevicePiece) -> Iterator[Buffer]:
    for part in cut_pieces([piece]):
        yield view_bytes(part.data.read(part.start, part.stop).cpu())


def digest(tensor: torch.Tensor, *, backend: DigestBackend | None = None) -> Digest:
    """Return the BLAKE3-256 of a tensor's values in C order, computed on the tensor's device.

    It is the digest of `tensor.contiguous()`'s bytes, on any device. A tensor without bytes has the digest of b"".

    Args:
        tensor: An ordinary tensor. It may have gaps; these are not hashed.
        backend: "cpu", "torch" or "triton". None chooses the fastest that was checked on the device.

    Raises:
        Unsupported: The tensor has no memory of its own, or the backend cannot be used on its device.
    """
    data = DeviceBytes.from_tensor(tensor)
    return digest_pieces([DevicePiece(data, 0, data.size_bytes)], backend=backend)[0]


def digest_pieces(pieces: Sequence[DevicePiece], *, backend: DigestBackend | None = None) -> list[Digest]:
    """Return the BLAKE3-256 of each piece, computed on its device; waits once for each device, when all is queued.

    The memory must not change until this returns. Of a device's memory, 32 bytes for each piece are copied to the host,
    unless the backend is "cpu". Scratch memory is bounded, however many and long the pieces are.
    """
    positions: dict[torch.device, list[int]] = {}
    for position, piece in enumerate(pieces):
        positions.setdefault(piece.data.device, []).append(position)
    found: dict[int, Digest] = {}
    for device, some in positions.items():
        compute = find_backend(backend or choose_backend(device).backend, device)
        found.update(zip(some, compute([pieces[position] for position in some]), strict=True))
    return [found[position] for position in range(len(pieces))]
