"""What changes an answer changes the key, or takes it away: a search over places of code and ways to reach a value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.unit.compile_cache.mutations import MUTATIONS, QUICK, Mutation, judge

_ROOT: Final = Path(__file__).parents[3]
_TIMEOUT_S: Final = 3000


def run(what: str, mutations: Sequence[Mutation], folder: Path) -> dict[str, dict[str, Any]]:
    """Return what both versions of each mutation told, by name."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.compile_cache.mutation_runner", what, str(folder)],
        input="".join(f"{mutation.name}\n" for mutation in mutations),
        env=environment | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    told = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
    return {each["name"]: each for each in told}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run("keys", QUICK, tmp_path_factory.mktemp("keys"))


@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize("mutation", QUICK, ids=lambda mutation: mutation.name)
def test_what_changes_an_answer_changes_the_key(keys: dict[str, dict[str, Any]], mutation: Mutation) -> None:
    told = keys[mutation.name]

    assert judge(mutation, told["before"], told["after"]) == []


@pytest.mark.slow  # a minute and more: each version is traced twice in a process of its own
@pytest.mark.timeout(_TIMEOUT_S)
def test_every_mutation_changes_the_answer_of_aot_eager_and_the_key(tmp_path: Path) -> None:
    told = run("answers", MUTATIONS, tmp_path)

    wrong = {each.name: judge(each, told[each.name]["before"], told[each.name]["after"]) for each in MUTATIONS}

    assert {name: complaints for name, complaints in wrong.items() if complaints} == {}


def test_the_search_is_wide_enough() -> None:
    assert len({mutation.name for mutation in QUICK}) >= 120
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 200
    assert len({mutation.place.name for mutation in QUICK}) >= 16


def test_a_stale_key_and_a_stale_answer_are_reported() -> None:
    mutation = QUICK[0]
    fresh, stale = {"key": "a", "eager": [[2.0]]}, {"key": "a", "eager": [[5.0]]}

    assert judge(mutation, fresh, stale) == ["stale: both versions have one key"]
    assert judge(mutation, fresh, {**stale, "key": "b"}) == []
    assert judge(mutation, fresh, {**stale, "key": "b", "eager": [[2.0]]}) == [
        "the number does not count, so that this tests nothing"
    ]
    assert judge(mutation, fresh, {"reason": "odd", "eager": [[5.0]]}) == ["it could be cached: odd"]
    assert judge(mutation, fresh, {**stale, "key": "b", "answer": [[2.0]]}) == ["[[2.0]] for [[5.0]]"]
