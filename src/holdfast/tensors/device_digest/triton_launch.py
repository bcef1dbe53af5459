"""Launches the Triton kernels: thousands of pieces of any address and length in one launch, then one for each level."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import triton

from holdfast.tensors.device_digest import triton_kernels
from holdfast.tensors.device_digest.pieces import (
    ROOT,
    Part,
    Runs,
    TreeLevel,
    find_addresses,
    number_firsts,
    plan_levels,
)
from holdfast.tensors.device_digest.side_stream import HostLink, Integers


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU, for tests, instead of compiling them."""
    return not isinstance(triton_kernels.hash_leaves, triton.JITFunction)


class TritonKernels:
    """Hashes with one lane for each leaf, then for each pair of nodes."""

    alignment = 16
    leaf_scratch_bytes = 32

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_interpreted = is_interpreted()

    def hash_parts(self, parts: Sequence[Part], link: HostLink) -> torch.Tensor:
        """Return one node for each part."""
        memories = [part.data.read(part.start, part.stop) for part in parts]
        addresses = find_addresses(memories)
        counts = np.array([part.num_leaves for part in parts], dtype=np.int64)
        table = _describe_parts(parts, addresses, counts)
        # Those that begin at a multiple of 16 bytes, as most do, are loaded faster. They come first.
        order = np.argsort(addresses % self.alignment != 0, kind="stable")
        num_aligned = int((addresses % self.alignment == 0).sum())
        first_rows = np.empty_like(counts)
        first_rows[order] = number_firsts(counts[order])
        runs = Runs(first_rows, counts, np.array([part.is_piece for part in parts], dtype=np.int64))
        groups = [_number(table[:, some]) for some in (order[:num_aligned], order[num_aligned:])]
        levels = list(plan_levels(runs))
        on_device = _upload([*groups, *map(_describe_level, levels), first_rows], link)
        # Zeros, so that a kernel that writes nothing leaves no node of an earlier call.
        nodes = torch.zeros((int(counts.sum()), 8), dtype=torch.int32, device=self._device)
        middle = int(counts[order[:num_aligned]].sum())
        for some, group, is_aligned in zip((nodes[:middle], nodes[middle:]), on_device[:2], (True, False), strict=True):
            if len(some):
                launch = triton_kernels.hash_leaves, len(some), (some, group, group.shape[1], len(some))
                self._launch(*launch, IS_ALIGNED=is_aligned)
        self._join(nodes, levels, on_device[2:-1])
        return nodes.index_select(0, on_device[-1])

    def join_runs(self, nodes: torch.Tensor, runs: Runs, link: HostLink) -> torch.Tensor:
        """Return one node for each run; overwrites `nodes`."""
        levels = list(plan_levels(runs))
        *tables, first_rows = _upload([*map(_describe_level, levels), runs.first_rows], link)
        self._join(nodes, levels, tables)
        return nodes.index_select(0, first_rows)

    @cached_property
    def _num_warps(self) -> int:
        if self._is_interpreted:
            return 1
        return triton_kernels.count_warps(triton.runtime.driver.active.get_current_target().warp_size)

    def _join(self, nodes: torch.Tensor, levels: Sequence[TreeLevel], tables: Sequence[torch.Tensor]) -> None:
        for level, table in zip(levels, tables, strict=True):
            arguments = (nodes, table, table.shape[1], level.num_pairs, level.stride)
            self._launch(triton_kernels.join_pairs, level.num_pairs, arguments)

    def _launch(self, kernel: Any, num_lanes: int, arguments: tuple[object, ...], **constants: bool) -> None:
        # The interpreter takes as long for a narrow program as for a wide one.
        block = max(16, triton.next_power_of_2(num_lanes)) if self._is_interpreted else triton_kernels.BLOCK
        # There are no floats here; without the option, Triton 3.9 warns that its default will change.
        options = {"BLOCK": block, "num_warps": self._num_warps, "enable_fp_fusion": False}
        kernel[(triton.cdiv(num_lanes, block),)](*arguments, **options, **constants)


def _describe_parts(parts: Sequence[Part], addresses: Integers, counts: Integers) -> Integers:
    """Return the table of `hash_leaves`, without the numbers of leaves in its first row."""
    sizes = [part.stop - part.start for part in parts]
    first_leaves = [part.first_leaf for part in parts]
    flags = [ROOT if part.is_piece and count == 1 else 0 for part, count in zip(parts, counts.tolist(), strict=True)]
    return np.array([counts, addresses, sizes, first_leaves, flags], dtype=np.int64)


def _number(table: Integers) -> Integers:
    """Return a table of parts whose first row has the number of each part's first leaf instead of their count."""
    return np.concatenate([number_firsts(table[0])[np.newaxis], table[1:]])


def _describe_level(level: TreeLevel) -> Integers:
    """Return the table of `join_pairs`."""
    return np.stack([level.first_pairs, level.first_rows, level.flags])


def _upload(tables: Sequence[Integers], link: HostLink) -> list[torch.Tensor]:
    """Return all tables on the device, by one copy."""
    together = link.upload(np.concatenate([table.reshape(-1) for table in tables]))
    sizes = np.array([table.size for table in tables])
    starts = number_firsts(sizes).tolist()
    return [together[at : at + table.size].view(table.shape) for at, table in zip(starts, tables, strict=True)]
