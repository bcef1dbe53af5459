"""Graphs that the cache does not store: each is compiled once, and its reason is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast.compile_cache.backend import Compiler

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
