"""Inputs that share memory keep torch's own caches out: these do not tell them from others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.compiler.config as compiler_config
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast.compile_cache import inductor
from holdfast.compile_cache.key.inputs import may_share


def test_inputs_may_share_if_they_do_or_do_not_show_it() -> None:
    base = torch.zeros(8)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(base)

    assert may_share([base[:6], base[2:]])
    assert not may_share([base, base.clone(), 3])
    assert may_share([fake, fake])


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
