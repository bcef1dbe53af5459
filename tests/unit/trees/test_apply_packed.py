"""Only the data of a PackedSequence are converted; its batch sizes and indices stay valid."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from holdfast.trees.apply import apply_to_tensors, iter_tensors
from tests.unit.trees.test_apply import values_of


def test_a_packed_sequence_is_converted_as_a_whole() -> None:
    packed = pack_sequence([torch.zeros(1), torch.zeros(2)], enforce_sorted=False)

    result = apply_to_tensors(torch.clone, packed)

    assert type(result) is PackedSequence
    assert values_of(result) == values_of(packed)
    assert result.data is not packed.data
    assert list(map(id, result[1:])) == list(map(id, packed[1:]))


def test_only_the_data_of_a_packed_sequence_is_data() -> None:
    packed = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    sizes = packed.batch_sizes.tolist()
    seen: list[torch.Tensor] = []

    doubled = apply_to_tensors(lambda tensor: tensor * 2, {"x": packed})["x"]
    apply_to_tensors(seen.append, [packed])
    zeroed = apply_to_tensors(torch.Tensor.zero_, packed)

    assert doubled.data.tolist() == [2, 2, 2, 2]
    assert doubled.batch_sizes.tolist() == sizes
    assert [len(each) for each in pad_packed_sequence(doubled)] == [3, 2]
    assert [id(each) for each in seen] == [id(packed.data)]
    assert zeroed is packed
    assert packed.batch_sizes.tolist() == sizes
    assert packed.sorted_indices is not None
    assert sorted(packed.sorted_indices.tolist()) == [0, 1]


def test_every_tensor_of_a_packed_sequence_is_found() -> None:
    packed = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)

    assert [path for path, _ in iter_tensors([packed])] == [(0, name) for name in packed._fields]


def test_the_batch_sizes_of_a_packed_sequence_stay_on_the_cpu() -> None:
    packed = pack_sequence([torch.zeros(1), torch.zeros(2)], enforce_sorted=False)

    result = apply_to_tensors(lambda tensor: tensor.to("meta"), packed)

    assert result.data.is_meta
    assert result.batch_sizes is packed.batch_sizes
