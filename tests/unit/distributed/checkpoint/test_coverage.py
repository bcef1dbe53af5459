"""Sketches of boxes: they add up to zero exactly if every tensor is stored once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from holdfast.distributed.checkpoint.plan import BoxItem, Sketch, is_covered, merge, sketch_boxes
from holdfast.repo.format.boxes import Box, slices, volume, whole
from tests.kit.patience import measure_cpu_s
from tests.kit.tilings import boxes_in, shapes, tilings

SEED = bytes(range(16))
Tensors = list[tuple[tuple[int, ...], list[Box]]]


def make_items(tensors: Tensors) -> list[BoxItem]:
    return [(f"t{number}", "float32", shape, box) for number, (shape, parts) in enumerate(tensors) for box in parts]


def sketch_ranks(items: list[BoxItem], num_ranks: int = 3, seed: bytes = SEED) -> Sketch:
    """Sketch items that are dealt out to ranks one by one."""
    return merge(sketch_boxes(items[rank::num_ranks], seed) for rank in range(num_ranks))


def is_exact(tensors: Tensors) -> bool:
    """Count who holds each item: the slow and certain answer."""
    for shape, parts in tensors:
        counts = np.zeros(shape, int)
        for box in parts:
            counts[slices(box)] += 1
        if (counts != 1).any():
            return False
    return True


@st.composite
def many_tensors(draw: st.DrawFn, *, min_size: int = 1) -> Tensors:
    drawn = draw(st.lists(shapes(max_dims=4, max_side=4) | st.just(()), min_size=min_size, max_size=4))
    return [(shape, draw(tilings(shape))) for shape in drawn]


@given(many_tensors(), st.integers(1, 4), st.binary(max_size=32))
def test_boxes_that_are_everything_once_are_covered(tensors: Tensors, num_ranks: int, seed: bytes) -> None:
    assert is_covered(sketch_ranks(make_items(tensors), num_ranks, seed))


@given(many_tensors(), st.data())
def test_a_box_that_is_missing_is_noticed(tensors: Tensors, data: st.DataObject) -> None:
    items = make_items(tensors)
    gone = items.pop(data.draw(st.integers(0, len(items) - 1)))
    # Of what nobody has any part, nobody can miss one.
    assume(any(item[0] == gone[0] for item in items))

    assert not is_covered(sketch_ranks(items))


@given(many_tensors(), st.data())
def test_a_box_that_is_stored_twice_is_noticed(tensors: Tensors, data: st.DataObject) -> None:
    items = make_items(tensors)
    items.append(data.draw(st.sampled_from(items)))

    assert not is_covered(sketch_ranks(items))


@st.composite
def spoiled(draw: st.DrawFn) -> Tensors:
    """Draw tensors of one of which a box was moved, resized, or replaced by any other."""
    tensors = draw(many_tensors())
    shape, parts = tensors[draw(st.integers(0, len(tensors) - 1))]
    number = draw(st.integers(0, len(parts) - 1))
    parts[number] = draw(boxes_in(shape))
    return tensors


@given(spoiled())
@example([((2,), [Box((0,), (1,)), Box((0,), (1,))])])
@example([((2, 2), [Box((0, 0), (1, 1)), Box((1, 1), (1, 1)), Box((0, 1), (1, 1)), Box((0, 1), (1, 1))])])
def test_sketches_agree_with_counting(tensors: Tensors) -> None:
    assume(all(any(volume(box) for box in parts) for _, parts in tensors))

    assert is_covered(sketch_ranks(make_items(tensors))) == is_exact(tensors)


@given(shapes(max_dims=3), st.data())
def test_a_box_that_reaches_beyond_the_tensor_is_noticed(shape: tuple[int, ...], data: st.DataObject) -> None:
    parts = data.draw(tilings(shape))
    number, dim = data.draw(st.integers(0, len(parts) - 1)), data.draw(st.integers(0, len(shape) - 1))
    box = parts[number]
    sizes = tuple(size + (at == dim) for at, size in enumerate(box.sizes))
    parts[number] = Box(box.starts, sizes)

    assert not is_covered(sketch_ranks(make_items([(shape, parts)])))


@pytest.mark.parametrize(
    ("dtype", "shape"), [("bfloat16", (4, 4)), ("float32", (4, 5)), ("float32", (5, 4)), ("float32", (2, 8))]
)
def test_ranks_that_disagree_about_the_tensor_are_noticed(dtype: str, shape: tuple[int, ...]) -> None:
    upper, lower = Box((0, 0), (2, 4)), Box((2, 0), (2, 4))

    for own in (("w", "float32", (4, 4), upper), ("w", "float32", (4, 4), whole((4, 4)))):
        assert not is_covered(merge([sketch_boxes([own], SEED), sketch_boxes([("w", dtype, shape, lower)], SEED)]))


def test_whole_tensors_of_one_name_are_noticed_whatever_they_are() -> None:
    items: list[BoxItem] = [("w", "float32", (2,), whole((2,))), ("w", "float32", (3,), whole((3,)))]

    assert not is_covered(sketch_boxes(items, SEED))
    assert is_covered(sketch_boxes(items[:1], SEED))


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (0, 0)])
def test_what_has_no_more_than_an_origin_is_held_by_exactly_one(shape: tuple[int, ...]) -> None:
    item: BoxItem = ("w", "float32", shape, whole(shape))

    assert is_covered(sketch_boxes([item], SEED))
    assert not is_covered(merge([sketch_boxes([item], SEED), sketch_boxes([item], SEED)]))


def test_an_empty_box_holds_nothing() -> None:
    items: list[BoxItem] = [("w", "float32", (4,), whole((4,))), ("w", "float32", (4,), Box((0,), (0,)))]

    assert sketch_boxes(items, SEED) == sketch_boxes(items[:1], SEED)
    assert sketch_boxes([], SEED) == Sketch() == merge([])


def test_a_box_of_a_tensor_without_items_is_noticed() -> None:
    assert not is_covered(sketch_boxes([("w", "float32", (0,), Box((0,), (1,)))], SEED))


def test_a_sketch_of_many_dims_takes_no_longer() -> None:
    shape = (2,) * 40
    halves = [Box((half, *(0,) * 39), (1, *shape[1:])) for half in range(2)]

    assert is_covered(sketch_boxes([("w", "complex64", shape, half) for half in halves], SEED))


def test_other_seeds_give_other_sketches() -> None:
    item: BoxItem = ("w", "float32", (4,), Box((0,), (2,)))
    seeds = (SEED, SEED[:8], b"", SEED[:8] + b"\1")

    assert len({sketch_boxes([item], seed) for seed in seeds}) == len(seeds)


def test_a_thousand_tensors_are_sketched_in_a_few_milliseconds() -> None:
    items: list[BoxItem] = [
        (f"layers.{n}.w", "bfloat16", (4096, 4096), Box((512, 0), (512, 4096))) for n in range(1000)
    ]

    times = []
    for _ in range(5):
        times.append(measure_cpu_s(lambda: sketch_boxes(items, SEED)))

    assert min(times) < 0.05  # about 6 ms; far more would be another algorithm
