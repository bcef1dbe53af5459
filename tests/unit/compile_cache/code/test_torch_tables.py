"""Torch's own tables contain no user code, and code that a user adds is found, also after the first search."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import warnings
import weakref
from importlib import import_module
from typing import Any

import pytest
import torch
from torch._inductor import choices, lowering
from torch._inductor.codegen import common
from torch._inductor.pattern_matcher import Arg, CallFunction, PatternMatcherPass, register_graph_pattern
from torch._inductor.virtualized import V
from torch._subclasses import fake_impls

from holdfast.compile_cache.code.torch_tables import LibraryKernel, LibraryWatch, TableEntry, TableWatch

_ERFC: Any = torch.ops.aten.erfc.default
_register: Any = register_graph_pattern
_Library: Any = torch.library.Library
_choices: Any = choices
_common: Any = common
_fake_impls: Any = fake_impls
_virtualized: Any = V

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


class UserChoices(choices.InductorChoices):
    """A user's decisions; torch calls the methods that it overrides."""


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


def test_a_fast_fake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = TableWatch()
    before = watch.list_user_code()

    monkeypatch.setitem(_fake_impls.FAST_OP_IMPLEMENTATIONS, _ERFC, user_function)

    assert list_new(watch, before) == [("fast fake", "aten.erfc.default")]


def test_a_fake_for_operators_that_fulfil_a_condition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = TableWatch()
    before = watch.list_user_code()
    checks = _fake_impls.op_implementations_checks

    monkeypatch.setattr(fake_impls, "op_implementations_checks", [*checks, (callable, user_function)])

    assert list_new(watch, before) == [("fake by condition", f"entry {len(checks)}")]


@pytest.mark.parametrize("part", ["scheduling", "pass"])
def test_a_backend_for_a_kind_of_device_is_found(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    watch = TableWatch()
    before = watch.list_user_code()
    generator, custom_pass = (user_function, None) if part == "scheduling" else (print, user_function)

    monkeypatch.setitem(_common.device_codegens, "cpu", _common.DeviceCodegen(generator, generator))
    monkeypatch.setitem(_common.custom_backend_passes, "cpu", custom_pass)

    assert list_new(watch, before) == [("backend", "cpu")]


def test_a_kernel_in_python_that_replaces_one_of_torch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = TableWatch()
    before = watch.list_user_code()
    kernels = import_module("torch._native.registry")._graphs
    target, (node, *_) = next(iter(kernels.items()))

    monkeypatch.setitem(kernels, target, [dataclasses.replace(node, impl_fn=user_function)])

    assert list_new(watch, before) == [("native kernel", "/".join(target))]


def test_an_object_that_makes_decisions_of_the_compiler_is_found() -> None:
    watch = TableWatch()
    before = watch.list_user_code()

    with _virtualized.set_choices_handler(UserChoices()):
        assert list_new(watch, before) == [("choices handler", "the compiler")]
    assert list_new(watch, before) == []


@pytest.mark.slow
def test_the_search_does_not_create_the_object_that_makes_decisions_of_the_compiler() -> None:
    program = (
        "import torch._inductor.virtualized as virtualized\n"
        "from holdfast.compile_cache.code.torch_tables import TableWatch\n"
        "TableWatch().list_user_code()\n"
        "assert not hasattr(virtualized.threadlocal, virtualized._choices._key)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr[-2000:]


def test_registered_choices_are_found_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(choices, "_registered_inductor_choices"):
        pytest.skip("this torch has no table of choices")
    watch = TableWatch()
    before = watch.list_user_code()

    monkeypatch.setattr(_choices, "_registered_inductor_choices", {"mine": UserChoices, "own": UserChoices})

    assert list_new(watch, before) == [("choices", "mine 0"), ("choices", "own 1")]


def test_a_heuristic_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = TableWatch()
    before = watch.list_user_code()
    name = next(name for name in ("heuristics", "template_heuristics") if hasattr(torch._inductor, name))
    registry = import_module(f"torch._inductor.{name}.registry")

    monkeypatch.setitem(registry._TEMPLATE_HEURISTIC_REGISTRY, ("mm", "cpu", None), UserChoices)

    assert [role.removeprefix("template ") for role, _ in list_new(watch, before)] == ["heuristic"]


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


class _Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self
        weakref.finalize(self, int)


def test_libraries_are_listed_while_the_garbage_collector_removes_finalizers() -> None:
    watch, threshold = LibraryWatch(), gc.get_threshold()
    gc.collect()
    gc.disable()
    for _ in range(300):
        _Cycle()
    # Python reuses up to 2000 deleted pairs, without counting them as allocations.
    pairs = [(number, number) for number in range(3000)]
    try:
        gc.set_threshold(gc.get_count()[0] + 100)  # fewer allocations than there are finalizers
        gc.enable()
        found = watch.list_user_code()
    finally:
        gc.set_threshold(*threshold)
        gc.enable()

    assert found == []
    assert len(pairs) == 3000
