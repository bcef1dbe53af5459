"""Importing the library or its command line stays light: heavy modules load when they are used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.sources import PACKAGE, ROOT

# A callable that is stored as a whole is loaded without these.
_NOT_FOR_HITS: Final = ("torch._dynamo", "torch._inductor", "sympy", "holdfast.store", "holdfast.repo.write.writer")
LIGHT: Final = {
    "holdfast": ("torch", "numpy", "rich", "obstore", "boto3"),
    "holdfast.errors": ("torch", "numpy", "rich", "obstore", "boto3"),
    "holdfast.cli.main": ("torch", "numpy", "rich", "obstore", "boto3", "argcomplete"),
    "holdfast.store": ("torch", "numpy", "rich", "obstore", "boto3"),
    "holdfast.compiling": _NOT_FOR_HITS,
    "holdfast.compile_cache.whole.start": _NOT_FOR_HITS,
    "holdfast.cli.verbs.doctor": ("torch", "numpy", "rich", "obstore", "boto3"),
}


def find_violations(module: str, heavy: Iterable[str], *, cwd: Path = ROOT) -> list[str]:
    """Import `module` in a fresh interpreter and return which of `heavy` that loaded."""
    # `cwd` comes first on the path of `python -c`, which is how a twin plants a module.
    program = f"import sys, {module}; sys.stdout.write(' '.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=True)
    return sorted(set(heavy) & set(run.stdout.split()))


def _is_built(module: str) -> bool:
    place = ROOT / PACKAGE / Path(*module.split(".")[1:])
    return place.is_dir() or place.with_suffix(".py").is_file()


@pytest.mark.parametrize("module", [module for module in LIGHT if _is_built(module)])
def test_import_loads_nothing_heavy(module: str) -> None:
    assert find_violations(module, LIGHT[module]) == []


def test_a_planted_heavy_import_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "planted.py").write_text("import torch\n", encoding="utf-8")

    assert find_violations("planted", ("torch", "numpy"), cwd=tmp_path) == ["torch"]
