"""The interface to the compiler: unsupported versions of torch, options, and when torch's own caches are off."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Final

import pytest
import torch
import torch.compiler.config as compiler_config

from holdfast.compile_cache import inductor

# This module imports private names of torch at its top. With None in its place, an import of it raises ImportError.
COMPILE_WITHOUT: Final = """
import sys
import torch

sys.modules["holdfast.compile_cache.code.targets"] = None

import holdfast.compile_cache.backend as backend
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import open_repository

torch.__version__ = sys.argv[1]
torch._inductor.compile = lambda graph, inputs, options: graph.forward
compiler = backend.make_compiler(open_repository(MemoryStore(), create=True))
run = torch.compile(lambda x: x + 1, backend=compiler)
assert run(torch.ones(2)).tolist() == [2, 2]
print(*compiler.statistics.bypass)
"""


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
        "the compile cache does not support torch 2.99, only 2.13 and 2.15; graphs are compiled but not saved"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (
            "2.99.1",
            "the compile cache does not support torch 2.99, only 2.13 and 2.15; graphs are compiled but not saved",
        ),
        ("2.13.0", "this build of torch 2.13 lacks a module or name that the compile cache needs: import of"),
    ],
)
def test_a_torch_without_a_private_name_compiles_without_the_cache(version: str, reason: str) -> None:
    command = [sys.executable, "-c", COMPILE_WITHOUT, version]
    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.stdout.startswith(reason), run.stderr
