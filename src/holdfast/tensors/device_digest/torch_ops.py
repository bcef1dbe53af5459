"""BLAKE3 in plain torch operations on int32, for devices that have no Triton: every lane is one leaf or one pair.

uint32 has no shifts on several devices. Sums of int32 wrap around, and a shift to the right copies the sign, which is
masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from holdfast.tensors.device_digest.pieces import LEAF_BYTES, ROOT, Part, Runs, number_firsts, plan_levels
from holdfast.tensors.device_digest.side_stream import HostLink, Integers

_BLOCK_BYTES: Final = 64
_START: Final = 1
_END: Final = 2
_INITIAL: Final = np.array(
    [
        *(0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A),
        *(0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19),
    ],
    dtype=np.uint32,
).view(np.int32)
_ORDER: Final = np.array((2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8), dtype=np.int64)


class TorchKernels:
    """Hashes with operations that every device of torch has."""

    alignment = 1
    # The leaf, its words in the order of lanes, two messages, a state, and temporary values.
    leaf_scratch_bytes = 2 * LEAF_BYTES + 2 * 64 + 64 + 6 * 16

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def hash_parts(self, parts: Sequence[Part], link: HostLink) -> torch.Tensor:
        """Return one node for each part."""
        counts = np.array([part.num_leaves for part in parts], dtype=np.int64)
        nodes = self._hash_leaves(parts, counts, link)
        is_digest = np.array([part.is_piece for part in parts], dtype=np.int64)
        return self.join_runs(nodes, Runs(number_firsts(counts), counts, is_digest), link)

    def join_runs(self, nodes: torch.Tensor, runs: Runs, link: HostLink) -> torch.Tensor:
        """Return one node for each run; overwrites `nodes`."""
        compressor = _Compressor(link)
        for level in plan_levels(runs):
            pairs = np.diff(level.first_pairs, append=level.num_pairs)
            first_of_run = np.repeat(level.first_rows - 2 * level.stride * level.first_pairs, pairs)
            left = link.upload(first_of_run + 2 * level.stride * np.arange(level.num_pairs))
            flags = link.upload(np.repeat(level.flags, pairs).astype(np.int32))
            message = torch.cat([nodes.index_select(0, left), nodes.index_select(0, left + level.stride)], dim=1)
            counter = torch.zeros_like(flags)
            tail = torch.stack([counter, counter, torch.full_like(flags, _BLOCK_BYTES), flags])
            parents = compressor.compress(compressor.begin(level.num_pairs), message.t().contiguous(), tail)
            nodes.index_copy_(0, left, parents.t().contiguous())
        return nodes.index_select(0, link.upload(runs.first_rows))

    def _hash_leaves(self, parts: Sequence[Part], counts: Integers, link: HostLink) -> torch.Tensor:
        """Return one node for each leaf of all parts."""
        compressor = _Compressor(link)
        facts = _describe_leaves(parts, counts)
        num_blocks = max(1, -(-int(facts[0].max()) // _BLOCK_BYTES))
        num_full = int(facts[0].min()) // _BLOCK_BYTES
        words = self._copy_words(parts, counts, num_blocks)
        size, low, high, more_flags = link.upload(facts).unbind(0)
        value = compressor.begin(len(size))
        for block in range(num_blocks):
            left = size - block * _BLOCK_BYTES
            flags = (left <= _BLOCK_BYTES).to(torch.int32) * (more_flags | _END)
            if block == 0:
                flags |= _START
            tail = torch.stack([low, high, left.clamp(0, _BLOCK_BYTES), flags])
            after = compressor.compress(value, words[block], tail)
            value = after if block < max(num_full, 1) else torch.where(left > 0, after, value)
        return value.t().contiguous()

    def _copy_words(self, parts: Sequence[Part], counts: Integers, num_blocks: int) -> torch.Tensor:
        """Return the words of all leaves, padded with zeros, by block, word and leaf."""
        num_leaves = int(counts.sum())
        slab = torch.zeros(num_leaves * LEAF_BYTES, dtype=torch.uint8, device=self._device)
        for part, first in zip(parts, number_firsts(counts).tolist(), strict=True):
            at = first * LEAF_BYTES
            slab[at : at + part.stop - part.start].copy_(part.data.read(part.start, part.stop))
        words = slab.view(torch.int32).view(num_leaves, LEAF_BYTES // _BLOCK_BYTES, _BLOCK_BYTES // 4)
        return words[:, :num_blocks].permute(1, 2, 0).contiguous()


def _describe_leaves(parts: Sequence[Part], counts: Integers) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Return four rows: the size of each leaf, the halves of its counter, and its flags besides those of all."""
    total = int(counts.sum())
    number = np.arange(total) - np.repeat(number_firsts(counts), counts)
    size = np.repeat(np.array([part.stop - part.start for part in parts], dtype=np.int64), counts)
    counter = number + np.repeat(np.array([part.first_leaf for part in parts], dtype=np.int64), counts)
    is_digest = np.repeat(np.array([part.is_piece for part in parts]) & (counts == 1), counts)
    sizes = np.minimum(size - number * LEAF_BYTES, LEAF_BYTES)
    return np.stack([sizes, counter & 0xFFFFFFFF, counter >> 32, np.where(is_digest, ROOT, 0)]).astype(np.int32)


class _Compressor:
    """BLAKE3's compression of one block for each lane. A lane is a column: words are in rows."""

    def __init__(self, link: HostLink) -> None:
        self._initial = link.upload(_INITIAL).unsqueeze(1)
        self._order = link.upload(_ORDER)

    def begin(self, num_lanes: int) -> torch.Tensor:
        """Return the initial chaining value of each lane: eight rows."""
        return self._initial.expand(8, num_lanes)

    def compress(self, value: torch.Tensor, message: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """Return the next chaining value; `tail` has both halves of the counter, the size and the flags."""
        a, b = value[:4].clone(), value[4:].clone()
        c, d = self._initial[:4].expand_as(a).clone(), tail.clone()
        spare = torch.empty_like(a)
        for number in range(7):
            if number:
                message = message.index_select(0, self._order)
            _mix((a, b, c, d), message[0:8:2], message[1:8:2], spare)
            # The diagonals of the state become its columns, and columns again.
            b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
            _mix((a, b, c, d), message[8:16:2], message[9:16:2], spare)
            b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
        return torch.cat([a.bitwise_xor_(c), b.bitwise_xor_(d)])


def _mix(state: Sequence[torch.Tensor], x: torch.Tensor, y: torch.Tensor, spare: torch.Tensor) -> None:
    """Apply BLAKE3's quarter round to four columns at once, in place."""
    a, b, c, d = state
    for words, first, second in ((x, 16, 12), (y, 8, 7)):
        a.add_(b).add_(words)
        _rotate(d.bitwise_xor_(a), first, spare)
        c.add_(d)
        _rotate(b.bitwise_xor_(c), second, spare)


def _rotate(words: torch.Tensor, bits: int, spare: torch.Tensor) -> None:
    """Rotate words to the right, in place."""
    torch.bitwise_right_shift(words, bits, out=spare)
    spare.bitwise_and_((1 << (32 - bits)) - 1)
    words.bitwise_left_shift_(32 - bits).bitwise_or_(spare)
