"""Compares tensors on devices with the digests of a snapshot: the copy from the host may have damaged them."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.errors import Corrupt
from holdfast.snapshot.load.cells import FilledPart, hash_on_devices, make_cells
from holdfast.snapshot.load.opened import Opened
from holdfast.tensors.spec import SpecDecoder


def verify_on_devices(parts: Iterable[FilledPart], opened: Opened, specs: SpecDecoder) -> None:
    """Raise Corrupt if memory on a device differs from the chunks that it was filled with; it is hashed there.

    Memory of the CPU is left out, and parts of chunks, which have no digest: they were verified when they were read.
    """
    manifest = opened.reader.manifest
    cells = [make_cells(part, manifest, specs) for part in parts if not part.tensor.is_cpu and part.size_bytes]
    for each, found in zip(cells, hash_on_devices(cells), strict=True):
        if not all(is_held for cell, is_held in found if cell.is_whole):
            name, device = manifest.names[each.part.number], each.part.tensor.device
            raise Corrupt(
                f"{opened.name!r}, {name}: its bytes on {device} are not those that were read from the store and"
                " verified on the host, so the copy to the device is damaged, not the store. Load it again; if that"
                " fails too, the device, its driver or its link to the host is faulty",
                key=name,
            )
