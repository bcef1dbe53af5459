"""Every model of the benchmark starts from a copied store, without a compiler and without torch's caches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.kit.compile_models import MODELS, is_installed
from bench.kit.measure import WrongResult
from bench.suites.compile import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("model", MODELS)
def test_a_copied_store_trains_bit_for_bit_without_a_compiler(model: str, tmp_path: Path) -> None:
    if not is_installed(model):
        pytest.skip("the model is in a package that is not installed")
    processes = Processes(tmp_path)
    plain = processes.run(model, "plain", tmp_path)
    cold = processes.run(model, "store", tmp_path / "store")
    shutil.copytree(tmp_path / "store", tmp_path / "elsewhere" / "store")
    shutil.rmtree(tmp_path / "store")

    warm = processes.run(model, "store", tmp_path / "elsewhere" / "store", has_compiler=False)

    assert plain.compiler_runs > 0
    assert (cold.hit, cold.digest) == (0, plain.digest)
    assert (warm.hit, warm.compiler_runs, warm.digest) == (1, 0, plain.digest)


def test_what_torch_exports_does_not_start_without_a_compiler(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.run("MLP", "export", tmp_path / "blob")

    with pytest.raises(WrongResult, match=r"InvalidCxxCompiler|CppCompileError|No working C"):
        processes.run("MLP", "import", tmp_path / "blob", has_compiler=False)
