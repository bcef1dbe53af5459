"""The limits of the machine: bare loops that hash, copy, read and write, without a format around them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import torch
from blake3 import blake3
from xxhash import xxh3_128_digest

from bench.kit.measure import Contestant, drop_pages, random_bytes, release_pages
from holdfast.digest import fingerprint, hash_bytes

CHUNK_BYTES: Final = 1 << 20
UNIT_BYTES: Final = 8 << 20
_CACHED_BYTES: Final = 1 << 20
_ALIGNMENT: Final = 4096
_TENSOR_BYTES: Final = 16 << 20
_READS: Final = ((True, 1), (True, 2), (True, 4))
"""Whether reads are direct, and the number of threads; the fastest counts."""
_HASHED_READS: Final = ((True, 2), (True, 4))
_WRITE_THREADS: Final = 2
_HASHED_THREADS: Final = 6
"""More threads than cores: some wait for the disk while others hash."""
HASHED_WRITE: Final = "copy, BLAKE3, XXH3 and raw write"
HASHED_READ: Final = "raw read and BLAKE3"

Item = TypeVar("Item")
Span = tuple[Path, int, int]
"""A file, and the start and size of a range of it."""


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def hash_memory(data: memoryview, *, threads: int) -> None:
    """BLAKE3 of every 1 MiB of `data`."""
    _share(partial(_hash_all, blake3_of), _cut(data), threads)


def hash_cached(data: memoryview, *, threads: int) -> None:
    """BLAKE3 of as many bytes as `data` has, all from memory that fits into the processor's caches."""
    pieces = [data[i % threads * _CACHED_BYTES :][:_CACHED_BYTES] for i in range(len(data) // _CACHED_BYTES)]
    _share(partial(_hash_all, blake3_of), pieces, threads)


def fingerprint_memory(data: memoryview, *, threads: int) -> None:
    """XXH3-128 of every 1 MiB of `data`."""
    _share(partial(_hash_all, xxh3_128_digest), _cut(data), threads)


def hash_whole(data: memoryview, *, threads: int) -> None:
    """BLAKE3 of `data` as one message, by the threads of the hash itself."""
    blake3(data, max_threads=threads).digest()


def fingerprint_halves(data: memoryview, *, threads: int) -> None:
    """XXH3-128 of `data`, one long piece for each thread."""
    each = -(-len(data) // threads)
    pieces = [data[start : start + each] for start in range(0, len(data), each)]
    _share(partial(_hash_all, xxh3_128_digest), pieces, threads)


def copy_memory(data: memoryview, target: memoryview) -> None:
    """Copy `data`, once, on one core: memcpy holds the GIL."""
    target[: len(data)] = data


def copy_shared(
    data: memoryview, target: memoryview | None, *, threads: int, then_hash: bool = False
) -> list[memoryview]:
    """Copy `data` on several cores, into new memory if there is no target; optionally hash each 1 MiB of the copy."""
    targets = _new_memory(len(data), CHUNK_BYTES) if target is None else _cut(target)
    pairs = zip(_cut(data), targets, strict=True)
    _share(partial(_copy_all, then_hash=then_hash), pairs, threads)
    return targets


def _new_memory(size_bytes: int, each_bytes: int) -> list[memoryview]:
    """Return new memory, cut into pieces, from the allocator that loads of tensors use."""
    sizes = [min(_TENSOR_BYTES, size_bytes - start) for start in range(0, size_bytes, _TENSOR_BYTES)]
    tensors = [memoryview(torch.empty(size, dtype=torch.uint8).numpy().data) for size in sizes]
    return [tensor[start : start + each_bytes] for tensor in tensors for start in range(0, len(tensor), each_bytes)]


def _copy_all(pairs: Iterator[tuple[memoryview, memoryview]], *, then_hash: bool) -> None:
    for source, target in pairs:
        # Numpy copies without the GIL.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
        if then_hash:
            blake3_of(target)


def read_files(paths: Sequence[Path], *, threads: int, direct: bool = False, then_hash: bool = False) -> None:
    """Read every byte of files in units of 8 MiB and optionally hash each 1 MiB of them."""
    _share(partial(_read_spans, direct=direct, then_hash=then_hash), cut_files(paths), threads)


def read_to_new(paths: Sequence[Path], *, threads: int) -> list[memoryview]:
    """Read every byte of files through the page cache in units of 8 MiB, each into new memory."""
    spans = cut_files(paths)
    targets = _new_memory(len(spans) * UNIT_BYTES, UNIT_BYTES)
    _share(_read_pairs, zip(spans, targets, strict=True), threads)
    return targets


def _read_pairs(pairs: Iterator[tuple[Span, memoryview]]) -> None:
    for (path, start, size), target in pairs:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            if file.readinto(target[:size]) != size:
                raise OSError(f"fewer than {size} bytes came from {path}")


def write_file(
    path: Path, data: memoryview, *, direct: bool, threads: int = 1, repeats: int = 1, hashed: bool = False
) -> None:
    """Write a new file in units of 8 MiB and make it durable; a direct write skips the unaligned bytes at the end.

    If `hashed`, each 1 MiB is copied to a buffer and hashed twice there (BLAKE3 and XXH3, as in a save), and the file's
    blocks are allocated first.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0))
    try:
        size = len(data) // _ALIGNMENT * _ALIGNMENT if direct else len(data)
        if hashed:
            os.posix_fallocate(handle, 0, size * repeats)
        spans = [
            (data[start : min(start + UNIT_BYTES, size)], number * size + start)
            for number in range(repeats)
            for start in range(0, size, UNIT_BYTES)
        ]
        _share(partial(_write_hashed if hashed else _write_units, handle), spans, threads)
        os.fdatasync(handle)
    finally:
        os.close(handle)


def _write_units(handle: int, units: Iterator[tuple[memoryview, int]]) -> None:
    for unit, offset in units:
        _write_unit(handle, unit, offset)


def _write_hashed(handle: int, units: Iterator[tuple[memoryview, int]]) -> None:
    buffer = aligned_memory(UNIT_BYTES)
    for unit, offset in units:
        # The copy of a chunk is in the processor's cache when it is hashed.
        for source, piece in zip(_cut(unit), _cut(buffer[: len(unit)]), strict=True):
            np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(source, np.uint8))
            blake3_of(piece)
            xxh3_128_digest(piece)
        _write_unit(handle, buffer[: len(unit)], offset)


def _write_unit(handle: int, unit: memoryview, offset: int) -> None:
    if os.pwritev(handle, [unit], offset) != len(unit):
        raise OSError("the disk accepted only a part of a write; is it full?")


def remove_durably(path: Path) -> None:
    """Delete a file and wait until the disk has done so: pending work would slow down the next write."""
    path.unlink(missing_ok=True)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cut_files(paths: Sequence[Path]) -> list[Span]:
    """Return all bytes of files as units of 8 MiB."""
    return [
        (path, start, min(UNIT_BYTES, path.stat().st_size - start))
        for path in paths
        for start in range(0, path.stat().st_size, UNIT_BYTES)
    ]


def aligned_memory(size_bytes: int) -> memoryview:
    """Return memory that begins on a page, as direct reads and writes require."""
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def random_pages(size_bytes: int, *, seed: int) -> memoryview:
    """Return random bytes that begin on a page, in memory that numpy has allocated: huge pages, if available."""
    found = random_bytes(size_bytes + _ALIGNMENT, seed=seed)
    start = -np.frombuffer(found, np.uint8).ctypes.data % _ALIGNMENT
    return found[start : start + size_bytes]


def blake3_of(data: memoryview) -> bytes:
    """Return the BLAKE3-256 of `data`."""
    return blake3(data).digest()


def _share(act: Callable[[Iterator[Item]], None], items: Iterable[Item], threads: int) -> None:
    """Process all items on threads, each of which takes the next item when it is free: next() of a list is atomic."""
    queue = iter(list(items))
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(act, queue) for _ in range(threads)]:
            future.result()


def _cut(data: memoryview) -> list[memoryview]:
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


def _hash_all(digest: Callable[[memoryview], bytes], pieces: Iterator[memoryview]) -> None:
    for piece in pieces:
        digest(piece)


def _read_spans(spans: Iterator[Span], *, direct: bool, then_hash: bool) -> None:
    buffer = aligned_memory(UNIT_BYTES)
    for path, start, size in spans:
        handle = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            # The length of a direct read must be whole pages; at the end of the file it returns fewer bytes.
            count = os.preadv(handle, [buffer if direct else buffer[:size]], start)
        finally:
            os.close(handle)
        if count != size:
            raise OSError(f"{count} of {size} bytes came from {path}")
        if then_hash:
            for first in range(0, size, CHUNK_BYTES):
                blake3_of(buffer[first : min(first + CHUNK_BYTES, size)])


def memory_limits(data: memoryview) -> dict[str, Contestant]:
    """Return the contestants that use only memory."""
    cores = count_cores()
    target = aligned_memory(len(data))
    return {
        "BLAKE3 of memory": Contestant(partial(hash_memory, data, threads=cores)),
        "cached BLAKE3": Contestant(partial(hash_cached, data, threads=cores)),
        "XXH3 of memory": Contestant(partial(fingerprint_memory, data, threads=cores)),
        "memcpy, one core": Contestant(partial(copy_memory, data, target)),
    }


def read_limits(paths: Sequence[Path], *, then_hash: bool = False) -> dict[str, Contestant]:
    """Return raw reads of files that are not in the page cache; the fastest of them is the limit."""
    verb = HASHED_READ if then_hash else "raw read"
    return {
        f"{verb}, {'direct' if direct else 'buffered'}, {threads} threads": Contestant(
            partial(read_files, paths, threads=threads, direct=direct, then_hash=then_hash),
            prepare=partial(drop_pages, paths),
        )
        for direct, threads in (_HASHED_READS if then_hash else _READS)
    }


def write_limits(path: Path, data: memoryview) -> dict[str, Contestant]:
    """Return raw durable writes of `data`, which begins on a page, to a new file; the fastest of them is the limit."""
    prepare = partial(remove_durably, path)
    write = partial(write_file, path, data)
    release = partial(release_pages, [path])
    return {
        f"raw write, direct, {_WRITE_THREADS} threads": Contestant(
            partial(write, direct=True, threads=_WRITE_THREADS), prepare
        ),
        # One round, for information: the page cache costs one more copy, and this was never the fastest.
        "raw write, buffered": Contestant(partial(write, direct=False), prepare, release=release, most_rounds=1),
        f"{HASHED_WRITE}, {_HASHED_THREADS} threads": Contestant(
            partial(write, direct=True, threads=_HASHED_THREADS, hashed=True), prepare
        ),
    }


def copy_limits(data: memoryview) -> dict[str, Contestant]:
    """Return copies of `data` on all cores, bare and hashed, into reused memory and into new memory."""
    cores = count_cores()
    target = aligned_memory(len(data))
    target[:] = data  # touched now, so that the first round does not pay for page faults
    return {
        "memcpy": Contestant(partial(copy_shared, data, target, threads=cores)),
        "memcpy and BLAKE3": Contestant(partial(copy_shared, data, target, threads=cores, then_hash=True)),
        "memcpy to new memory": Contestant(partial(copy_shared, data, None, threads=cores)),
        "memcpy to new memory and BLAKE3": Contestant(partial(copy_shared, data, None, threads=cores, then_hash=True)),
    }


def hash_limits(data: memoryview) -> dict[str, Contestant]:
    """Return both hashes on all cores, as Holdfast calls them (chunk by chunk) and bare."""
    cores = count_cores()
    return {
        "hash_bytes (BLAKE3)": Contestant(partial(_share, partial(_hash_all, hash_bytes), _cut(data), cores)),
        "fingerprint (XXH3)": Contestant(partial(_share, partial(_hash_all, fingerprint), _cut(data), cores)),
        "bare BLAKE3, chunks": Contestant(partial(hash_memory, data, threads=cores)),
        "bare BLAKE3, whole": Contestant(partial(hash_whole, data, threads=cores)),
        "bare XXH3, chunks": Contestant(partial(fingerprint_memory, data, threads=cores)),
        "bare XXH3, halves": Contestant(partial(fingerprint_halves, data, threads=cores)),
    }
