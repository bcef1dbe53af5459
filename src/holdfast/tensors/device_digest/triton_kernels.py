"""The Triton kernels of BLAKE3: one lane hashes one leaf of 1,024 bytes, or joins one pair of nodes.

Words of BLAKE3 are 32-bit and little-endian, as GPUs are. A node is a row of eight words.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

BLOCK: Final = 128
"""Lanes of a program on a GPU; the interpreter is faster with one wide program."""


def count_warps(warp_size: int) -> int:
    """Return the warps of a program: one thread for each lane. With more, threads would repeat the work of others."""
    return max(1, BLOCK // warp_size)


@triton.jit
def _mix(a, b, c, d, words):
    """Return the four words of a state after BLAKE3's quarter round with two words of the message."""
    a = a + b + words[0]
    d = d ^ a
    d = (d >> 16) | (d << 16)
    c = c + d
    b = b ^ c
    b = (b >> 12) | (b << 20)
    a = a + b + words[1]
    d = d ^ a
    d = (d >> 8) | (d << 24)
    c = c + d
    b = b ^ c
    b = (b >> 7) | (b << 25)
    return a, b, c, d


@triton.jit
def _mix_all(s, m):
    """Return a state of 16 words after one round: four columns, then four diagonals."""
    s0, s4, s8, s12 = _mix(s[0], s[4], s[8], s[12], (m[0], m[1]))
    s1, s5, s9, s13 = _mix(s[1], s[5], s[9], s[13], (m[2], m[3]))
    s2, s6, s10, s14 = _mix(s[2], s[6], s[10], s[14], (m[4], m[5]))
    s3, s7, s11, s15 = _mix(s[3], s[7], s[11], s[15], (m[6], m[7]))
    s0, s5, s10, s15 = _mix(s0, s5, s10, s15, (m[8], m[9]))
    s1, s6, s11, s12 = _mix(s1, s6, s11, s12, (m[10], m[11]))
    s2, s7, s8, s13 = _mix(s2, s7, s8, s13, (m[12], m[13]))
    s3, s4, s9, s14 = _mix(s3, s4, s9, s14, (m[14], m[15]))
    return s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15


@triton.jit
def _permute(m):
    """Return the words of a message in the order of the next round."""
    return m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13], m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8]


@triton.jit
def _start_value(lanes):
    """Return BLAKE3's initial chaining value for every lane."""
    zero = (lanes * 0).to(tl.uint32)
    low = (zero + 0x6A09E667, zero + 0xBB67AE85, zero + 0x3C6EF372, zero + 0xA54FF53A)
    high = (zero + 0x510E527F, zero + 0x9B05688C, zero + 0x1F83D9AB, zero + 0x5BE0CD19)
    return low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]


@triton.jit
def _compress(v, m, counter, size, flags):
    """Return the chaining value after one block: eight words, of the value before and the 16 words of the block."""
    start = _start_value(size)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    tail = (low, high, size.to(tl.uint32), flags.to(tl.uint32))
    s = _mix_all(
        (v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7])
        + (start[0], start[1], start[2], start[3], tail[0], tail[1], tail[2], tail[3]),
        m,
    )
    for _ in tl.static_range(6):
        m = _permute(m)
        s = _mix_all(s, m)
    first = (s[0] ^ s[8], s[1] ^ s[9], s[2] ^ s[10], s[3] ^ s[11])
    second = (s[4] ^ s[12], s[5] ^ s[13], s[6] ^ s[14], s[7] ^ s[15])
    return first[0], first[1], first[2], first[3], second[0], second[1], second[2], second[3]


@triton.jit
def _find_run(table, num_runs, number):
    """Return the last run whose first number, in the first row of the table, is not above `number`."""
    run = (number * 0).to(tl.int32)
    span = num_runs
    while span > 1:
        half = span // 2
        run = tl.where(tl.load(table + run + half) <= number, run + half, run)
        span -= half
    return run


@triton.jit
def _load_four(words):
    """Return four words from an address that is a multiple of 16: one load of 128 bits."""
    four = tl.multiple_of(words, 16)[:, None] + tl.arange(0, 4)[None, :]
    loaded = tl.load(tl.max_contiguous(tl.multiple_of(four, (4, 16)), (1, 4)))
    even, odd = tl.split(tl.reshape(loaded, (words.shape[0], 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _load_sixteen(words):
    """Return 16 words from an address that is a multiple of 16."""
    return _load_four(words) + _load_four(words + 4) + _load_four(words + 8) + _load_four(words + 12)


@triton.jit
def _load_word(words, valid):
    """Return an aligned word, or 0 if none of its bytes is wanted."""
    return tl.load(words, mask=valid > 0, other=0)


@triton.jit
def _cut_word(word, valid):
    """Return a word with zeros instead of all bytes but the `valid` first."""
    unused = tl.minimum(tl.maximum(32 - 8 * valid, 0), 31).to(tl.uint32)
    return tl.where(valid > 0, word & ((unused * 0 + 0xFFFFFFFF) >> unused), 0)


@triton.jit
def _load_some(address, left, IS_ALIGNED: tl.constexpr):
    """Return the 16 words of a block at any address, with zeros instead of all bytes but the `left` first.

    Reads whole aligned words, but only those that contain at least one of these bytes.
    """
    skipped = (address & 3).to(tl.int32)
    words = (address - skipped).to(tl.pointer_type(tl.uint32))
    word = _load_word(words, skipped + left)
    found = ()
    for number in tl.static_range(16):
        after = word
        if not IS_ALIGNED or number < 15:
            after = _load_word(words + number + 1, skipped + left - 4 * (number + 1))
        if not IS_ALIGNED:
            shift = (skipped * 8).to(tl.uint32)
            # Two shifts to the left, because a shift by 32 is undefined.
            word = (word >> shift) | ((after << 1) << (31 - shift))
        found = found + (_cut_word(word, left - 4 * number),)  # type: ignore[assignment]  # of Triton, not of Python
        word = after
    return found


@triton.jit
def _store(nodes, row, v, is_stored):
    for number in tl.static_range(8):
        tl.store(nodes + row * 8 + number, v[number].to(tl.int32, bitcast=True), mask=is_stored)


@triton.jit(do_not_specialize=["num_parts", "num_leaves"], do_not_specialize_on_alignment=["table"])
def hash_leaves(nodes, table, num_parts, num_leaves, BLOCK: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Write the node of each leaf of all parts; IS_ALIGNED promises that the address of every part is divisible by 16.

    Rows of the table: the number of a part's first leaf, its address, its size in bytes, the counter of its first leaf,
    and the flags that its leaves have besides. A part has at least one leaf; the last leaf of a part may be short.
    """
    leaf = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_stored = leaf < num_leaves
    # Spare lanes repeat the last leaf.
    leaf = tl.minimum(leaf, num_leaves - 1)
    part = _find_run(table, num_parts, leaf)
    number = leaf - tl.load(table + part)
    address = tl.load(table + num_parts + part) + number * 1024
    size = tl.minimum(tl.load(table + 2 * num_parts + part) - number * 1024, 1024).to(tl.int32)
    counter = tl.load(table + 3 * num_parts + part) + number
    more_flags = tl.load(table + 4 * num_parts + part).to(tl.int32)
    num_full = tl.min(size) // 64
    v = _start_value(size)
    for block in range(tl.maximum((tl.max(size) + 63) // 64, 1)):
        left = size - block * 64
        at = address + block * 64
        if IS_ALIGNED and block < num_full:
            m = _load_sixteen(at.to(tl.pointer_type(tl.uint32)))
        else:
            m = _load_some(at, left, IS_ALIGNED)
        is_last = left <= 64
        flags = tl.where(is_last, more_flags | 2, 0) | tl.where(block == 0, 1, 0)
        after = _compress(v, m, counter, tl.minimum(tl.maximum(left, 0), 64), flags)
        is_part = (left > 0) | (block == 0)
        first = (tl.where(is_part, after[0], v[0]), tl.where(is_part, after[1], v[1]))
        second = (tl.where(is_part, after[2], v[2]), tl.where(is_part, after[3], v[3]))
        third = (tl.where(is_part, after[4], v[4]), tl.where(is_part, after[5], v[5]))
        fourth = (tl.where(is_part, after[6], v[6]), tl.where(is_part, after[7], v[7]))
        v = first + second + third + fourth
    _store(nodes, leaf, v, is_stored)


@triton.jit(do_not_specialize=["num_runs", "num_pairs", "stride"], do_not_specialize_on_alignment=["table"])
def join_pairs(nodes, table, num_runs, num_pairs, stride, BLOCK: tl.constexpr):
    """Replace the first node of each pair by their parent; the nodes of a run are `stride` rows apart.

    Rows of the table: the number of a run's first pair, the row of its first node, and its flags.
    """
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_stored = pair < num_pairs
    pair = tl.minimum(pair, num_pairs - 1)
    run = _find_run(table, num_runs, pair)
    row = tl.load(table + num_runs + run) + (pair - tl.load(table + run)) * 2 * stride
    flags = tl.load(table + 2 * num_runs + run).to(tl.int32)
    words = (nodes + row * 8).to(tl.pointer_type(tl.uint32), bitcast=True)
    other = (nodes + (row + stride) * 8).to(tl.pointer_type(tl.uint32), bitcast=True)
    m = _load_four(words) + _load_four(words + 4) + _load_four(other) + _load_four(other + 4)
    v = _compress(_start_value(flags), m, row * 0, flags * 0 + 64, flags)
    _store(nodes, row, v, is_stored)
