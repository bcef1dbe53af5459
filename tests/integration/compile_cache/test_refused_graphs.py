"""Graphs that the cache does not store: each is compiled once, and its reason is counted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from holdfast.compile_cache import inductor
from holdfast.compile_cache.backend import Compiler
from holdfast.compile_cache.bundle import compiler as bundle_compiler

Compile = Callable[[Any], Any]
Case = Callable[[Compile], Any]

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    yield holdfast.open(tmp_path / "store").compiler()
    torch.compiler.reset()


@torch.library.custom_op("refused::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * 2


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _multiply_by_a_value(_ctx: object, gradient: Tensor) -> Tensor:
    return gradient * (1.0 + float(gradient.sum().item() > 0))


scaled.register_autograd(_multiply_by_a_value)


@pytest.mark.slow
def test_a_graph_that_torch_gives_back_to_dynamo_is_compiled_once_and_counted_with_its_reason(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []
    compile_ = torch._inductor.compile

    def count(*args: object, **kwargs: object) -> object:
        attempts.append(1)
        return compile_(*args, **kwargs)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr(torch._inductor, "compile", count)
    x = torch.ones(3, requires_grad=True)

    torch.compile(scaled, backend=compiler)(x).sum().backward()

    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    reason = "torch's compiler raised DataDependentOutputException: aten._local_scalar_dense.default"
    assert compiler.statistics.restart == {reason: len(attempts)}
    assert len(attempts) == 1
    assert str(compiler.statistics).startswith("0 hits, 0 misses, 1 traced again")


def _use_subclass(compile_: Compile) -> Any:
    x = TwoTensor(torch.ones(3), torch.ones(3))  # type: ignore[no-untyped-call]  # torch does not type it
    return compile_(torch.sin)(x)


def _use_nested(compile_: Compile) -> Any:
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return compile_(torch.sin)(x).values()


def _specialise(compile_: Compile) -> Any:
    x = torch.ones(8, 2)
    torch._dynamo.mark_dynamic(x, 0, specialize_on=[lambda size: size == 8])
    return compile_(torch.sin)(x)


def _hook_saved_tensors(compile_: Compile) -> Any:
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved + 1, lambda saved: saved - 1):
        return compile_(torch.sin)(x)


def _hook_gradients(compile_: Compile) -> Any:
    def function(x: Any) -> Any:
        y = x * 2
        y.register_hook(lambda gradient: gradient + 1)
        return y.sin()

    return compile_(function)(torch.ones(3, requires_grad=True))


def _compile_autograd(compile_: Compile) -> Any:
    x: Any = torch.ones(3, requires_grad=True)
    with compiled_autograd._enable(compile_):
        x.sin().sum().backward()
    assert x.grad is not None
    return x.grad


CASES: Final[dict[Case, str]] = {
    _use_subclass: "input 0 is a tensor subclass (TwoTensor), whose code is not in the key",
    _use_nested: "input 1 is a tensor subclass (NestedTensor), whose code is not in the key",
    _specialise: "the graph has metadata that may affect the compiler (specialization)",
    _hook_saved_tensors: "saved-tensor hooks are set, and their code is not in the graph",
    _hook_gradients: "the graph calls the higher-order operator register_hook, which the cache does not support",
    _compile_autograd: "compiled autograd is on, and the hooks in its graphs are not in the key",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_a_graph_that_only_torchs_cache_stores_is_counted_with_its_reason(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    for module in (inductor, bundle_compiler):
        monkeypatch.setattr(module, "compile_plainly", lambda graph, *_args, **_options: graph.forward)

    found = case(lambda function: torch.compile(function, backend=compiler))

    assert torch.equal(found, case(lambda function: function))
    assert compiler.statistics.bypass == {CASES[case]: 1}


def test_every_reason_is_on_the_page_about_the_key() -> None:
    page = (Path(__file__).parents[3] / "docs/explanation/what-is-in-the-key.md").read_text()
    section = page.partition("## Where torch's caches hit and this one does not")[2].partition("\n## ")[0]
    listed = re.findall(r"\| `([^`]+)` \|", section)

    assert [reason for reason in CASES.values() if not any(text in reason for text in listed)] == []
