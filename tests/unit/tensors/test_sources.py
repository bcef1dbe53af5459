"""Tensors as sources: the right bytes, none twice, none that no tensor covers, and chunks on the right grid."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from holdfast.errors import SourceChanged, TooLarge, Unsupported
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.tensors import sources as module
from holdfast.tensors.sources import TensorSource, TensorSpan, iter_overlapping
from holdfast.tensors.spec import TensorSpec, describe
from tests.kit.capabilities import needs_ability
from tests.kit.tensor_planning import plan_sources
from tests.kit.tensors import ORDINARY

KIB = 1 << 10


def plan(*tensors: torch.Tensor) -> list[TensorSource]:
    return plan_sources([(f"t{number}", tensor) for number, tensor in enumerate(tensors)])


def content(source: TensorSource) -> bytes:
    edges = [0, *source.cuts] if source.size_bytes else [0]
    return b"".join(bytes(source.read(start, stop)) for start, stop in pairwise(edges))


def distinct_bytes(sources: list[TensorSource]) -> int:
    """Return how many bytes a store that has none of these would take."""
    chunks = {bytes(each.read(*edge)) for each in sources for edge in pairwise([0, *each.cuts])}
    return sum(map(len, chunks))


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def test_a_tensor_alone_is_read_in_place() -> None:
    tensor = torch.arange(60_000.0)
    (source,) = plan(tensor)
    data = source.read(4, 200_000)
    tensor[1] = 9.0
    assert bytes(data) == tensor[1:50_000].numpy().tobytes()
    assert (source.size_bytes, source.alias, source.note) == (240_000, 0, None)


def test_a_few_bytes_are_copied_from_where_they_lie() -> None:
    tensor = torch.arange(6.0)[2:]
    (source,) = plan(tensor)
    data = source.read(4, 12)
    expected = tensor[1:3].numpy().tobytes()
    tensor[1] = 9.0
    assert bytes(data) == expected


@pytest.mark.parametrize("items", [16, 60_000])
def test_memory_that_was_freed_meanwhile_is_not_read(items: int) -> None:
    tensor = torch.ones(items)
    (source,) = plan(tensor)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SourceChanged, match=r"^'t0': its memory was freed while it was being saved"):
        source.read(0, 4 * items)


def test_tensors_that_differ_in_values_only_have_one_form() -> None:
    one, other, third = plan(torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(3, 2))
    assert one.form is other.form
    assert third.form is not one.form


def test_flags_and_roles_make_another_form() -> None:
    plain = torch.ones(3, dtype=torch.complex64)
    kinds = [plain, plain.conj().clone().conj(), torch.nn.Parameter(plain.clone()), torch.nn.Buffer(plain.clone())]
    kinds += [plain.clone().requires_grad_(), torch._neg_view(plain.clone()), plain.to("meta")]
    sources = plan(*kinds)
    assert [source.tensor_spec for source in sources] == [describe(tensor) for tensor in kinds]
    assert len({id(source.form) for source in sources}) == len(kinds)


def test_quantised_tensors_keep_each_its_own_scale() -> None:
    scales = (0.5, 0.25)
    one, other = plan(*(torch.quantize_per_tensor(torch.ones(4), scale, 0, torch.qint8) for scale in scales))
    assert one.spec != other.spec


@pytest.mark.parametrize("count", [1, 2])
def test_a_large_tensor_of_packed_items_has_chunks_for_its_bytes_and_no_more(count: int) -> None:
    values = torch.randn(64, 60_000)
    tensor = torch.quantize_per_channel(values, torch.ones(64), torch.zeros(64), 0, torch.quint4x2)

    for source in plan(*[tensor] * count):
        assert source.cuts == [CHUNK_BYTES, 32 * 60_000]


def test_the_numbers_of_groups_follow_their_first_tensors() -> None:
    first, second = torch.ones(4), torch.ones(4)
    sources = plan(first, second, second[:2], torch.ones(2), first[2:])
    assert [source.alias for source in sources] == [1, 2, 2, 0, 1]


def test_a_small_view_of_a_large_storage_takes_its_own_bytes_only() -> None:
    large = random_bytes(4 << 20)
    (source,) = plan(large[5000:9096])
    assert source.size_bytes == 4096
    assert content(source) == large[5000:9096].numpy().tobytes()


def test_what_lies_between_items_is_left_out() -> None:
    matrix = random_bytes(1 << 20).view(1024, 1024)
    (source,) = plan(matrix[:, 7])
    assert source.tensor_spec.packed
    assert content(source) == matrix[:, 7].numpy().tobytes()


def test_repeated_items_are_stored_once() -> None:
    (source,) = plan(torch.arange(5, dtype=torch.int16)[:, None].expand(5, 1000))
    assert content(source) == torch.arange(5, dtype=torch.int16).numpy().tobytes()
    assert source.tensor_spec.stride == (1, 0)


def test_packed_items_can_be_read_from_the_middle_of_one() -> None:
    stepped = torch.arange(40, dtype=torch.int64).view(4, 10)[:, ::3]
    (source,) = plan(stepped)
    whole = stepped.contiguous().numpy().tobytes()
    for start, stop in ((0, 1), (3, 50), (31, 33), (40, 128), (127, 128)):
        assert bytes(source.read(start, stop)) == whole[start:stop]


def test_tied_gappy_tensors_share_memory_and_stay_packed() -> None:
    view = torch.arange(100)[::9]
    one, other = plan(view, view.detach())
    assert one.tensor_spec.packed
    assert one.alias == other.alias != 0


def test_gappy_views_of_other_shapes_do_not_pass_for_one_another() -> None:
    memory = torch.arange(11.0)
    one, other = plan(memory.as_strided((3, 1), (5, 2)), memory.as_strided((1, 6), (5, 2)))
    assert not one.tensor_spec.packed
    assert not other.tensor_spec.packed


def test_empty_and_meta_tensors_have_no_bytes_and_share_nothing() -> None:
    base = torch.ones(5)
    sources = plan(base[:0], base[2:2], torch.empty(3, 4, device="meta"))
    assert [(source.size_bytes, source.alias) for source in sources] == [(0, 0)] * 3


def test_tensors_of_one_storage_share_a_number_and_others_do_not() -> None:
    first, second = torch.ones(8), torch.ones(8)
    sources = plan(first, second, first[2:], second.view(2, 4), torch.ones(1))
    assert [source.alias for source in sources] == [1, 2, 1, 2, 0]


def test_overlapping_views_are_cut_where_one_begins_or_ends() -> None:
    base = random_bytes(10_000)
    sources = plan(base[:6000], base[4000:], base[5000:5500])
    assert [list(source.cuts) for source in sources] == [[4000, 5000, 5500, 6000], [1000, 1500, 2000, 6000], [500]]
    assert distinct_bytes(sources) == 10_000


def test_what_lies_apart_in_a_storage_moves_together_without_losing_its_alignment() -> None:
    base = random_bytes(100_000)
    sources = plan(base[3:8], base[50_000:50_016].view(torch.float64), base[90_006:90_008].view(torch.int16))
    assert [source.tensor_spec.at % 16 for source in sources] == [3, 50_000 % 16, 90_006 % 16]
    assert max(source.tensor_spec.at for source in sources) < 100


def test_a_view_of_another_dtype_shares_the_bytes() -> None:
    base = torch.arange(1000.0)
    sources = plan(base, base.view(torch.int32)[10:20], base.view(torch.uint8)[3:5])
    assert {source.alias for source in sources} == {1}
    assert distinct_bytes(sources) == 4000
    assert [source.tensor_spec.at for source in sources] == [0, 40, 3]


def test_views_that_overlap_in_too_many_ways_share_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CUTS", 10)
    base = random_bytes(400)
    views = [base[3:23], base[4:36].view(torch.int32), base[8:40].view(torch.int64)]
    views += [base[start : start + 50] for start in range(3, 60)]
    sources = plan(*views)
    # All begin where an item of any size may begin.
    assert {(source.start, source.size_bytes) for source in sources} == {(0, 109)}
    for source, view in zip(sources, views, strict=True):
        at = source.tensor_spec.offset * view.element_size()
        size = view.nbytes
        assert bytes(source.read(at, at + size)) == view.contiguous().view(torch.uint8).numpy().tobytes()
        assert source.tensor_spec.at % view.element_size() == 0


def test_thousands_of_overlapping_windows_are_planned_fast_and_take_the_memory_once() -> None:
    base = torch.arange(40_000, dtype=torch.int32)
    sources = plan(*base.unfold(0, 2000, 10))
    assert len(sources) == 3801
    assert sum(len(source.cuts) for source in sources) < 200_000
    assert distinct_bytes(sources) == base.nbytes


def test_windows_beyond_all_measure_are_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CUTS", 0)
    with pytest.raises(TooLarge, match=r"^t0: 11 views overlap in too many ways; save clones of them"):
        plan(*torch.ones(20).unfold(0, 10, 1))


@pytest.mark.parametrize(
    ("shape", "cells"),
    [
        ((4, 256 * KIB), [MIB := CHUNK_BYTES]),  # all four rows fit
        ((5, 256 * KIB), [MIB // 2, 5 * MIB // 4]),
        ((3, 700 * KIB), [700 * KIB, 1400 * KIB, 2100 * KIB]),  # only one row fits
        ((2, 3 * MIB // 2), [3 * MIB // 4, 3 * MIB // 2, 9 * MIB // 4, 3 * MIB]),  # rows larger than a chunk
        ((2 * MIB + 5,), [MIB // 2 + 1, MIB + 2, 3 * MIB // 2 + 3, 2 * MIB + 5]),
    ],
)
def test_chunks_are_whole_rows_of_the_outermost_dimension(shape: tuple[int, ...], cells: list[int]) -> None:
    (source,) = plan(torch.empty(shape, dtype=torch.uint8))
    assert list(source.cuts) == cells


def test_memory_that_is_not_in_order_of_rows_is_cut_on_the_plain_grid() -> None:
    (source,) = plan(torch.empty(3, 700 * KIB, dtype=torch.uint8).t())
    assert list(source.cuts) == [MIB, 2 * MIB, 2100 * KIB]


@needs_ability("view a part of a tensor with several items in a byte")
@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.quint2x4])
def test_tensors_with_several_items_in_a_byte_are_saved_whole_or_not_at_all(dtype: torch.dtype) -> None:
    whole = ORDINARY[f"{str(dtype)[6:]}/whole"]()
    assert plan(whole)[0].size_bytes == 24 // (2 if dtype == torch.quint4x2 else 4)
    assert plan(whole.t())[0].tensor_spec.stride == (1, 6)
    with pytest.raises(Unsupported, match=rf"^t0: a slice of a {dtype} tensor cannot be saved; save the whole"):
        plan(whole[::2])
    with pytest.raises(Unsupported, match=r"^t0: torch starts a slice of a"):
        plan(whole[2:])


def test_the_spec_says_what_the_meaning_says() -> None:
    (source,) = plan(torch.ones(2, 3))
    assert source.spec == {"type": "tensor", "dtype": "float32", "shape": [2, 3]}
    assert source.tensor_spec == TensorSpec(torch.float32, (2, 3), (3, 1))


def test_spans_are_grouped_if_they_overlap_directly_or_through_others() -> None:
    ranges = [(20, 30), (0, 4), (3, 8), (0, 4), (8, 9), (25, 26), (7, 8)]
    groups = list(iter_overlapping(TensorSpan(number, *edges) for number, edges in enumerate(ranges)))

    assert [[span.number for span in group] for group in groups] == [[1, 3, 2, 6], [4], [0, 5]]
