"""Graphs for which torch has no key of its own do not get each other's code from torch's cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.compile_cache.backend import make_compiler
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import open_repository


def _make_function(factor: float) -> Callable[[Tensor], Tensor]:
    """Return an autograd function, for which torch has no key. Its graphs need no C++ kernel."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.addmm(x, x, x, alpha=factor)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return torch.addmm(grads[0], grads[0], grads[0], alpha=factor)

    function: Any = Product
    apply: Callable[[Tensor], Tensor] = function.apply
    return apply


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_graphs_with_the_same_state_of_random_have_their_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    x = torch.arange(4.0).reshape(2, 2).requires_grad_()
    found: list[Tensor] = []
    right: list[Tensor] = []
    for factor in (2.0, 5.0):
        random.seed(0)
        torch._dynamo.reset()
        compiler = make_compiler(open_repository(open_store(str(tmp_path / str(factor))), create=True))
        function: Any = _make_function(factor)
        compiled: Any = torch.compile(function, backend=compiler)
        for results, run in ((found, compiled), (right, function)):
            y = run(x)
            results += [y.detach(), *torch.autograd.grad(y.sum(), x)]
        assert (compiler.statistics.miss, compiler.statistics.saved) == (1, 1)

    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
