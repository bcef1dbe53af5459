"""The table of names: every one that torch.save writes for plain state, and none that could run code."""

from __future__ import annotations

import datetime
import io
import os
import pathlib
import subprocess
import types
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import BadFile, Untrusted
from holdfast.formats.reading.byte_ranges import FileBytes, open_file
from holdfast.formats.reading.found import Placeholders
from holdfast.formats.reading.torch_file import TorchObjects, read_torch_object
from tests.kit.checkpoints import assert_same


def _read(tmp_path: Path, value: Any) -> Any:
    torch.save(value, tmp_path / "x.pt")
    return read_torch_object(open_file(str(tmp_path / "x.pt")), Placeholders(), where="x.pt")


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=2),
        defaultdict(int, a=1),
        defaultdict(list, a=[1]),
        Counter("aab"),
        {1, 2},
        frozenset({3}),
        b"",
        b"bytes",
        bytearray(b"xyz"),
        complex(1, -2),
        torch.float32,
        torch.float8_e5m2,
        torch.Size([1, 2]),
        torch.device("cuda", 1),
        [1 << 80, -1, 1.5, None, True, "é"],
    ],
)
def test_plain_values_come_back(tmp_path: Path, value: Any) -> None:
    assert_same(_read(tmp_path, value), value)


@pytest.mark.parametrize(
    "dtype", ["uint16", "uint32", "float8_e4m3fn", "complex64", "complex128", "bool", "bfloat16", "int8"]
)
def test_tensors_of_every_kind_of_dtype_get_placeholders(tmp_path: Path, dtype: str) -> None:
    tensor = torch.ones(3, 4).to(getattr(torch, dtype))

    found = _read(tmp_path, tensor)

    assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


def test_conjugated_and_negated_views_keep_their_bits(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j])

    assert _read(tmp_path, tensor.conj()).is_conj()
    assert _read(tmp_path, tensor.conj().imag).is_neg()


class Evil:
    """Names a function that would run when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Evil(os.system, "touch pwned"), "posix.system"),
        (Evil(eval, "1"), "builtins.eval"),
        (Evil(getattr, "a", "b"), "builtins.getattr"),
        (Evil(subprocess.Popen, "touch pwned"), "subprocess.Popen"),
        (Evil(io.open, "pwned", "w"), "io.open"),
        (pathlib.PurePosixPath("a"), "pathlib.PurePosixPath"),
        (datetime.date(2026, 1, 1), "datetime.date"),
        (types.SimpleNamespace(a=1), "types.SimpleNamespace"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (torch.ones(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
    ],
)
def test_everything_else_is_refused_by_name(tmp_path: Path, value: Any, name: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(Untrusted, match=r"x\.pt contains .* loading it could run code.*--unpickle") as caught:
        _read(tmp_path, value)

    assert caught.value.name.endswith(name.rpartition(".")[2])
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "persistent", [None, (), ("storage",), ("module", 1, 2, 3, 4), ("storage", "F", "0", "cpu", 1)]
)
def test_a_storage_in_another_form_is_refused(tmp_path: Path, persistent: object) -> None:
    def locate(key: str, size_bytes: int) -> FileBytes:
        raise AssertionError("no storage is located")

    with pytest.raises(BadFile, match="refers to a storage in a form"):
        TorchObjects(Placeholders(), locate, where="x").load_persistent(persistent)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("bytes", (10**12,)),
        ("bytearray", (10**12,)),
        ("list", ([1],)),
        ("int", ("1" * 10**6,)),
    ],
)
def test_a_call_that_could_allocate_much_is_refused(name: str, args: tuple[Any, ...]) -> None:
    objects = TorchObjects(Placeholders(), lambda key, size: pytest.fail("located"), where="x")
    maker: Any = objects.find_global("builtins", name)

    with pytest.raises(ValueError, match=r"bytes|called"):
        maker.make(args)
