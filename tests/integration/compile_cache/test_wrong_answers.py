"""Cases in which torch 2.13's own caches return wrong results or lose entries, and a store does not.

The first process of each case compiles, the second uses what the first stored. The two processes of torch share a cache
directory, or a file that the first exported. Ours share the same directory, with its wrong entries, and a store.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.compile_cache.processes import ROOT
from tests.kit.torch_versions import only_with_torch

NARROW: Final = {"ATEN_CPU_CAPABILITY": "avx2"}
CASES: Final = ("other_processor", "shared_inputs", "edited_operator", "outside_guards", "exported_twice")
ELSEWHERE: Final = "exported_twice"
"""The case whose second process begins with an empty directory."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True, slots=True)
class Answers:
    """The output of the second processes, by case."""

    torch: dict[str, Any]
    ours: dict[str, Any]


def _run(folder: Path, way: str, role: str, cases: list[str], inductor: str) -> dict[str, Any]:
    request = {"way": way, "role": role, "folder": str(folder), "store": str(folder / "store"), "cases": cases}
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / inductor),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **NARROW,
    }
    command = [sys.executable, "-m", "tests.integration.compile_cache.wrong_answers", json.dumps(request)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    if "avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("the case of two processors needs one with AVX2")
    folder = tmp_path_factory.mktemp("answers")
    told: dict[str, dict[str, Any]] = {}
    for way in ("torch", "holdfast"):
        made = _run(folder, way, "make", list(CASES), "directory")
        assert [sum(made[case]["wrong"]) for case in CASES] == [0] * len(CASES), made
        told[way] = _run(folder, way, "use", [case for case in CASES if case != ELSEWHERE], "directory")
        told[way] |= _run(folder, way, "use", [ELSEWHERE], f"empty-{way}")
    shutil.rmtree(folder / "directory")
    return Answers(told["torch"], told["holdfast"])


def _is_hit(told: dict[str, Any]) -> bool:
    return bool(told["counted"]["fxgraph_cache_hit"]) and not told["counted"]["fxgraph_cache_miss"]


def _is_right(told: dict[str, Any]) -> bool:
    return "error" not in told and bool(told["wrong"]) and not any(told["wrong"])


@pytest.mark.parametrize("case", CASES)
def test_ours_is_right(answers: Answers, case: str) -> None:
    assert _is_right(answers.ours[case]), answers.ours[case]


@only_with_torch("2.13")
def test_torch_serves_code_for_longer_vectors_than_the_processor_has(answers: Answers) -> None:
    told = answers.torch["other_processor"]

    assert _is_hit(told)
    assert told["wrong"] == [32]


def test_ours_misses_and_names_the_processor(answers: Answers) -> None:
    told = answers.ours["other_processor"]

    assert (told["statistics"]["hit"], told["statistics"]["miss"]) == (0, 1)
    assert told["explained"] == ["missed: system changed (cpu_isa AVX512 -> AVX2)"]


@only_with_torch("2.13")
def test_torch_serves_code_for_separate_inputs_to_inputs_that_share_memory(answers: Answers) -> None:
    told = answers.torch["shared_inputs"]

    assert _is_hit(told)
    assert told["wrong"] == [32]


def test_ours_compiles_for_inputs_that_share_memory_and_says_why(answers: Answers) -> None:
    statistics = answers.ours["shared_inputs"]["statistics"]

    assert (statistics["hit"], statistics["miss"]) == (0, 0)
    assert statistics["bypass"] == {"inputs 0 and 1 share memory, and the graph changes one of them": 1}


@only_with_torch("2.13")
def test_torch_serves_the_backward_of_an_operator_as_it_was_before_an_edit(answers: Answers) -> None:
    told = answers.torch["edited_operator"]

    assert _is_hit(told)
    assert told["wrong"] == [8]


def test_ours_misses_and_names_the_function_that_was_edited(answers: Answers) -> None:
    told = answers.ours["edited_operator"]

    assert (told["statistics"]["hit"], told["statistics"]["miss"]) == (0, 1)
    assert "custom_ops changed (wrong::edited.backward" in told["explained"][0]


@only_with_torch("2.13")
def test_torch_runs_an_artifact_outside_the_sizes_that_it_was_compiled_for(answers: Answers) -> None:
    assert answers.torch["outside_guards"]["wrong"] == [16]


def test_ours_misses_where_the_guards_do_not_hold_and_shows_them(answers: Answers) -> None:
    told = answers.ours["outside_guards"]

    assert (told["statistics"]["hit"], told["statistics"]["guard_miss"], told["statistics"]["saved"]) == (0, 1, 1)
    assert "its shape guards do not hold: 9 <= L['t0']" in told["explained"][0]


@only_with_torch("2.13")
def test_torch_loses_what_was_exported_before(answers: Answers) -> None:
    told = answers.torch["exported_twice"]

    assert told["counted"]["autograd_cache_hit"] == 1
    assert told["counted"]["autograd_cache_miss"] == 1


def test_ours_has_all_that_was_ever_compiled(answers: Answers) -> None:
    statistics = answers.ours["exported_twice"]["statistics"]

    assert (statistics["hit"], statistics["miss"]) == (2, 0)
