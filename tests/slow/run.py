"""Runs slow tests: all of them, recorded on a page (`make test-slow`), or the slice of a commit (`make test-slice`).

A test that fails is run once more alone: if it passes then, it is reported as unstable and the run goes on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.matrix.environments import ROOT
from tests.matrix.results import read_report
from tests.slow.record import PAGE, FolderRun, Record, parse_page, read_seconds, render_page, replace_folder
from tests.slow.slices import choose_slice, plan_slices

SLICE_S: Final = 960.0
"""Seconds of a slice in one process: eight minutes for two."""
PART_S: Final = 300.0

_NO_TESTS: Final = 5
"""The exit status of pytest if it selected no test."""


class NotRun(Exception):
    """The tests were not run to the end."""


@dataclass(frozen=True, slots=True)
class SlowRun:
    """What became of some slow tests."""

    passed: int
    failed: Sequence[str]
    unstable: Sequence[str]
    skipped: Mapping[str, int]
    seconds: Mapping[str, float]
    minutes: float


def list_tests(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return file -> names of the slow tests below some paths."""
    command = [*_pytest(), "-q", "--collect-only", "-m", "slow", *paths]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode not in (0, _NO_TESTS):
        raise NotRun(f"pytest could not collect the slow tests:\n{done.stdout}{done.stderr}")
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for line in done.stdout.splitlines():
        file, separator, _ = line.partition("::")
        if separator and file.endswith(".py"):
            tests[file].append(line)
    return dict(tests)


def run_tests(arguments: Sequence[str], jobs: str) -> SlowRun:
    """Run the slow tests that pytest selects with these arguments, and once more alone those that fail."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        selected = Path(folder, "tests")
        selected.write_text("\n".join(arguments), encoding="utf-8")
        common = ["-m", "slow", "-o", f"cache_dir={folder}/cache", "-o", "junit_family=xunit1", f"@{selected}"]
        first, second = Path(folder, "first.xml"), Path(folder, "second.xml")
        _run(["-n", jobs, "--maxprocesses", "4", "--dist", "worksteal", f"--junitxml={first}", *common])
        outcome, seconds = read_report(first), read_seconds(first)
        unstable: list[str] = []
        failed = outcome.failed
        if failed:
            print(f"{len(failed)} failed: once more, alone", flush=True)
            _run(["--last-failed", "--last-failed-no-failures=none", f"--junitxml={second}", *common])
            still = set(read_report(second).failed)
            unstable = [name for name in failed if name not in still]
            failed = sorted(still)
    minutes = (time.monotonic() - start) / 60
    return SlowRun(outcome.passed, failed, unstable, outcome.skipped, seconds, minutes)


def _run(arguments: Sequence[str]) -> None:
    status = subprocess.run([*_pytest(), "-q", *arguments], cwd=ROOT, check=False).returncode
    # 0: all passed; 1: some failed. Otherwise pytest did not get to the end.
    if status not in (0, 1, _NO_TESTS):
        raise NotRun(f"pytest ended with status {status}; its output is above")


def _pytest() -> list[str]:
    return [sys.executable, "-m", "pytest", "--hypothesis-profile=ci-slow"]


def run_whole(folders: Sequence[str], jobs: str) -> int:
    """Run the slow tests of these folders, record each folder when it has ended; return 1 if a test failed."""
    has_failed = False
    for folder in folders or _list_folders():
        print(f"slow tests of {folder}", flush=True)
        done = run_tests([folder], jobs)
        run = FolderRun(
            passed=done.passed,
            failed=len(done.failed),
            unstable=len(done.unstable),
            skipped=sum(done.skipped.values()),
            minutes=done.minutes,
            commit=_describe_commit(),
        )
        page = ROOT / PAGE
        record = parse_page(page.read_text(encoding="utf-8")) if page.exists() else Record()
        page.write_text(render_page(replace_folder(record, folder, run, done.seconds)), encoding="utf-8")
        _print_run(done)
        has_failed |= bool(done.failed)
    return int(has_failed)


def _list_folders() -> list[str]:
    """Return the folders that have slow tests; those of tests/unit apart, and so its files."""
    files = list_tests(["tests"])
    return sorted({"/".join(file.split("/")[: 3 if file.startswith("tests/unit/") else 2]) for file in files})


def run_slice(number: int | None, jobs: str) -> int:
    """Run one slice of the slow tests, that of the commit unless it is given; return 1 if a test failed."""
    record = parse_page((ROOT / PAGE).read_text(encoding="utf-8"))
    slices = plan_slices(list_tests(["tests"]), record.seconds, slice_s=SLICE_S, part_s=PART_S)
    if number is None:
        number = choose_slice(_git("rev-parse", "HEAD"), len(slices)) + 1
    if not 1 <= number <= len(slices):
        raise NotRun(f"slice {number} does not exist: there are {len(slices)}")
    tests = slices[number - 1]
    print(f"slice {number} of {len(slices)}: {len(tests)} of {sum(map(len, slices))} slow tests", flush=True)
    done = run_tests(tests, jobs)
    _print_run(done)
    return int(bool(done.failed))


def _print_run(done: SlowRun) -> None:
    for name in done.unstable:
        print(f"unstable: {name} failed, and passed alone")
    for name in done.failed:
        print(f"failed twice: {name}")
    print(f"{done.passed} passed, {len(done.failed)} failed, {len(done.unstable)} unstable, in {done.minutes:.1f} min")
    sys.stdout.flush()


def _describe_commit() -> str:
    changes = [line for line in _git("status", "--porcelain").splitlines() if not line.endswith(PAGE)]
    return _git("rev-parse", "--short", "HEAD") + ("+" if changes else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments name; return 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.slow.run", description=__doc__)
    parser.add_argument("--jobs", default="auto", help="how many processes run tests (default %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    whole = commands.add_parser("whole", help="run all slow tests, and record them")
    whole.add_argument("folders", metavar="FOLDER", nargs="*", help="such as tests/faults (default: all)")
    part = commands.add_parser("slice", help="run the slice of this commit")
    part.add_argument("--number", type=int, help="run this slice instead, from 1 on")
    options = parser.parse_args(arguments)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if options.command == "whole":
        return run_whole(options.folders, options.jobs)
    return run_slice(options.number, options.jobs)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except NotRun as error:
        sys.exit(f"slow tests: {error}")
