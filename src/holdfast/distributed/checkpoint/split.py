"""How those who hold the same share the work of storing it: a stretch of its chunks each, the same on every rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def plan_shares(sizes: Sequence[int], holders: int) -> list[range]:
    """Return which chunks each holder stores: one stretch of the sequence each, some of them perhaps empty.

    `sizes` are the bytes of all chunks that all holders have, in an order that is theirs too. No share is larger than
    an equal part and one chunk.
    """
    if holders < 1:
        raise ValueError(f"{holders} holders cannot share anything")
    # A chunk goes to whom the middle of it falls to: that cuts no chunk, and is off by half of one at either end.
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    doubled_middles = [2 * end - size for end, size in zip(ends, sizes, strict=True)]
    edges = [bisect_left(doubled_middles, -(-2 * total * holder // holders)) for holder in range(holders)]
    return [range(start, stop) for start, stop in zip(edges, [*edges[1:], len(sizes)], strict=True)]
