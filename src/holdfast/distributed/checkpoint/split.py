"""Divides the chunks of replicas among the ranks that hold them, so that each chunk is stored by one rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def plan_shares(sizes: Sequence[int], holders: int) -> list[range]:
    """Return the range of chunks that each holder stores; a range may be empty.

    `sizes` are the sizes in bytes of the chunks, in an order that is the same on all holders. No share is larger than
    an equal share plus one chunk.
    """
    if holders < 1:
        raise ValueError(f"holders={holders}: must be at least 1")
    # The bytes are divided equally. A chunk belongs to the share that contains its middle, so no chunk is cut and
    # each end of a share is off by at most half a chunk.
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    doubled_middles = [2 * end - size for end, size in zip(ends, sizes, strict=True)]
    edges = [bisect_left(doubled_middles, -(-2 * total * holder // holders)) for holder in range(holders)]
    return [range(start, stop) for start, stop in zip(edges, [*edges[1:], len(sizes)], strict=True)]
