"""Runs the core suites with pairs of Python and torch, and rewrites the page on compatibility: `make matrix`.

`python -m tests.matrix.run 3.10-2.6` runs one pair, without a pair it runs all of them, one after another. Arguments
after `--` are for pytest and replace the core suites; such a run is not recorded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from docs.generate import COMPATIBILITY, render_pages
from tests.matrix.environments import ROOT, CannotBuild, build_environment, find_place, list_pairs
from tests.matrix.results import Outcome, PairResult, add_outcomes, read_report, write_result
from tests.matrix.selection import CORE, LEFT_OUT, SLOW

# The options of `make test`. No cache: the environments share the checkout.
_PYTEST: Final = ("-m", "pytest", "-q", "--hypothesis-profile=ci", "-p", "no:cacheprovider", "--tb=short")
_DESCRIBE: Final = """
import json, platform, numpy, torch
from holdfast.compile_cache.inductor import find_obstacle
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__,
                  "compile_cache": find_obstacle()}))
"""


class NotRun(Exception):
    """The suites were not run to the end."""


def plan_runs(jobs: str) -> list[list[str]]:
    """Return the arguments of each run of pytest that the core suites need."""
    left_out = [f"--ignore={path}" for path in LEFT_OUT if path.startswith(CORE)]
    shared = ["-n", jobs, "--maxprocesses", "4", "--dist", "worksteal"]
    default = [*CORE, *left_out, "-m", "not slow", "--continue-on-collection-errors", *shared]
    return [default, [*SLOW, "-m", "slow"]]


def run_pair(pair: str, jobs: str) -> PairResult:
    """Run the core suites with one pair; return what became of them."""
    python = build_environment(pair, find_place())
    with tempfile.TemporaryDirectory() as folder:
        outcome = add_outcomes(iter_outcomes(python, plan_runs(jobs), Path(folder)))
    return PairResult(pair=pair, **_describe(python), outcome=outcome)


def iter_outcomes(python: Path, runs: Sequence[Sequence[str]], folder: Path) -> Iterator[Outcome]:
    """Run pytest with each of these arguments, and yield what became of the tests; raises NotRun."""
    for number, arguments in enumerate(runs):
        report = folder / f"{number}.xml"
        status = _run_pytest(python, [*arguments, f"--junitxml={report}"])
        # 0: all passed; 1: some failed. Otherwise pytest did not get to the end, and a report would be a part of one.
        if status not in (0, 1):
            raise NotRun(f"pytest ended with status {status}, so nothing was recorded; its output is above")
        yield read_report(report)


def _run_pytest(python: Path, arguments: Sequence[str]) -> int:
    return subprocess.run([str(python), *_PYTEST, *arguments], cwd=ROOT, check=False).returncode


def _describe(python: Path) -> dict[str, Any]:
    said = subprocess.run([str(python), "-c", _DESCRIBE], check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(said)
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the pairs that are named, record their results and rewrite the page; return 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.run", description=__doc__)
    parser.add_argument("pairs", metavar="PAIR", nargs="*", help="such as 3.10-2.6 (default: all)")
    parser.add_argument("--jobs", default="auto", help="how many processes run tests (default %(default)s)")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, for_pytest = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    has_failed = False
    for pair in options.pairs or list_pairs():
        print(f"pair {pair} in {find_place() / pair}", flush=True)
        if for_pytest:
            has_failed |= _run_pytest(build_environment(pair, find_place()), for_pytest) != 0
            continue
        result = run_pair(pair, options.jobs)
        print(f"recorded in {write_result(ROOT, result).relative_to(ROOT)}")
        (ROOT / COMPATIBILITY).write_text(render_pages(ROOT)[COMPATIBILITY], encoding="utf-8")
        has_failed |= bool(result.outcome.failed)
    return int(has_failed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (CannotBuild, NotRun) as error:
        sys.exit(f"make matrix: {error}")
