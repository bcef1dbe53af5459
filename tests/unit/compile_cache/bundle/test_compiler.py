"""When graphs cannot be cached at all, and why a compiled graph is not saved, with a fake compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import RestartAnalysis, SkipFrame, exceptions_allowed_to_be_fallback
from torch._inductor.codecache import CppCodeCache
from torch.compiler import config as compiler_config

from holdfast.compile_cache.bundle import compiler as module
from holdfast.compile_cache.bundle.compiler import SHARED_NAMES, BundleCompiler, GuardLanguage
from holdfast.compile_cache.inductor import CompiledGraph
from tests.kit.hooking import Hook

COMPILER = BundleCompiler(GuardLanguage(SHARED_NAMES))
GRAPH = torch.fx.GraphModule({}, torch.fx.Graph())
_patch: Any = compiler_config


def _compile() -> CompiledGraph:
    return COMPILER.compile_graph(GRAPH, [], options={}, tag="tag", system="system")


def test_the_installed_torch_is_no_obstacle() -> None:
    assert COMPILER.find_obstacle() == ""


def test_no_graph_is_cached_if_the_user_has_turned_off_all_caches() -> None:
    with _patch.patch(force_disable_caches=True):
        assert "force_disable_caches is set" in COMPILER.find_obstacle()


def test_no_graph_is_cached_if_torch_loads_kernels_with_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_async(_: Any, main_code: str, *, device: str) -> Any:
        raise AssertionError("not called")

    monkeypatch.setattr(CppCodeCache, "load_async", classmethod(load_async))

    assert COMPILER.find_obstacle().endswith("loads C++ kernels in a way that the compile cache does not support")


def test_the_digest_of_the_key_is_part_of_torchs_own_key_during_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def compile_plainly(*_: Any) -> Any:
        seen.append(compiler_config.cache_key_tag)
        return len

    monkeypatch.setattr(module, "compile_plainly", compile_plainly)

    _compile()

    assert seen == ["tag"]


def test_a_function_that_torch_cannot_serialise_is_used_and_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compile_plainly", lambda *_: len)

    compiled = _compile()

    assert (compiled.run, compiled.graph) == (len, None)
    assert compiled.why_not_saved == "torch returned a function that cannot be serialised"


def test_a_graph_that_fails_together_with_its_backward_is_compiled_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Callable[[], Any]] = [_raise(ValueError("no backward\nfor you")), lambda: len]
    monkeypatch.setattr(module, "compile_plainly", lambda *_: results.pop(0)())

    compiled = _compile()

    assert (compiled.run, compiled.graph) == (len, None)
    assert compiled.why_not_saved == "compiling it together with its backward failed (ValueError: no backward)"


def _raise(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.parametrize("kind", [RestartAnalysis, SkipFrame, *exceptions_allowed_to_be_fallback])
def test_an_error_for_dynamo_is_passed_on_after_one_attempt(hook: Hook, kind: type[Exception]) -> None:
    error = kind(*["a reason"] * (kind in exceptions_allowed_to_be_fallback))
    attempts = []

    def fail(*_: object) -> None:
        attempts.append(1)
        raise error

    hook(module, "compile_plainly", fail)

    with pytest.raises(kind):
        _compile()

    assert attempts == [1]
    assert COMPILER.is_for_dynamo(error)
    assert not COMPILER.is_for_dynamo(ValueError())
