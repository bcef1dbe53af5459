"""The substitutes for names of torch's compiler are equal to the originals, and import the compiler when needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch._inductor.codegen.memory_planning as planning
import torch._inductor.select_algorithm as selection
from torch._inductor import utils
from torch._inductor.output_code import CompiledFxGraph
from torch._logging import _internal as torch_logging

from holdfast.compile_cache.bundle import generated
from holdfast.compile_cache.bundle.generated import KERNELS, drop_compiler, extern_kernels, substitute_imports

_SELECTION = "torch._inductor.select_algorithm"


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_the_function_that_the_compiler_registers(name: str) -> None:
    assert getattr(selection.extern_kernels, name) is KERNELS[name]


def test_a_kernel_is_found_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, _SELECTION)

    assert extern_kernels.mm is KERNELS["mm"]
    assert _SELECTION not in sys.modules


def test_a_kernel_that_was_replaced_in_the_compiler_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = object()
    monkeypatch.setattr(selection.extern_kernels, "mm", replaced)

    assert extern_kernels.mm is replaced


def test_an_unknown_kernel_is_taken_from_the_compiler() -> None:
    assert extern_kernels.bias_addmm is getattr(selection.extern_kernels, "bias_addmm")  # noqa: B009 - untyped
    with pytest.raises(AttributeError):
        assert extern_kernels.no_such_kernel


def test_sizes_are_rounded_up_by_the_compilers_own_function() -> None:
    if "_align" not in vars(utils):
        pytest.skip("this version of torch defines the function in the compiler itself")
    assert vars(planning)["_align"] is vars(utils)["_align"]


def test_a_function_that_torch_defines_elsewhere_is_imported_from_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "# code\nfrom torch._inductor.codegen.memory_planning import _align as align\n\nrest\n"
    monkeypatch.setattr(utils, "_align", len, raising=False)
    assert "memory_planning" not in substitute_imports(source)

    monkeypatch.delattr(utils, "_align")
    assert substitute_imports(source) == source


def test_the_lines_of_generated_code_keep_their_numbers() -> None:
    source = "# code\nfrom torch._inductor.select_algorithm import extern_kernels\n\nrest\n"

    changed = substitute_imports(source)

    assert "select_algorithm" not in changed
    assert changed.count("\n") == source.count("\n")


def test_text_after_the_imports_is_not_changed() -> None:
    source = "import torch\n\nfrom torch._inductor.select_algorithm import extern_kernels\n"

    assert substitute_imports(source) == source


def test_what_only_a_compiler_needs_is_not_stored() -> None:
    graph = SimpleNamespace(fx_kwargs={"get_decomp_fn": len, "graph_id": 1})

    drop_compiler(graph)

    assert graph.fx_kwargs == {"graph_id": 1}


def test_torchs_own_way_is_used_for_other_devices_and_if_the_compiler_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph: Any = CompiledFxGraph.__new__(CompiledFxGraph)
    graph.compiled_fn_runner = None
    graph._triton_bundle = graph.inductor_provenance_stack_traces_str = None
    monkeypatch.setattr(torch_logging.trace_log, "handlers", [])
    monkeypatch.delitem(sys.modules, "torch._inductor.graph", raising=False)

    graph.device_types = {"cpu"}
    assert not generated._needs_compiler(graph)
    graph.device_types = {"cpu", "cuda"}
    assert generated._needs_compiler(graph)
    graph.device_types = {"cpu"}
    monkeypatch.setitem(sys.modules, "torch._inductor.graph", sys)
    assert generated._needs_compiler(graph)
