"""BLAKE3's tree above the leaves, planned on the host and joined level by level on the device, in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from holdfast.digest import DIGEST_BYTES, Digest
from holdfast.tensors.device_digest.pieces import DevicePiece, Part, count_parts, cut_pieces, group_parts
from holdfast.tensors.device_digest.side_stream import Integers, SideStream

PARENT: Final = 4
ROOT: Final = 8
"""Flags of BLAKE3: the node has two children; the node is the digest."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of adjacent nodes; each run is to be joined to one node, which replaces its first one."""

    first_rows: Integers
    counts: Integers
    is_digest: Integers
    """1 for a run whose last node is a digest, 0 for one that is a subtree."""


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """The pairs of nodes of one level. Nodes of a run are `stride` rows apart, so no pair overwrites another one."""

    stride: int
    first_pairs: Integers
    """The number of each run's first pair."""
    first_rows: Integers
    flags: Integers
    num_pairs: int


class Kernels(Protocol):
    """Hashes on one kind of device. A node is a row of eight int32 words. Nothing here may wait for the device."""

    leaf_scratch_bytes: int
    """The scratch memory that one leaf takes."""

    def hash_parts(self, parts: Sequence[Part], stream: SideStream) -> torch.Tensor:
        """Return one node for each part."""

    def join_runs(self, nodes: torch.Tensor, runs: Runs, stream: SideStream) -> torch.Tensor:
        """Return one node for each run; may overwrite `nodes`."""


def plan_levels(runs: Runs) -> Iterator[TreeLevel]:
    """Yield the levels that join each run to one node, lowest first. An odd last node waits for the next level."""
    first_rows, counts, is_digest, stride = runs.first_rows, runs.counts, runs.is_digest, 1
    while True:
        is_joined = counts > 1
        first_rows, counts, is_digest = first_rows[is_joined], counts[is_joined], is_digest[is_joined]
        if not len(counts):
            return
        pairs = counts // 2
        flags = np.where((counts == 2) & (is_digest == 1), PARENT | ROOT, PARENT)
        yield TreeLevel(stride, number_firsts(pairs), first_rows, flags, int(pairs.sum()))
        counts = counts - pairs
        stride *= 2


def number_firsts(counts: Integers) -> Integers:
    """Return the number of the first item of each group, if items are numbered through all groups."""
    return np.cumsum(counts) - counts


def digest_by_tree(pieces: Sequence[DevicePiece], kernels: Kernels, device: torch.device) -> list[Digest]:
    """Return the digest of each piece; waits for the device once, at the end, and copies 32 bytes for each piece."""
    counts = np.array([count_parts(piece) for piece in pieces], dtype=np.int64)
    with SideStream(device) as stream:
        nodes = torch.empty((int(counts.sum()), 8), dtype=torch.int32, device=device)
        row = 0
        for batch in group_parts(cut_pieces(pieces), kernels.leaf_scratch_bytes):
            nodes[row : row + len(batch)] = kernels.hash_parts(batch, stream)
            row += len(batch)
        if len(nodes) > len(pieces):
            nodes = kernels.join_runs(nodes, Runs(number_firsts(counts), counts, np.ones_like(counts)), stream)
        found = stream.download(nodes)
    data = found.numpy().tobytes()
    return [Digest(data[at : at + DIGEST_BYTES]) for at in range(0, len(data), DIGEST_BYTES)]
