from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from subprocess import run

import pytest

from tests.matrix.environments import ROOT
from tests.mutants.children import TIMED_OUT, Ended
from tests.mutants.mutator import GUARD, Mutant, find_mutants
from tests.mutants.page import Run, parse_verdicts, render_page
from tests.mutants.run import Results, judge, make_copy, write_mutant
from tests.mutants.sample import choose_mutants, split_count
from tests.mutants.tracing import choose_tests

CODE = "def clip(value, limit):\n    if value > limit:\n        return limit\n    return value\n"
TESTS = """
import subprocess, sys
from holdfast.repo import clipping

def test_large_values_are_clipped_by_a_module_that_processes_import_too():
    assert clipping.clip(9, 5) == 5
    code = "from holdfast.repo import clipping; print(clipping.__file__)"
    found = subprocess.check_output([sys.executable, "-c", code])
    assert found.decode().strip() == clipping.__file__
"""
# Runs as a process of its own: this one has imported `holdfast`.
RUNNER = """
import sys, hypothesis, xdist.plugin
from pathlib import Path
from tests.mutants.children import run_jobs
from tests.mutants.mutator import find_mutants
from tests.mutants.run import judge, plan_job, make_copy, write_mutant
from functools import partial
from dataclasses import replace

folder = Path(sys.argv[1])
source, copy, tests = folder / "src", folder / "copy", str(folder / "test_clipping.py")
make_copy(copy, source)
mutants = find_mutants("repo/clipping.py", (source / "holdfast/repo/clipping.py").read_text())
jobs = [replace(plan_job("control", [tests], {tests: 1.0}), prepare=partial(make_copy, source=source))]
for mutant in mutants[:2]:
    job = plan_job(mutant.becomes, [tests], {tests: 1.0}, mutant)
    jobs.append(replace(job, prepare=partial(write_mutant, mutant=mutant, source=source)))
for job, ended in run_jobs(jobs, [copy]):
    print(job.name, "|", *judge(ended), "|", len(ended.tests))
"""


def make_mutants(package: str = "repo", count: int = 30) -> list[Mutant]:
    lines = [f"def f{number}():\n    a[{number}] = b < c\n    files.sync()\n" for number in range(count)]
    return find_mutants(f"{package}/files.py", "".join(lines))


def test_mutants_that_a_test_notices_are_killed_and_others_survive(tmp_path: Path) -> None:
    package = tmp_path / "src/holdfast/repo"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        folder.joinpath("__init__.py").touch()
    package.joinpath("clipping.py").write_text(CODE, encoding="utf-8")
    tmp_path.joinpath("test_clipping.py").write_text(TESTS, encoding="utf-8")
    ended = run([sys.executable, "-c", RUNNER, tmp_path], cwd=ROOT, check=True, capture_output=True, text=True)
    lines = {name.strip(): rest for name, _, rest in (line.partition("|") for line in ended.stdout.splitlines())}
    killed = lines.pop("False")
    assert killed.startswith(" killed ")
    assert lines == {"control": " survived None | 1", "value >= limit": " survived None | 1"}


def test_a_copy_has_one_mutant_at_a_time_and_none_after_it_is_made_again(tmp_path: Path) -> None:
    source, copy = tmp_path / "src", tmp_path / "copy"
    source.joinpath("holdfast/repo").mkdir(parents=True)
    source.joinpath("holdfast/repo/files.py").write_text("a < b\na + b\n", encoding="utf-8")
    first, second = find_mutants("repo/files.py", "a < b\na + b\n")
    make_copy(copy, source)
    write_mutant(copy, first, source)
    write_mutant(copy, second, source)
    assert copy.joinpath("holdfast/repo/files.py").read_text(encoding="utf-8") == "a < b\n(a - b)\n"
    make_copy(copy, source)
    assert copy.joinpath("holdfast/repo/files.py").read_text(encoding="utf-8") == "a < b\na + b\n"


def test_a_sample_is_the_same_for_the_same_seed_and_a_quarter_drops_guards() -> None:
    mutants = make_mutants()
    sample = choose_mutants(mutants, 1, 40)
    assert sample == choose_mutants(mutants[::-1], 1, 40)
    assert sample != choose_mutants(mutants, 2, 40)
    assert Counter(mutant.kind == GUARD for mutant in sample) == {True: 10, False: 30}
    assert len({mutant.kind for mutant in sample[:10]}) > 1


def test_a_package_has_a_share_of_the_sample_by_its_places() -> None:
    assert split_count(Counter(repo=60, objects=30, snapshot=11), 10) == Counter(repo=6, objects=3, snapshot=1)
    assert split_count(Counter(repo=1, objects=1), 10) == Counter(repo=1, objects=1)


def test_tests_of_the_module_come_first_and_a_few_cases_of_each_before_all() -> None:
    own, other = "tests/unit/repo/test_files_case.py::c", "tests/faults/test_d.py::d"
    cases = [f"tests/faults/test_b.py::test_b[{number}]" for number in range(9)]
    seconds = dict.fromkeys(cases, 0.5) | {own: 1.0, other: 2.0}
    chosen = choose_tests(seconds, "repo/files.py", seconds, 4.0)
    assert chosen[0] == own
    assert set(chosen[1:]) == {*cases[:2], other}


@pytest.mark.parametrize(
    ("status", "outcomes", "expected"),
    [
        (0, ["passed"], ("survived", None)),
        (1, ["passed", "failed"], ("killed", "1")),
        (1, ["timed out"], ("timed out", "0")),
        (TIMED_OUT, ["passed"], ("timed out", None)),
        (4, [], ("killed", None)),
    ],
)
def test_how_pytest_ends_says_what_became_of_a_mutant(
    status: int, outcomes: Sequence[str], expected: tuple[str, str | None]
) -> None:
    tests = {str(number): {"outcome": outcome} for number, outcome in enumerate(outcomes)}
    assert judge(Ended(status, tests, 1.0, Path("output"))) == expected


def test_results_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    results.append(key="a", outcome="survived")
    results.append(key="a", outcome="killed")
    with results.file.open("a", encoding="utf-8") as lines:
        lines.write('{"key": "b", "outc')
    assert results.read() == {"a": {"key": "a", "outcome": "killed"}}


def test_verdicts_are_kept_when_the_page_is_written_again() -> None:
    mutants = make_mutants(count=4)
    outcomes = {mutants[0].key: "survived", mutants[1].key: "not covered"}
    outcomes |= {mutants[2].key: "killed", mutants[3].key: "timed out"}
    counts = {"covered_lines": 8, "num_statements": 9, "covered_branches": 0, "num_branches": 1}
    page = Run("0000000", 1, mutants, outcomes, 99, {"repo/files.py": counts})
    verdicts = parse_verdicts(render_page(page, {}))
    assert verdicts == {mutants[0].key: "open", mutants[1].key: "open"}
    verdicts[mutants[0].key] = "equivalent: nothing reads it"
    text = render_page(page, verdicts)
    assert parse_verdicts(text) == verdicts
    assert "| all | 4 | 1 | 1 | 1 | 1 | 50 % |" in text
    assert "`repo/files.py` 80 %" in text
