"""A graph that one process compiled is loaded by another, at another path, without a compiler, with equal results."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.compile_cache.processes import Place, Trial, finish_all, try_cases

QUICK: Final = ("train_mlp",)
FAST_START: Final = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}
"""Torch takes the vector instructions of the CPU as given, instead of compiling a program to test each of them."""
SLOW: Final = (
    "infer_mlp",
    "many_sizes",
    "train_block",
    "train_cnn",
    "train_tied",
    "train_dropout",
    "train_broken",
    "train_autocast",
    "infer_inference_mode",
    "infer_autotuned",
    "train_restart",
    "mutated_input",
    "autograd_function",
    "train_optimizer",
)
GRAPHS: Final = {"train_broken": 2, "train_optimizer": 2}
"""Case -> number of graphs, if there are several."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return try_cases(tmp_path_factory.mktemp("quick"), QUICK, FAST_START, in_one_process=True)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return try_cases(tmp_path_factory.mktemp("slow"), SLOW)


def _verify(trial: Trial, case: str) -> None:
    graphs = GRAPHS.get(case, 1)
    plain, cold, warm = (outcome.cases[case] for outcome in (trial.plain, trial.cold, trial.warm))
    assert (cold["miss"], cold["saved"], cold["hit"]) == (graphs, graphs, 0), cold
    assert (warm["miss"], warm["saved"], warm["hit"]) == (0, 0, graphs), warm
    assert not any(outcome[what] for outcome in (cold, warm) for what in ("bypass", "not_saved", "corrupt", "refused"))
    assert cold["digest"] == plain["digest"]
    assert warm["digest"] == plain["digest"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", QUICK)
def test_a_hit_after_a_miss_equals_plain_compiling_bit_for_bit(quick: Trial, case: str) -> None:
    _verify(quick, case)


@pytest.mark.timeout(600)
def test_a_copied_store_serves_where_there_is_no_compiler(quick: Trial) -> None:
    assert quick.cold.compiler_runs > 0
    assert quick.warm.compiler_runs == 0


@pytest.mark.timeout(600)
def test_a_hit_does_not_import_the_compiler(quick: Trial) -> None:
    assert all(case["imported_compiler"] for case in quick.cold.cases.values())
    assert not any(case["imported_compiler"] for case in quick.warm.cases.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SLOW)
def test_every_kind_of_graph_is_served_bit_for_bit(slow: Trial, case: str) -> None:
    _verify(slow, case)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_compiler_runs_for_any_kind_of_graph(slow: Trial) -> None:
    assert slow.cold.compiler_runs > 0
    assert slow.warm.compiler_runs == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_restart_passes_through_and_is_counted(slow: Trial) -> None:
    assert sum(slow.cold.cases["train_restart"]["restart"].values()) == 1
    assert sum(slow.warm.cases["train_restart"]["restart"].values()) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_names_and_other_sizes_are_served_by_the_same_entry(tmp_path: Path) -> None:
    place, store = Place(tmp_path, FAST_START), tmp_path / "store"
    place.run(["many_sizes"], store)

    started = [place.start(["other_sizes"], None), place.start(["other_sizes"], store, has_compiler=False)]
    plain, warm = finish_all(started)

    told: dict[str, Any] = warm.cases["other_sizes"]
    assert (told["hit"], told["miss"]) == (1, 0)
    assert told["digest"] == plain.cases["other_sizes"]["digest"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prefetched_artifacts_are_served_from_memory(quick: Trial, tmp_path: Path) -> None:
    keys = quick.cold.cases["train_mlp"]["used"]

    warm = Place(tmp_path, FAST_START).run(["train_mlp"], quick.store, has_compiler=False, prefetch=keys)

    assert warm.cases["train_mlp"]["hit"] == 1
    assert warm.cases["train_mlp"]["digest"] == quick.plain.cases["train_mlp"]["digest"]
    assert warm.cases["train_mlp"]["seconds"]["find"] < 0.005
