"""Answers about recorded runs: their list, and the report that compares two of them."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.capture.compare.compare import DiffOptions, diff_runs
from holdfast.capture.report.html import make_policy, render_html
from holdfast.capture.report.report import make_report
from holdfast.capture.stored.described import describe_run
from holdfast.capture.stored.runs import iter_runs, read_run
from holdfast.json_text import Json
from holdfast.repo.format.layout import natural_order
from holdfast.repo.handle.repository import Repository


@dataclass(frozen=True, slots=True)
class RunComparison:
    """What the comparison of two runs found, and the page that shows it."""

    headline: str
    is_match: bool
    page: bytes
    policy: str
    """Its content security policy."""


def list_runs(repo: Repository) -> list[Json]:
    """Return every recorded run, as `holdfast run ls --json` prints it."""
    found = sorted(iter_runs(repo), key=lambda facts: natural_order(facts.name))
    return [describe_run(facts) for facts in found]


def compare_runs(repo: Repository, a: str, b: str) -> RunComparison:
    """Compare two runs with the tolerances of torch.testing, and render the page of `holdfast run report`."""
    first, second = read_run(repo, a), read_run(repo, b)
    diff = diff_runs(first, second, options=DiffOptions(budget_bytes=repo.budget_bytes))
    report = make_report(first, second, diff, tolerance="Tolerance: torch.testing's table for each dtype.")
    return RunComparison(diff.headline, diff.is_match, render_html(report), make_policy())
