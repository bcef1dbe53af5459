"""The interface to the compiler: unsupported versions of torch, options, and when torch's own caches are off."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Final

import pytest
import torch
import torch.compiler.config as compiler_config

from holdfast.compile_cache import inductor
from holdfast.compile_cache.backend import make_compiler
from holdfast.compile_cache.choices import CompilerOptions, Strict
from holdfast.errors import CompileCacheError
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import open_repository
from tests.kit.hooking import Hook

# This module imports private names of torch at its top. With None in its place, an import of it raises ImportError.
COMPILE_WITHOUT: Final = """
import sys
import torch

sys.modules["holdfast.compile_cache.code.targets"] = None

import holdfast.compile_cache.backend as backend
from holdfast.errors import CompileCacheError
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import open_repository

torch.__version__ = sys.argv[1]
torch._inductor.compile = lambda graph, inputs, options: graph.forward
strict = sys.argv[2] == "strict"
try:
    compiler = backend.make_compiler(open_repository(MemoryStore(), create=True), strict=strict)
    run = torch.compile(lambda x: x + 1, backend=compiler)
    assert run(torch.ones(2)).tolist() == [2, 2]
    print(*compiler.statistics.bypass)
except CompileCacheError as error:
    print(error)
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


@pytest.mark.parametrize("strict", [True, "hit"])
def test_strict_with_an_unsupported_torch_is_an_error_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, strict: Strict
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")

    with pytest.raises(CompileCacheError, match=r"^strict: a graph cannot be cached: .* does not support torch 2\.99"):
        make_compiler(open_repository(MemoryStore(), create=True), options=CompilerOptions(strict=strict))


def test_dynamo_passes_on_a_strict_error_of_every_torch_unchanged(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    def raise_strictly(*_: object) -> None:
        raise inductor.make_strict_error("strict: no")

    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    hook.forbid(inductor, "load_torch")  # its modules may lack a name

    with pytest.raises(CompileCacheError, match=r"^strict: no"):
        torch.compile(lambda x: x + 1, backend=raise_strictly)(torch.ones(2))


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
def test_a_torch_that_cannot_be_used_compiles_without_the_cache_and_is_an_error_if_strict(
    version: str, reason: str
) -> None:
    lenient, strict = (
        subprocess.run(
            [sys.executable, "-c", COMPILE_WITHOUT, version, mode], capture_output=True, text=True, check=False
        )
        for mode in ("lenient", "strict")
    )

    assert lenient.stdout.startswith(reason), lenient.stderr
    assert strict.stdout.startswith(f"strict: a graph cannot be cached: {reason}"), strict.stderr
