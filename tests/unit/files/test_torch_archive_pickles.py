"""The shapes in a pickle of torch.save are found without unpickling it, and nothing in it is imported or called."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.files import torch_archive as module
from holdfast.files.torch_archive import parse_tensors


def pickled(value: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_are_found_with_every_protocol(protocol: int) -> None:
    model = torch.nn.Linear(3, 5)
    state = {
        "model": model.state_dict(),
        "step": 10**20,
        "lr": 0.1,
        "names": ["a", b"b", None, True],
        "w": model.weight,
    }

    found = parse_tensors(pickled(state, pickle_protocol=protocol))

    weight = ("0", 15, True, 0, (5, 3), (3, 1))
    assert [tuple(each) for each in found] == [weight, ("1", 5, True, 0, (5,), (1,)), weight]


def test_offsets_strides_and_shared_storages_are_found() -> None:
    whole = torch.arange(24.0).reshape(4, 6)

    found = parse_tensors(pickled([whole, whole[1:3], whole.t()]))

    assert {each.key for each in found} == {"0"}
    assert [(each.offset, each.shape, each.stride) for each in found] == [
        (0, (4, 6), (6, 1)),
        (6, (2, 6), (6, 1)),
        (0, (6, 4), (1, 6)),
    ]


def test_a_dtype_without_a_storage_class_has_a_storage_of_bytes() -> None:
    found = parse_tensors(pickled(torch.zeros(6, dtype=torch.uint16)))

    assert [(each.storage_items, each.is_typed, each.shape) for each in found] == [(12, False, (6,))]


def test_optimizer_state_is_understood() -> None:
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()

    found = parse_tensors(pickled(OrderedDict(state=optimizer.state_dict())))

    assert [each.shape for each in found] == [(), (5, 3), (5, 3), (), (5,), (5,)]


class _Trap:
    """A value whose unpickling calls `pytest.fail`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("the pickle was run",)


def test_nothing_in_a_pickle_is_called() -> None:
    assert parse_tensors(pickle.dumps([_Trap()])) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02",
        b"\x80\x02R.",  # takes from an empty stack
        b"\x80\x02h\x05.",  # an empty slot of the memo
        b"\x80\x02t.",  # no mark
        b"\xff",
        b"I12\n.",  # protocol 0
        b"\x80\x02X\xff\xff\xff\xffa.",
        b"\x80\x02\x8b\xff\xff\xff\x7f1.",
        b"\x80\x02X\x01\x00\x00\x00\xff.",
    ],
)
def test_a_malformed_pickle_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_tensors(data)


def test_a_long_pickle_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_OPCODES", 10)

    with pytest.raises(ValueError, match="too long"):
        parse_tensors(pickled(torch.zeros(3)))


@given(st.binary(max_size=200), st.integers(0, 200))
def test_random_bytes_in_a_pickle_are_parsed_or_refused(noise: bytes, at: int) -> None:
    data = pickled({"a": torch.zeros(3)})
    at %= len(data)

    try:
        found = parse_tensors(data[:at] + noise + data[at + len(noise) :])
    except ValueError:
        return

    assert all(each.offset >= 0 and min((*each.shape, *each.stride), default=0) >= 0 for each in found)
