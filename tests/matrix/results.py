"""The result of the core suites with one pair of Python and torch, as a JSON file in `tests/matrix/results`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tests.matrix.environments import order_of_pair

FOLDER: Final = "tests/matrix/results"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the tests of one run of pytest."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    """The tests that failed, or whose file could not be imported."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> number of tests that were skipped for it."""


@dataclass(frozen=True, slots=True)
class PairResult:
    """What was run, and what became of it."""

    pair: str
    python: str
    torch: str
    numpy: str
    compile_cache: str
    """Why the compile cache is bypassed with this torch; empty if it is used."""
    outcome: Outcome


def read_report(file: Path) -> Outcome:
    """Return the outcome that a JUnit report of pytest describes."""
    passed, failed, skipped = 0, list[str](), Counter[str]()
    for case in ElementTree.parse(file).iter("testcase"):
        found = {child.tag: child for child in case}
        if "failure" in found or "error" in found:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in found:
            skipped[found["skipped"].get("message", "")] += 1
        else:
            passed += 1
    return Outcome(passed, sorted(set(failed)), dict(sorted(skipped.items())))


def add_outcomes(outcomes: Iterable[Outcome]) -> Outcome:
    """Return what became of the tests of several runs together."""
    runs = list(outcomes)
    skipped = sum((Counter(run.skipped) for run in runs), Counter[str]())
    failed = sorted(name for run in runs for name in run.failed)
    return Outcome(sum(run.passed for run in runs), failed, dict(sorted(skipped.items())))


def write_result(root: Path, result: PairResult) -> Path:
    """Write the result of a pair, in place of its last one; return the path of the file."""
    file = root / FOLDER / f"{result.pair}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(result), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def read_results(root: Path) -> list[PairResult]:
    """Return the results of all pairs that were run, lowest Python first."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in (root / FOLDER).glob("*.json")]
    results = [PairResult(**{**value, "outcome": Outcome(**value["outcome"])}) for value in found]
    return sorted(results, key=lambda result: order_of_pair(result.pair))
