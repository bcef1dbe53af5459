"""The interface to the compiler: unsupported versions of torch, options, and when torch's own caches are off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.compiler.config as compiler_config

from holdfast.compile_cache import inductor


@pytest.mark.parametrize("use_caches", [True, False])
def test_torchs_caches_are_off_for_a_graph_that_must_not_use_them(
    monkeypatch: pytest.MonkeyPatch, *, use_caches: bool
) -> None:
    seen: list[bool] = []

    def compile_(*_: Any, **__: Any) -> Any:
        seen.append(bool(compiler_config.force_disable_caches))

    monkeypatch.setattr(torch._inductor, "compile", compile_)
    graph = torch.fx.GraphModule({}, torch.fx.Graph())

    inductor.compile_plainly(graph, [], {}, use_caches=use_caches)

    assert seen == [not use_caches]
    assert not compiler_config.force_disable_caches


def test_an_unsupported_torch_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")

    assert inductor.find_obstacle() == (
        "the compile cache does not support torch 2.99, only 2.13; graphs are compiled but not saved"
    )
