"""Parts from a store are not trusted: inconsistent ones are Corrupt before torch reads out of bounds."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import Json
from holdfast.tensors.composite import Meta, can_nest_a_part, find_layout, join_layout, split_layout
from tests.kit.capabilities import is_able, needs_ability
from tests.kit.tensors import COMPOSITES, assert_same_tensor
from tests.tensor_zoo import DTYPES

Tensors = dict[str, torch.Tensor]
LAYOUTS = {name: make for name, make in COMPOSITES.items() if not name.startswith("subclass/")}
NUMBERS = (0, 1, 2, 3, 5, 7, -1, -2, 100, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63))
JUNK: tuple[Json, ...] = (None, True, "x", 1.5, [], {}, [1], [[1]], 1 << 63, 1 << 70, *NUMBERS)


def take_apart(name: str) -> tuple[Meta, Tensors]:
    tensor = LAYOUTS[name]()
    kind = find_layout(tensor)
    assert kind is not None
    meta, tensors = split_layout(kind, tensor)
    return Meta(kind, meta), tensors


def refuse(name: str, text: str, *, meta: dict[str, Json] | None = None, **changed: Any) -> None:
    """Fail unless a tensor with these parts changed is damage, and the error says `text`."""
    found, tensors = take_apart(name)
    with pytest.raises(Corrupt) as caught:
        join_layout(Meta(found.kind, {**found.values, **(meta or {})}), {**tensors, **changed})
    assert str(caught.value).startswith(f"the parts of a {found.kind} tensor do not fit together: ")
    assert text in str(caught.value)


def longs(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_indices_outside_of_the_shape_are_damage() -> None:
    refuse("sparse_coo/float32", "size is inconsistent with indices", meta={"shape": [3, 3]})
    refuse("sparse_coo/float32", "found negative index -1", indices=-torch.ones(2, 4, dtype=torch.int64))
    refuse("sparse_csr/whole", "`0 <= col_indices < ncols` is not satisfied", plain=longs(1, 0, 3))


def test_a_tensor_that_only_says_it_is_coalesced_is_damage() -> None:
    refuse("sparse_coo/float32", "cannot set is_coalesced to true", meta={"coalesced": True})


def test_dimensions_that_do_not_agree_are_damage() -> None:
    refuse("sparse_coo/hybrid", "it has 2 sparse and 1 dense dimensions", meta={"sparse_dim": 1})
    refuse("sparse_coo/float32", "dense_dim", meta={"shape": [3, 4, 1]})


def test_indices_of_another_type_or_place_are_damage() -> None:
    refuse("sparse_coo/float32", "indices are 2-dimensional torch.float32 on cpu", indices=torch.zeros(2, 4))
    refuse("sparse_coo/float32", "indices are 2-dimensional torch.int64 on meta", indices=longs([0], [0]).to("meta"))
    refuse("sparse_coo/float32", "indices are 1-dimensional", indices=longs(0, 1))
    refuse("sparse_csr/whole", "indices are 0-dimensional", compressed=torch.tensor(0))
    refuse("jagged/whole", "indices are 1-dimensional torch.int64", offsets=torch._neg_view(longs(0, 0)))


@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_compressed_indices_that_lead_out_of_the_others_are_damage(layout: str) -> None:
    text = "the compressed indices are out of range or not in order"
    _, tensors = take_apart(f"{layout}/none")
    for number in (1, 1 << 20, 1 << 62, -1, -(1 << 63)):
        compressed = tensors["compressed"].clone()
        compressed[1] = number
        refuse(f"{layout}/none", text, compressed=compressed)
    refuse(f"{layout}/whole", text, compressed=longs(0, 3, 1))


def test_rows_outside_of_the_values_are_damage() -> None:
    text = "a row reaches beyond the 18 values"
    refuse("nested/whole", text, offsets=longs(0, 7))
    refuse("nested/whole", text, sizes=longs([2, 3], [5, 3]))
    refuse("nested/whole", text, sizes=longs([2, 3], [1 << 62, 1 << 62]), strides=longs([3, 1], [0, 0]))
    refuse("nested/whole", text, strides=longs([3, 1], [1 << 62, 1 << 62]))
    refuse("nested/whole", text, sizes=longs([0, 0], [0, 0]), offsets=longs(0, 19))
    many = longs([0] + [1 << 62] * 30, [1] + [1 << 62] * 30)
    refuse("nested/whole", text, sizes=many, strides=torch.zeros_like(many))
    refuse("nested/whole", "a size, stride or offset is negative", offsets=longs(0, -1))
    refuse("nested/whole", "a size, stride or offset is negative", sizes=longs([2, 3], [-1, -1]))


def test_rows_that_are_not_described_alike_are_damage() -> None:
    refuse("nested/whole", "the numbers of sizes, strides and offsets differ", sizes=longs([2, 3]))
    refuse("nested/whole", "the numbers of sizes, strides and offsets differ", strides=longs([1], [1]))
    refuse("nested/whole", "the values are not contiguous memory", values=torch.zeros(40)[::2])
    refuse("nested/whole", "the values are not contiguous memory", values=torch.zeros(2, 20))


@needs_ability("make a nested tensor of a part of a storage")
def test_values_that_begin_later_in_their_storage_are_found_there() -> None:
    meta, tensors = take_apart("nested/whole")
    moved = torch.cat([torch.zeros(5), tensors["values"]])[5:]
    joined = join_layout(meta, {**tensors, "values": moved})
    for found, wanted in zip(joined.unbind(), LAYOUTS["nested/whole"]().unbind(), strict=True):
        assert_same_tensor(found, wanted)


def test_what_torch_can_do_is_found_out_in_a_fake_mode_too() -> None:
    can_nest_a_part.cache_clear()
    with FakeTensorMode():
        found = can_nest_a_part()

    assert found == is_able("make a nested tensor of a part of a storage")


def test_pieces_outside_of_the_values_are_damage() -> None:
    text = "a row reaches beyond the 6 items of the ragged dimension"
    refuse("jagged/whole", text, offsets=longs(0, 2, 7))
    refuse("jagged/whole", text, offsets=longs(0, 3, 2))
    refuse("jagged/whole", text, offsets=longs(-1, 3, 6))
    refuse("jagged/holes", text, lengths=longs(1, 0, 5))
    refuse("jagged/holes", text, offsets=longs((1 << 63) - 1, 0, 0, 6), lengths=longs(6, 0, 0))
    refuse("jagged/holes", "a length is negative or too large", lengths=longs(1, -1, 3))
    refuse("jagged/holes", "not as many lengths as offsets", lengths=longs(1))
    refuse("jagged/whole", "not as many lengths as offsets", offsets=longs())
    for dim in (0, 3):
        refuse("jagged/whole", f"dimension {dim} of 3 cannot be ragged", meta={"ragged_dim": dim})


def test_parts_that_are_missing_or_too_many_are_damage() -> None:
    refuse("jagged/whole", "it has the parts ['more', 'offsets', 'values'], not ['offsets', 'values']", more=longs(1))
    for name in ("sparse_coo/float32", "sparse_bsc/whole", "nested/whole", "jagged/whole"):
        meta, tensors = take_apart(name)
        for part in tensors:
            with pytest.raises(Corrupt, match="it has the parts "):
                join_layout(meta, {other: found for other, found in tensors.items() if other != part})


def test_parts_that_are_no_ordinary_tensors_are_damage() -> None:
    text = "'values' is not an ordinary tensor"
    for made in ("sparse_coo/float32", "sparse_csr/whole", "nested/whole", "jagged/whole", "subclass/whole"):
        refuse("sparse_coo/float32", text, values=COMPOSITES[made]())
    refuse("jagged/whole", text, values=torch.ones(6).to_mkldnn())
    refuse("jagged/whole", text, values=None)


@pytest.mark.parametrize("name", ["sparse_coo/float32", "sparse_csr/whole", "jagged/whole"])
def test_a_meta_that_is_not_what_was_written_is_damage(name: str) -> None:
    found, tensors = take_apart(name)
    wrong: tuple[Json, ...] = (None, [], "x", 5, {})
    for meta in wrong:
        with pytest.raises(Corrupt, match="is missing"):
            join_layout(Meta(found.kind, meta), tensors)
    junk: tuple[Json, ...] = (-1, 1 << 61, 1.5, "x", {}, [-1], [True])
    for field in found.values:
        for value in junk:
            refuse(name, f"{field!r} ", meta={field: value})


@pytest.mark.parametrize(
    "name", ["sparse_coo/int64", "sparse_bsr/whole", "nested/whole", "nested/no rows", "jagged/holes"]
)
def test_a_default_device_moves_nothing(name: str) -> None:
    meta, tensors = take_apart(name)
    with torch.device("meta"):
        joined = join_layout(meta, tensors)
        split_layout(meta.kind, joined)
    assert_same_tensor(joined, LAYOUTS[name]())


@pytest.mark.filterwarnings("error")
def test_loading_a_young_layout_warns_of_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        for name in ("sparse_csr/whole", "nested/whole", "nested/nothing", "jagged/whole"):
            join_layout(*take_apart(name))
    assert not caught


def change_meta(meta: dict[str, Json], chance: random.Random) -> dict[str, Json]:
    if not meta:
        return meta
    field = chance.choice(sorted(meta))
    value = meta[field]
    if isinstance(value, list) and value and chance.random() < 0.7:
        value = list(value)
        value[chance.randrange(len(value))] = chance.choice(JUNK)
    else:
        value = chance.choice(JUNK)
    return {**meta, field: value}


CHANGES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda part: part[:-1],
    lambda part: part[:0],
    lambda part: part[::2],
    lambda part: part[None],
    lambda part: part.t(),
    lambda part: part.to("meta"),
    lambda part: part.to(torch.int32),
    lambda part: part.expand(3, *part.shape),
    torch._neg_view,
    lambda part: torch.nn.Parameter(part, requires_grad=False),
)


def change_tensors(tensors: Tensors, chance: random.Random) -> Tensors:
    name = chance.choice(sorted(tensors))
    part = tensors[name]
    if part.dtype == torch.int64 and part.numel() and not part.is_meta and chance.random() < 0.7:
        part = part.clone(memory_format=torch.contiguous_format)
        part.view(-1)[chance.randrange(part.numel())] = chance.choice(NUMBERS)
        return {**tensors, name: part}
    try:
        return {**tensors, name: chance.choice(CHANGES)(part)}
    except (RuntimeError, IndexError):
        return tensors


@pytest.mark.parametrize(
    "kind", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "nested", "jagged"]
)
def test_whatever_a_store_says_is_a_sound_tensor_or_damage(kind: str) -> None:
    """A crash of torch would end the run; what is accepted must bear to be used."""
    chance = random.Random(kind)
    # One dtype is like another here.
    names = [name for name in LAYOUTS if name.startswith(f"{kind}/") and name.split("/")[1].split()[0] not in DTYPES]
    zoo = [take_apart(name) for name in names]
    for _ in range(100):
        meta, tensors = chance.choice(zoo)
        values = meta.values
        for _ in range(chance.choice((1, 1, 2))):
            if chance.random() < 0.5:
                values = change_meta(values, chance)
            else:
                tensors = change_tensors(tensors, chance)
        try:
            joined = join_layout(Meta(kind, values), tensors)
        except (Corrupt, NewerFormat):
            continue
        again, parts = split_layout(kind, joined)
        assert_same_tensor(join_layout(Meta(kind, again), parts), joined)
