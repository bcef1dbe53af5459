"""Settings, variables and replaced functions of torch are part of a call, or the reason why it is refused."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F

from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.compile_cache.whole import state

_CONFIG: Any = inductor_config
# Texts in the settings of torch that look like variables and are none.
_NO_VARIABLES = frozenset({"ATEN", "DEFAULT", "EXHAUSTIVE", "ROLE_RANK"})


def test_a_changed_setting_is_refused() -> None:
    with (
        _CONFIG.patch(epilogue_fusion=not _CONFIG.epilogue_fusion),
        pytest.raises(Uncacheable, match="epilogue_fusion"),
    ):
        state.describe_settings({})


def test_variables_of_the_compiler_are_described() -> None:
    found = state.describe_settings(
        {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TORCHINDUCTOR_CACHE_DIR": "/x", "HOME": "/", "TORCHELASTIC_RUN_ID": "7"}
    )

    assert found == {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}


def test_every_variable_that_torch_reads_for_its_settings_is_relevant() -> None:
    for name in state.CONFIGS:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        with open(spec.origin, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        variables = {text for text in texts if re.fullmatch(r"[A-Z][A-Z0-9_]{3,}", text)} - _NO_VARIABLES
        unknown = [text for text in variables if not state.is_relevant(text) and text not in state.HARMLESS_VARIABLES]
        assert unknown == []


def test_importing_the_description_does_not_import_the_compiler() -> None:
    code = "import sys, holdfast.compile_cache.whole.start; print('torch._dynamo' in sys.modules)"

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == "False"


def test_a_replaced_function_of_torch_changes_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state.read_torch_code().digest
    monkeypatch.setattr(F, "gelu", F.relu)
    assert state.read_torch_code().digest != before

    monkeypatch.setattr(F, "gelu", lambda x: x)
    with pytest.raises(Uncacheable, match=r"torch\.nn\.functional\.gelu was replaced by code from"):
        state.read_torch_code()


@pytest.mark.slow
def test_all_described_modules_are_loaded_by_importing_torch() -> None:
    program = "import sys, torch; sys.stdout.write(' '.join(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert state._TRACED - set(ran.stdout.split()) == set()


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("torch/backends/cuda/__init__.py", "torch.backends.cuda"),
        ("torch/fft/__init__.py", "torch.fft"),
        ("torch/nn/functional.py", ""),
        ("torch/nn/modules/linear.py", ""),
        ("torch/__init__.py", ""),
        ("torch/_dynamo/polyfills/builtins.py", ""),
        ("numpy/__init__.py", ""),
    ],
)
def test_files_of_torch_that_are_not_in_the_digest_are_named_by_their_modules(path: str, module: str) -> None:
    assert state.find_undescribed(str(Path(torch.__file__).parents[1] / path)) == module


def test_other_versions_of_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.15.0")

    assert state.find_obstacle() == "whole=True supports torch 2.13, not 2.15; the callable is compiled as usual"


def test_a_function_that_a_library_adds_to_torch_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state.TorchCode().digest

    monkeypatch.setattr(torch.nn.Module, "smart_apply", lambda self: self, raising=False)
    assert state.TorchCode().digest == before

    monkeypatch.setattr(torch.nn.Module, "apply", lambda self: self)
    with pytest.raises(Uncacheable, match=r"Module\.apply was replaced"):
        state.TorchCode()
