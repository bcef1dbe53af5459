"""Torch's own tables contain no user code, and code that a user adds is found, also after the first search."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch._inductor import lowering
from torch._inductor.pattern_matcher import Arg, CallFunction, PatternMatcherPass, register_graph_pattern

from holdfast.compile_cache.code.torch_tables import LibraryKernel, LibraryWatch, TableEntry, TableWatch

_ERFC: Any = torch.ops.aten.erfc.default
_register: Any = register_graph_pattern
_Library: Any = torch.library.Library

_OWN = """
import torch._inductor.compile_fx
from torch._inductor.fx_passes import joint_graph, post_grad
from holdfast.compile_cache.code.torch_tables import LibraryWatch
from holdfast.compile_cache.code.torch_tables import TableWatch
watch = TableWatch()
assert watch.list_user_code() == [], watch.list_user_code()
joint_graph.lazy_init(torch.device("cpu"))
post_grad.lazy_init(torch.device("cpu"))
assert watch.list_user_code() == [], watch.list_user_code()
assert LibraryWatch().list_user_code() == [], LibraryWatch().list_user_code()
"""


@pytest.fixture
def post_grad() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch uses what it has deprecated
        return import_module("torch._inductor.fx_passes.post_grad")


def user_function(x: Any) -> Any:
    return x


def list_new(watch: TableWatch, before: list[TableEntry]) -> list[tuple[str, str]]:
    return [(row.role, str(row.subject)) for row in watch.list_user_code() if row not in before]


def test_torchs_own_tables_contain_no_user_code() -> None:
    ran = subprocess.run([sys.executable, "-c", _OWN], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr[-2000:]


def test_a_lowering_by_assignment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = TableWatch()
    before = watch.list_user_code()

    monkeypatch.setitem(lowering.lowerings, _ERFC, user_function)

    assert list_new(watch, before) == [("lowering", "aten.erfc.default")]


def test_a_registered_lowering_is_found_inside_torchs_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = TableWatch()
    before = watch.list_user_code()
    wrapped: Any = lowering.register_lowering([], lowering_dict={})(user_function)

    monkeypatch.setitem(lowering.lowerings, _ERFC, wrapped)

    assert wrapped.__code__.co_filename == lowering.__file__
    assert list_new(watch, before) == [("lowering", "aten.erfc.default")]


@pytest.mark.parametrize("table", ["py_kernels", "python_key_table"])
def test_a_python_kernel_is_found(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    watch = TableWatch()
    before = watch.list_user_code()

    monkeypatch.setitem(getattr(_ERFC, table), torch._C.DispatchKey.AutogradXLA, user_function)

    assert list_new(watch, before) == [("Python kernels", "aten.erfc.default")]


def test_a_pattern_is_found(monkeypatch: pytest.MonkeyPatch, post_grad: Any) -> None:
    watch = TableWatch()
    before = watch.list_user_code()
    passes = PatternMatcherPass()
    _register(CallFunction(_ERFC, Arg()), pass_dict=passes)(user_function)

    monkeypatch.setattr(post_grad, "pass_patterns", [*post_grad.pass_patterns, passes])

    assert [role for role, _ in list_new(watch, before)] == ["pattern"]


def test_a_kernel_of_a_library_is_found_and_forgotten_with_the_library() -> None:
    watch = LibraryWatch()
    assert LibraryKernel("aten::erfc", "AutogradXLA") not in watch.list_user_code()
    library = _Library("aten", "IMPL")
    library.impl("erfc", user_function, "AutogradXLA")

    try:
        assert LibraryKernel("aten::erfc", "AutogradXLA") in watch.list_user_code()
    finally:
        library._destroy()

    assert LibraryKernel("aten::erfc", "AutogradXLA") not in LibraryWatch().list_user_code()
