"""How much values differ, in every dtype and layout, within a limit of memory."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from holdfast.diff import values
from holdfast.diff.changes import Diff, Distance
from holdfast.diff.facts import (
    ReadableEntry,
)
from holdfast.objects.memory import MemoryStore
from holdfast.store import Store
from tests.kit.capabilities import param_dtypes

NAN, INF = float("nan"), float("inf")


def diff_values(before: object, after: object) -> Diff:
    store = Store(MemoryStore())
    store.save("a", {"x": before})
    store.save("b", {"x": after})
    return store.diff("a", "b", values=True)


def measure(before: object, after: object) -> Distance:
    (change,) = diff_values(before, after).changes
    (distance,) = change.distances
    return distance


def test_floats_are_measured() -> None:
    before = torch.arange(12.0).reshape(3, 4)
    after = before.clone()
    after[1, 2] += 3
    after[2, 0] -= 4

    found = measure(before, after)

    assert (found.total, found.mismatches, found.max_abs, found.at) == (12, 2, 4.0, (2, 0))
    assert found.relative_l2 == pytest.approx(5 / float(before.norm()))
    assert found.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(before.ravel(), after.ravel(), 0)))
    assert found.percent == pytest.approx(100 / 6)


def test_nan_at_the_same_index_is_no_mismatch_and_is_counted() -> None:
    before = torch.tensor([NAN, NAN, 1.0, INF, INF, 2.0])
    after = torch.tensor([NAN, 0.0, NAN, INF, -INF, 2.5])

    found = measure(before, after)

    assert (found.mismatches, found.nan, found.inf) == (4, (2, 2), (2, 2))
    assert (found.max_abs, found.at) == (INF, (4,))
    assert found.relative_l2 == pytest.approx(0.25)


def test_without_a_difference_of_finite_values_there_is_no_index() -> None:
    found = measure(torch.tensor([1.0, NAN]), torch.tensor([NAN, NAN]))

    assert (found.mismatches, found.max_abs, found.at) == (1, 0.0, None)


@pytest.mark.parametrize(
    ("before", "after", "gap"),
    [
        (torch.tensor([5, -(1 << 63)]), torch.tensor([5, (1 << 63) - 1]), (1 << 64) - 1),
        (torch.tensor([(1 << 62) + 1]), torch.tensor([1 << 62]), 1),
        (torch.tensor([0, 7], dtype=torch.uint8), torch.tensor([255, 7], dtype=torch.uint8), 255),
        (torch.tensor([1], dtype=torch.uint64), torch.tensor([(1 << 64) - 1], dtype=torch.uint64), (1 << 64) - 2),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1),
        (torch.tensor([3], dtype=torch.int8), torch.tensor([-4], dtype=torch.int64), 7),
    ],
)
def test_integers_are_exact(before: torch.Tensor, after: torch.Tensor, gap: int) -> None:
    found = measure(before, after)

    assert (found.max_abs, found.mismatches) == (gap, 1)


def test_complex_numbers_are_measured_by_their_magnitude() -> None:
    before = torch.tensor([3 + 4j, 1 + 0j])

    found = measure(before, torch.tensor([0 + 0j, 1 + 0j]))

    assert (found.max_abs, found.at, found.mismatches) == (5.0, (0,), 1)
    assert found.relative_l2 == pytest.approx(math.sqrt(25 / 26))


def test_conjugated_and_negated_views_are_measured_by_what_they_show() -> None:
    before = torch.tensor([3 + 4j, 1 + 0j])

    assert measure(before, torch.conj(before)).max_abs == 8.0
    assert measure(torch.conj(before), torch.conj(before).resolve_conj()).mismatches == 0
    assert measure(torch._neg_view(torch.ones(2)), torch.ones(2)).max_abs == 2.0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5], dtype=torch.bfloat16)),
        (torch.tensor([1.0, 2.0], dtype=torch.float8_e4m3fn), torch.tensor([1.0, 2.5]).to(torch.float8_e4m3fn)),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.5])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0 + 0j, 2.5 + 0j])),
        (np.array([1.0, 2.0]), np.array([1.0, 2.5])),
        (np.array([1, 2], dtype="<u4"), np.array([1.0, 2.5], dtype="<f2")),
    ],
)
def test_other_dtypes_are_converted(before: object, after: object) -> None:
    found = measure(before, after)

    assert (found.max_abs, found.at, found.mismatches) == (0.5, (1,), 1)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_half_complex_numbers_are_measured_without_a_warning() -> None:
    before, after = (torch.tensor([1 + 2j, 0j]).to(torch.complex32) * scale for scale in (1, 2))

    assert measure(before, after).mismatches == 1


@pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning")
def test_quantised_tensors_are_measured_by_what_they_mean() -> None:
    before = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, torch.qint8)
    after = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.25, 3, torch.qint8)

    assert measure(before, after).mismatches == 0
    (change,) = diff_values(before, after).changes
    assert change.what == ("quantizer", "values")


@pytest.mark.parametrize("dtype", param_dtypes("uint4", "int2", "float4_e2m1fn_x2", "bits8"))
def test_what_torch_cannot_convert_is_counted_in_bytes(dtype: torch.dtype) -> None:
    before, after = (torch.tensor([1, 2, last], dtype=torch.uint8).view(dtype) for last in (3, 4))

    found = measure(before, after)

    assert (found.unit, found.total, found.mismatches, found.max_abs) == ("byte", 3, 1, None)


def test_texts_in_arrays_are_counted_in_bytes() -> None:
    found = measure(np.array(["ab", "cd"]), np.array(["ab", "ce"]))

    assert (found.unit, found.total, found.mismatches) == ("byte", 16, 1)


def test_parts_are_measured_one_by_one() -> None:
    sparse = torch.eye(3).to_sparse()

    found = measure(sparse, 3 * sparse)

    assert (found.part, found.max_abs) == ("values", 2.0)


def test_what_is_the_same_but_for_its_strides_or_shape_is_not_read() -> None:
    before = torch.arange(6.0).reshape(2, 3)

    assert diff_values(before, before.t().contiguous().t()).changes[0].distances == ()
    assert diff_values(before, before.reshape(3, 2)).changes[0].distances == ()
    assert diff_values(before, 3).changes[0].distances == ()
    assert diff_values(before, before.to("meta")).changes[0].distances == ()


@pytest.mark.parametrize("scale", [1e-300, 1.5e308, 5e-324])
def test_neither_huge_nor_tiny_numbers_are_lost(scale: float) -> None:
    before = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64) * scale
    after = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64) * scale

    found = measure(before, after)

    assert found.cosine == pytest.approx(0.0, abs=1e-12)
    assert found.relative_l2 == pytest.approx(math.sqrt(5 / 2))


def test_zeros_have_no_direction() -> None:
    found = measure(torch.zeros(2), torch.ones(2))

    assert (found.cosine, found.relative_l2) == (None, INF)


@pytest.mark.parametrize("limit_items", [7, 64])
def test_blocks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch, limit_items: int) -> None:
    torch.manual_seed(0)
    before, after = torch.randn(5, 6, 7), torch.randn(7, 6, 5).permute(2, 1, 0)
    store = Store(MemoryStore())
    store.save("a", {"x": before})
    store.save("b", {"x": after})
    diff = store.diff("a", "b")
    sizes: list[int] = []
    read = ReadableEntry.read

    def watch(readable: ReadableEntry, start: int, stop: int) -> bytearray:
        sizes.append(stop - start)
        return read(readable, start, stop)

    whole = values.measure(store.repository, diff).changes[0].distances[0]
    monkeypatch.setattr(ReadableEntry, "read", watch)
    monkeypatch.setattr(values, "_BLOCK_ITEMS", limit_items)
    monkeypatch.setattr(values, "_BLOCK_BYTES", 800)
    found = values.measure(store.repository, diff).changes[0].distances[0]

    assert max(sizes) <= 400
    assert (found.mismatches, found.max_abs, found.at) == (whole.mismatches, whole.max_abs, whole.at)
    assert found.relative_l2 == pytest.approx(whole.relative_l2)
    assert found.cosine == pytest.approx(whole.cosine)
    assert found.at is not None
    assert (before.double() - after.double()).abs().max() == abs(before.double()[found.at] - after.double()[found.at])


def test_repeated_items_count_as_often_as_they_are_repeated() -> None:
    before, after = (torch.tensor([1.0, 2.0, last]).expand(1000, 3) for last in (3.0, NAN))

    found = measure(before, after)

    assert (found.total, found.mismatches, found.nan) == (3000, 1000, (0, 1000))


def test_the_text_of_a_diff_is_a_line() -> None:
    assert re.fullmatch(r"0 added, 0 removed, 1 changed, 0 equal", str(diff_values(1, 2)))


def test_a_tally_keeps_the_first_largest_difference_and_its_block() -> None:
    tally: values.DistanceTally[str] = values.DistanceTally(largest=0)

    tally.add_integers("first", torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]))
    tally.add_integers("second", torch.tensor([1, 2, 3]), torch.tensor([1, 7, 8]))
    tally.add_integers("third", torch.tensor([5]), torch.tensor([0]))

    assert (tally.unequal, tally.largest, tally.largest_at) == (3, 5, ("second", 1))


def test_a_tally_divides_the_norm_of_the_difference_by_that_of_the_old_values() -> None:
    tally: values.DistanceTally[int] = values.DistanceTally()
    assert tally.relative_l2 == 0.0

    tally.add_products((9.0, 0.0, 0.0, 0.0))
    assert tally.relative_l2 == INF

    tally.add_products((0.0, 36.0, 0.0, 0.0))
    assert tally.relative_l2 == 0.5


def test_a_tally_counts_nan_and_infinity_of_each_side() -> None:
    tally: values.DistanceTally[int] = values.DistanceTally()

    tally.add_nonfinite(np.array([NAN, INF, 1.0]), np.array([-INF, INF, NAN]))

    assert (tally.nan, tally.inf) == ([1, 1], [1, 2])


@pytest.mark.parametrize(("index", "shape", "found"), [(0, (), ()), (5, (2, 3), (1, 2)), (4, (2, 3, 1), (1, 1, 0))])
def test_a_flat_index_becomes_an_index_in_each_dimension(
    index: int, shape: tuple[int, ...], found: tuple[int, ...]
) -> None:
    assert values.unravel(index, shape) == found
