"""Makes small mistakes in the core, one at a time, and records on a page which of them no test notices.

Results are kept in .venv/mutants as they come: a second start goes on where the first ended.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.matrix.environments import ROOT
from tests.mutants.children import TIMED_OUT, Ended, Job, preload, run_jobs
from tests.mutants.mutator import Mutant, apply_mutant, find_mutants
from tests.mutants.page import OUTCOMES, PAGE, Run, parse_verdicts, render_page
from tests.mutants.sample import choose_mutants
from tests.mutants.tracing import TestMap, choose_tests, digest_files, list_folders, list_modules, locate, trace_folders

SEED: Final = 20
COUNT: Final = 320
BUDGET_S: Final = 10.0
_SOURCE: Final = ROOT / "src"
_LIMIT_S: Final = 60.0
_FACTOR: Final = 8.0
_CONTROLS: Final = 20
_FEW: Final = 12


class NotRun(Exception):
    """The tests fail without a mutant."""


@dataclass(frozen=True, slots=True)
class Results:
    """A file with one line of JSON for each mutant that ran; the last line of a mutant counts."""

    file: Path

    def append(self, **row: str | float | None) -> None:
        """Add a line."""
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    def read(self) -> dict[str, dict[str, Any]]:
        """Return key -> line; a line that a crash has cut off is left out."""
        rows = {}
        for line in self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            rows[row["key"]] = row
        return rows


def make_copy(copy: Path, source: Path = _SOURCE) -> None:
    """Make a copy of the source with compiled modules, or undo what mutants changed in it."""
    if not copy.exists():
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(str(copy), quiet=1)
    for module in source.rglob("*.py"):
        target = copy / module.relative_to(source)
        if target.read_bytes() != module.read_bytes():
            # With its time of modification, so that the compiled module is valid again.
            shutil.copy2(module, target)


def write_mutant(copy: Path, mutant: Mutant, source: Path = _SOURCE) -> None:
    """Make the change in a copy of the source, and no other."""
    make_copy(copy, source)
    file = copy / "holdfast" / mutant.module
    file.write_text(apply_mutant(file.read_text(encoding="utf-8"), mutant), encoding="utf-8")


def plan_job(name: str, tests: Sequence[str], seconds: Mapping[str, float], mutant: Mutant | None = None) -> Job:
    """Return the job that runs tests with a mutant, until one fails; without one, all of them."""
    slowest = max((seconds[test] for test in tests), default=0.0)
    arguments = [f"--timeout={_LIMIT_S + _FACTOR * slowest:.0f}", *tests]
    limit_s = 2 * _LIMIT_S + _FACTOR * sum(seconds[test] for test in tests)
    if mutant is None:
        return Job(name, arguments, limit_s, prepare=make_copy)
    return Job(name, ["-x", *arguments], limit_s, prepare=partial(write_mutant, mutant=mutant))


def judge(ended: Ended) -> tuple[str, str | None]:
    """Return what became of a mutant, and the test that noticed it."""
    test = ended.failed[0] if ended.failed else None
    if ended.status == TIMED_OUT or (test and ended.tests[test]["outcome"] == "timed out"):
        return "timed out", test
    # Anything but 0 and 1 means that pytest could not even start: the changed module cannot be imported.
    return ("survived" if ended.status == 0 else "killed"), test


def run_control(tests: Sequence[str], seconds: Mapping[str, float], copy: Path) -> list[str]:
    """Run tests on an unchanged copy, and return those that fail."""
    ((_, ended),) = run_jobs([plan_job("control", tests, seconds)], [copy])
    if ended.status not in (0, 1) or len(ended.tests) < len(tests):
        raise NotRun(f"the control ended with {ended.status}:\n{ended.output.read_text(encoding='utf-8')[-3000:]}")
    return ended.failed


def run_mutants(
    mutants: Sequence[Mutant], traced: TestMap, copies: Sequence[Path], results: Results, budget_s: float
) -> None:
    """Run the mutants that have no valid result: a survivor is run again if other tests are chosen for it."""
    rows = {key: row for key, row in results.read().items() if row["outcome"] in OUTCOMES}
    chosen: dict[str, list[str]] = {}

    def plan() -> Iterator[Job]:
        for mutant in mutants:
            found = traced.find_tests(mutant.module, mutant.lines)
            tests = choose_tests(found, mutant.module, traced.cpu_seconds, budget_s)
            if len(found) <= _FEW:
                tests = list(dict.fromkeys([*tests, *traced.find_rank_tests(mutant.module)]))
            chosen[mutant.key] = tests
            row = rows.get(mutant.key)
            if row and (row["outcome"] in ("killed", "timed out") or row["tests"] == _digest_tests(tests)):
                continue
            if tests:
                yield plan_job(mutant.key, tests, traced.seconds, mutant)
            else:
                results.append(key=mutant.key, outcome="not covered", test=None, tests=_digest_tests(()), seconds=0.0)

    for job, ended in run_jobs(plan(), copies):
        outcome, test = judge(ended)
        tests, seconds = chosen[job.name], round(ended.seconds, 1)
        results.append(key=job.name, outcome=outcome, test=test, tests=_digest_tests(tests), seconds=seconds)
        print(f"{outcome} in {seconds} s, {len(tests)} tests: {job.name}", flush=True)


def _digest_tests(tests: Sequence[str]) -> str:
    names = {name.partition("::")[0] for name in tests}
    return f"{digest_files(ROOT / name for name in names)} {len(tests)}"


def doubt_killers(traced: TestMap, copy: Path, results: Results) -> None:
    """Run the tests that killed mutants on an unchanged copy; what a test that fails there has killed is run again."""
    rows = [row for row in results.read().values() if row["outcome"] == "killed" and row["test"] in traced.seconds]
    killers = sorted({row["test"] for row in rows})
    for name in run_control(killers, traced.seconds, copy) if killers else ():
        print(f"fails without a mutant as well: {name}")
        for row in rows:
            if row["test"] == name:
                results.append(**row | {"outcome": "doubtful"})


def write_page(run: Run) -> None:
    """Rewrite the page; verdicts stay."""
    page = ROOT / PAGE
    verdicts = parse_verdicts(page.read_text(encoding="utf-8")) if page.exists() else {}
    page.write_text(render_page(run, verdicts), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Run what has no result yet, and rewrite the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how many processes run tests (default %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random sample (default %(default)s)")
    parser.add_argument("--count", type=int, default=COUNT, help="how many mutants (default %(default)s)")
    text = "CPU seconds for the tests of a mutant, by their trace; with more, survivors run again (default %(default)s)"
    parser.add_argument("--budget", type=float, default=BUDGET_S, help=text)
    parser.add_argument("--first", type=int, help="run only the first mutants of the sample")
    parser.add_argument("--page-only", action="store_true", help="run no mutant")
    options = parser.parse_args(arguments)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    state = ROOT / ".venv/mutants" / digest_files(_SOURCE.rglob("*.py"))
    state.mkdir(parents=True, exist_ok=True)
    copies = [state / f"copy{number}" for number in range(options.jobs)]
    folders = list_folders()
    if not options.page_only:
        preload()
        for copy in copies:
            make_copy(copy)
        trace_folders(folders, copies, state)
    traced, results = TestMap(folders, state), Results(state / "results.jsonl")
    found = [
        mutant
        for module in list_modules()
        for mutant in find_mutants(module, (_SOURCE / "holdfast" / module).read_text(encoding="utf-8"))
    ]
    mutants = choose_mutants(found, options.seed, options.count)
    print(f"seed {options.seed}: {len(mutants)} of {len(found)} mutants", flush=True)
    if not options.page_only:
        tests = sorted(traced.seconds)
        if failed := run_control(tests[:: max(1, len(tests) // _CONTROLS)], traced.seconds, copies[0]):
            raise NotRun(f"tests fail without a mutant: {', '.join(failed)}")
        run_mutants(mutants[: options.first], traced, copies, results, options.budget)
        doubt_killers(traced, copies[0], results)
    outcomes = {key: row["outcome"] for key, row in results.read().items() if row["outcome"] in OUTCOMES}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    missing = [folder for folder in folders if not locate(folder, state)[1].exists()]
    commit, coverage = head.stdout.strip(), traced.measure_coverage()
    write_page(Run(commit, options.seed, mutants, outcomes, len(found), coverage, missing))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except NotRun as error:
        sys.exit(f"mutants: {error}")
