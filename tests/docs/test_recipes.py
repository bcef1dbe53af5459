"""Recipes for libraries that are too large to install: their blocks run against a double of the library's interface."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest
import torch

import holdfast
from tests.docs.blocks import iter_blocks

PAGE: Final = Path(__file__).resolve().parents[2] / "docs/how-to/use-with-torchft-and-vllm.md"


class FakeBaseModelLoader:
    """Stands for vLLM's `BaseModelLoader`: it keeps the configuration, and subclasses have two methods."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put a double of vLLM's registry in the place of vLLM; return what is registered."""
    registered: dict[str, Any] = {}
    package = ModuleType("vllm.model_executor.model_loader")
    base = ModuleType("vllm.model_executor.model_loader.base_loader")

    def register_model_loader(name: str) -> Any:
        return lambda kind: registered.setdefault(name, kind)

    package.__dict__["register_model_loader"] = register_model_loader
    base.__dict__["BaseModelLoader"] = FakeBaseModelLoader
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, base.__name__, base)
    return registered


def find_block(text: str) -> str:
    """Return the block of the page that contains a text."""
    return next(block.code for block in iter_blocks(PAGE.read_text(encoding="utf-8")) if text in block.code)


def test_the_loader_for_vllm_gives_the_model_the_weights_of_a_snapshot(tmp_path: Path, loaders: dict[str, Any]) -> None:
    names: dict[str, Any] = {"holdfast": holdfast}
    exec(find_block("def iter_weights").partition("\n\n\nstore")[0], names)
    exec(find_block("register_model_loader"), names)
    weights = {"a.weight": torch.ones(2), "b.weight": torch.zeros(3)}
    holdfast.open(tmp_path / "store").save("step-1", {"model": weights, "step": 1})
    given: dict[str, torch.Tensor] = {}
    model = SimpleNamespace(load_weights=given.update)
    config = SimpleNamespace(model_loader_extra_config={"store": str(tmp_path / "store"), "name": "step-1"})

    loaders["holdfast"](config).load_weights(model, model_config=None)

    assert {name: weight.tolist() for name, weight in given.items()} == {
        "a.weight": [1.0, 1.0],
        "b.weight": [0.0, 0.0, 0.0],
    }
