"""Decides where a file is cut into chunks: at its tensors, so that it shares chunks with the same tensors elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import BinaryIO, Final, NamedTuple

from holdfast.files.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, read_safetensors
from holdfast.repo.files import FileSource
from holdfast.repo.format.grid import Extent, cut_extents

MIN_FILE_BYTES: Final = 256 << 10
"""A smaller file is not looked into: to open each of very many small files once more takes time and gains little."""
MIN_TENSOR_BYTES: Final = 4 << 10
"""A smaller tensor is not cut out: a chunk takes some 200 bytes beside its own."""
_ZIP_MAGIC: Final = b"PK\x03\x04"


class FileCuts(NamedTuple):
    """Where a file is cut into chunks."""

    ends: Sequence[int] = ()
    """The offsets at which chunks end; () for the ordinary grid."""
    runs: Container[int] = ()
    """The offsets at which tensors begin. These are aligned in a pack, as tensors saved from memory are."""
    item_bytes: int = 1
    """The size of an item in most of the bytes."""


def read_cuts(source: FileSource) -> FileCuts:
    """Return where a file is cut: on the ordinary grid, if it has no tensors or is malformed.

    What the file says about its tensors decides only where it is cut: any file is saved as it is.
    """
    if source.size_bytes < MIN_FILE_BYTES:
        return FileCuts()
    reader = _choose_reader(bytes(source.read(0, LENGTH_BYTES + 1)))
    if reader is None:
        return FileCuts()
    with source.opened() as file:
        return plan_cuts(reader(file, source.size_bytes), source.size_bytes)


def plan_cuts(extents: Iterable[Extent], size_bytes: int) -> FileCuts:
    """Return where a file with these tensors is cut."""
    worth = [extent for extent in extents if extent.stop - extent.start >= MIN_TENSOR_BYTES]
    if not worth:
        return FileCuts()
    ends = cut_extents([Extent(0, 0), *worth, Extent(size_bytes, size_bytes)])
    sizes: Counter[int] = Counter()
    for extent in worth:
        sizes[extent.item_bytes] += extent.stop - extent.start
    return FileCuts(ends, frozenset(extent.start for extent in worth), sizes.most_common(1)[0][0])


def _choose_reader(first: bytes) -> Callable[[BinaryIO, int], list[Extent]] | None:
    """Return what finds the tensors of a file that begins with these bytes; None if it has none."""
    if first.startswith(_ZIP_MAGIC):
        from holdfast.files.torch_archive import read_torch_archive

        return read_torch_archive
    is_header = first.endswith(b"{") and int.from_bytes(first[:LENGTH_BYTES], "little") <= MAX_HEADER_BYTES
    return read_safetensors if is_header else None
