"""Decides where a file is cut into chunks: at its tensors, so that it shares chunks with the same tensors elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import BinaryIO, Final

from holdfast.files.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, read_safetensors
from holdfast.repo.files import FileSource
from holdfast.repo.format.grid import Extent, cut_extents

MIN_FILE_BYTES: Final = 64 << 10
"""A smaller file is one chunk; to look into each of very many small files would take as long as to save them."""
MIN_TENSOR_BYTES: Final = 4 << 10
"""A smaller tensor is not cut out: a chunk takes some 200 bytes beside its own."""
_ZIP_MAGIC: Final = b"PK\x03\x04"


def read_cuts(source: FileSource) -> Sequence[int]:
    """Return where the chunks of a file end; () for the ordinary grid, if it has no tensors or is malformed.

    What the file says about its tensors decides only where it is cut: any file is saved as it is.
    """
    if source.size_bytes < MIN_FILE_BYTES:
        return ()
    with source.opened() as file:
        return plan_cuts(_read_extents(file, source.size_bytes), source.size_bytes)


def plan_cuts(extents: Iterable[Extent], size_bytes: int) -> Sequence[int]:
    """Return where the chunks of a file with these tensors end."""
    worth = [extent for extent in extents if extent.stop - extent.start >= MIN_TENSOR_BYTES]
    return cut_extents([Extent(0, 0), *worth, Extent(size_bytes, size_bytes)]) if worth else ()


def _read_extents(file: BinaryIO, size_bytes: int) -> list[Extent]:
    first = file.read(LENGTH_BYTES + 1)
    if first.startswith(_ZIP_MAGIC):
        from holdfast.files.torch_archive import read_torch_archive

        return read_torch_archive(file, size_bytes)
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if first.endswith(b"{") and length <= MAX_HEADER_BYTES:
        return read_safetensors(file, size_bytes)
    return []
