"""Files that an export writes for torch.load, read by torch itself."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from tests.kit.exports import assert_proved, assert_same, make_state


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


def _export(store: holdfast.Store, tree: Any, tmp_path: Path, **choices: Any) -> Any:
    store.save("a", tree)
    store.export("a", tmp_path / "a.pt", format="torch", **choices)
    return torch.load(tmp_path / "a.pt", weights_only=True)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_training_state_comes_back_with_its_containers_and_values(
    store: holdfast.Store, tmp_path: Path, mmap: bool
) -> None:
    state = make_state()
    store.save("a", state)

    done = store.export("a", tmp_path / "a.pt", format="torch")

    found = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)
    assert_same(found["model"], state["model"])
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert_same(found["optimizer"]["state"][0], state["optimizer"]["state"][0])
    assert {name: found[name] for name in ("step", "note", "rates")} == {
        "step": 7,
        "note": "a note",
        "rates": [0.1, 0.2],
    }
    assert done.receipt.left_out == ()
    flat = {f"model.{name}": tensor for name, tensor in found["model"].items()}
    flat |= {f"optimizer.state.{n}.{key}": t for n, s in found["optimizer"]["state"].items() for key, t in s.items()}
    assert_proved(done.receipt, flat)


def test_any_tool_reads_the_archive_and_its_checksums(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", make_state())

    store.export("a", tmp_path / "a.pt", format="torch")

    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None


def test_tied_tensors_and_views_share_memory_again(store: holdfast.Store, tmp_path: Path) -> None:
    base = torch.arange(100.0)
    tree = {"part": base[10:20], "base": base, "every": base[::2], "tied": base}

    found = _export(store, tree, tmp_path)

    assert_same(found, tree)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
    assert found["every"].stride() == (2,)


def test_strides_survive(store: holdfast.Store, tmp_path: Path) -> None:
    tree = {"turned": torch.randn(4, 6).t(), "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}

    found = _export(store, tree, tmp_path)

    assert {name: tensor.stride() for name, tensor in found.items()} == {
        name: tensor.stride() for name, tensor in tree.items()
    }


def test_parameters_stay_parameters(store: holdfast.Store, tmp_path: Path) -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

    found = _export(store, {"w": torch.nn.Parameter(torch.ones(3)), "f": frozen, "t": torch.ones(1)}, tmp_path)

    assert [(type(each), each.requires_grad) for each in found.values()] == [
        (torch.nn.Parameter, True),
        (torch.nn.Parameter, False),
        (torch.Tensor, False),
    ]


@pytest.mark.parametrize("make", [lambda x: x.conj(), lambda x: x.conj().imag])
def test_lazy_conjugates_and_negations_keep_their_values(store: holdfast.Store, tmp_path: Path, make: Any) -> None:
    tensor = make(torch.randn(6, dtype=torch.complex64))

    found = _export(store, {"x": tensor}, tmp_path)

    assert torch.equal(found["x"], tensor)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "complex128", "bfloat16"])
def test_dtypes_without_a_storage_class_are_kept(store: holdfast.Store, tmp_path: Path, name: str) -> None:
    tensor = torch.randint(0, 100, (32,), dtype=torch.uint8).view(getattr(torch, name))

    assert_same(_export(store, {"x": tensor}, tmp_path), {"x": tensor})


def test_plain_values_of_every_kind_are_kept(store: holdfast.Store, tmp_path: Path) -> None:
    values: dict[Any, Any] = {
        "numbers": [0, 255, 256, -1, 2**31, -(2**31), 2**70, -(2**70), 0.1, float("inf"), 1 - 2j],
        "texts": ["", "é", "x" * 9000],
        "bytes": [b"", b"\x00\xff", bytearray(b"abc")],
        "others": (None, True, False, (), [], {}, {1, 2}),
        "torch": [torch.float16, torch.Size([2, 3]), torch.device("cuda:1")],
        3: OrderedDict(b=1, a=2),
        (1, "k"): "tuple key",
    }

    found = _export(store, {"x": torch.ones(1), **values}, tmp_path)

    del found["x"]
    assert found == values
    assert type(found[3]) is OrderedDict
    assert list(found[3]) == ["b", "a"]


def test_a_state_dict_keeps_its_metadata(store: holdfast.Store, tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()

    found = _export(store, state, tmp_path)

    assert found._metadata == state._metadata  # type: ignore[attr-defined]  # torch sets it


def test_nan_payloads_and_minus_zero_survive(store: holdfast.Store, tmp_path: Path) -> None:
    tensor = torch.tensor([0x7FC00001, -0x80000000, 0x7F800001], dtype=torch.int32).view(torch.float32)

    assert_same(_export(store, {"x": tensor}, tmp_path), {"x": tensor})


def test_a_tensor_that_is_the_whole_tree_is_written(store: holdfast.Store, tmp_path: Path) -> None:
    found = _export(store, torch.arange(5), tmp_path)

    assert found.tolist() == [0, 1, 2, 3, 4]
