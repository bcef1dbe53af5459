"""holdfast.compile calls torch.compile with a backend of the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.compile_cache.backend import Compiler
from holdfast.compiling import compile as compile_with_store
from holdfast.store import open as open_store


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the arguments of each call of torch.compile, which compiles nothing."""
    seen: list[dict[str, Any]] = []

    def fake_compile(model: Any, **options: Any) -> Any:
        seen.append(options)
        return model

    monkeypatch.setattr(torch, "compile", fake_compile)
    return seen


@pytest.mark.parametrize("is_open", [True, False])
def test_a_model_is_compiled_with_a_backend_of_the_store(
    calls: list[dict[str, Any]], tmp_path: Path, *, is_open: bool
) -> None:
    store = open_store(tmp_path) if is_open else tmp_path

    compiled = compile_with_store(torch.sin, store=store, fullgraph=True, dynamic=False, strict="hit")

    (options,) = calls
    backend = options.pop("backend")
    assert compiled is torch.sin
    assert isinstance(backend, Compiler)
    assert backend.cache.repo.store.url == str(tmp_path)
    assert options == {"fullgraph": True, "dynamic": False}


def test_options_of_the_compiler_are_checked(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="unknown compiler options: no_such_option"):
        compile_with_store(torch.sin, store=tmp_path, options={"no_such_option": 1})
