"""BLAKE3's tree above the leaves, planned on the host and joined level by level on the device, in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol

import numpy as np
import torch

from holdfast.digest import Digest
from holdfast.tensors.device_digest.challenge import QueuedDigests, make_challenge, make_split_challenge
from holdfast.tensors.device_digest.pieces import DevicePiece, Part, count_parts, cut_pieces, group_parts
from holdfast.tensors.device_digest.side_stream import HostLink, Integers, SideStream

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
    alignment: int
    """Parts whose addresses are no multiples of this take another kernel; 1 if all take the same."""

    def hash_parts(self, parts: Sequence[Part], link: HostLink) -> torch.Tensor:
        """Return one node for each part."""

    def join_runs(self, nodes: torch.Tensor, runs: Runs, link: HostLink) -> torch.Tensor:
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


def queue_digests(pieces: Sequence[DevicePiece], kernels: Kernels, link: HostLink) -> QueuedDigests:
    """Queue the digests of pieces on the current stream, without waiting for the device.

    The memory of the pieces must not change before the device has reached what is queued here.
    """
    counts = np.array([count_parts(piece) for piece in pieces], dtype=np.int64)
    parts: Iterable[Part] = cut_pieces(pieces)
    expected: list[Digest] = []
    is_joined = bool((counts > 1).any())
    if is_joined:
        split = make_split_challenge(link)
        expected += split.expected
        counts = np.append(counts, len(split.parts))
        parts = chain(parts, split.parts)
    # Zeros, so that a kernel that writes nothing leaves no digest of an earlier call.
    nodes = torch.zeros((int(counts.sum()), 8), dtype=torch.int32, device=link.device)
    answers: list[torch.Tensor] = []
    row = 0
    for batch in group_parts(parts, kernels.leaf_scratch_bytes):
        challenge = make_challenge(batch, kernels.alignment, link)
        found = kernels.hash_parts([*batch, *challenge.parts], link)
        nodes[row : row + len(batch)] = found[: len(batch)]
        answers.append(found[len(batch) :])
        expected += challenge.expected
        row += len(batch)
    if is_joined:
        nodes = kernels.join_runs(nodes, Runs(number_firsts(counts), counts, np.ones_like(counts)), link)
    return QueuedDigests(torch.cat([nodes, *answers]), tuple(expected), link.device)


def digest_by_tree(pieces: Sequence[DevicePiece], kernels: Kernels, device: torch.device) -> list[Digest]:
    """Return the digest of each piece; waits for the device once, at the end.

    32 bytes for each piece are copied to the host, and 32 to 64 for each challenge.
    """
    if not pieces:
        return []
    with SideStream(device) as link:
        queued = queue_digests(pieces, kernels, link)
        found = link.download(queued.nodes)
    return queued.read(found.numpy().tobytes())
