"""Random shapes, boxes in them, and ways to cut a tensor into boxes that hold every item once."""

from __future__ import annotations

from hypothesis import strategies as st

from holdfast.repo.format.boxes import Box, volume, whole


def shapes(*, min_side: int = 1, max_side: int = 6, max_dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Return shapes of at least one dim."""
    return st.lists(st.integers(min_side, max_side), min_size=1, max_size=max_dims).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Draw a box inside of a shape; it may be empty."""
    starts = tuple(draw(st.integers(0, length)) for length in shape)
    return Box(starts, tuple(draw(st.integers(0, length - at)) for at, length in zip(starts, shape, strict=True)))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], *, max_cuts: int = 6) -> list[Box]:
    """Draw boxes that are all of a shape exactly once: again and again, one of them is cut in two."""
    parts = [whole(shape)]
    for _ in range(draw(st.integers(0, max_cuts))):
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if volume(box) == 0 or not dims:
            parts.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        size = draw(st.integers(1, box.sizes[dim] - 1))
        parts += [_replace(box, dim, 0, size), _replace(box, dim, size, box.sizes[dim] - size)]
    return parts


def _replace(box: Box, dim: int, skip: int, size: int) -> Box:
    starts, sizes = list(box.starts), list(box.sizes)
    starts[dim] += skip
    sizes[dim] = size
    return Box(tuple(starts), tuple(sizes))
