"""Renders the page with the results of a mutation run, and reads the verdicts on its survivors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tests.mutants.mutator import KINDS, Mutant
from tests.mutants.tracing import PACKAGES, SUITES

PAGE: Final = "tests/mutants/last_run.md"
OUTCOMES: Final = ("killed", "timed out", "survived", "not covered")
OPEN: Final = "open"
_GOAL: Final = 95
_LOW: Final = 90
_ABOUT: Final = f"""# The last mutation run

`make mutants` makes small mistakes in `src/holdfast/{{{",".join(PACKAGES)}}}`, one at a time, runs the tests
that execute the changed line, and rewrites this page. A mutant that no test notices survives: then a test is missing,
or the change makes no difference. Verdicts are written by hand and kept from run to run: "equivalent: why",
"speed only: why", "test added: name", "slow tests kill it: which", or "{OPEN}".

The mutants are a random sample; a quarter of it drops a call that syncs, renews, verifies, checks, closes, locks,
validates or flushes. Tests that are slow do not run. The others are those of the files in tests/unit itself, and of
{", ".join(SUITES[:8])},
{", ".join(SUITES[8:])}.
Of those that execute the line, the cheapest run, the ones in the file of the module first. Lines that are executed only
in processes that tests start or fork are not traced: in `distributed`, if few tests execute a line, a dozen from
`tests/distributed` run as well, and elsewhere such lines count as not covered. A mutant has timed out if its tests take
many times as long as without it, which counts as killed."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a page shows: `outcomes` of the mutants that ran, from `places`, and what `measure_coverage` returned."""

    commit: str
    seed: int
    mutants: Sequence[Mutant]
    outcomes: Mapping[str, str]
    places: int
    coverage: Mapping[str, Mapping[str, int]]
    missing: Sequence[str] = ()
    """Folders of tests that did not run."""


def render_page(run: Run, verdicts: Mapping[str, str]) -> str:
    """Return the page, with verdicts of an earlier page."""
    done = [mutant for mutant in run.mutants if mutant.key in run.outcomes]
    counts = f"{len(done)} of {len(run.mutants)} mutants ran, chosen from {run.places}"
    head = f"Commit {run.commit}, seed {run.seed}: {counts}."
    if run.missing:
        head += (
            f"\n**Not complete**: no test of {', '.join(run.missing)} was traced or run, so some survivors are none."
        )
    parts = [_ABOUT, head, _render_counts("package", PACKAGES, done, run.outcomes, lambda one: one.package)]
    parts.append(_render_counts("kind", KINDS, done, run.outcomes, lambda one: one.kind))
    parts.append(_render_coverage(run.coverage))
    for title, outcome in (("Survivors", "survived"), ("Not covered", "not covered")):
        left = sorted(mutant.key for mutant in done if run.outcomes[mutant.key] == outcome)
        lines = [f"- {key}\n  {verdicts.get(key, OPEN)}" for key in left]
        kinds = Counter(verdicts.get(key, OPEN).partition(":")[0] for key in left)
        summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(kinds.items()))
        parts.append(f"## {title}\n\n{summary or 'None'}.\n\n" + "\n".join(lines))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def parse_verdicts(text: str) -> dict[str, str]:
    """Return key -> verdict of a page."""
    pairs = pairwise(text.splitlines())
    return {line[2:]: below.strip() for line, below in pairs if line.startswith("- `") and below.startswith("  ")}


def _render_counts(
    title: str,
    names: Sequence[str],
    mutants: Sequence[Mutant],
    outcomes: Mapping[str, str],
    group_of: Callable[[Mutant], str],
) -> str:
    counts = Counter((group_of(mutant), outcomes[mutant.key]) for mutant in mutants)
    lines = [f"| {title} | mutants | {' | '.join(OUTCOMES)} | score |", "|---" * (len(OUTCOMES) + 3) + "|"]
    for name in ("all", *names):
        row = [sum(counts[one, outcome] for one in ([name] if name != "all" else names)) for outcome in OUTCOMES]
        score = f"{100 * (row[0] + row[1]) / sum(row):.0f} %" if any(row) else ""
        lines.append(f"| {name} | {sum(row)} | {' | '.join(map(str, row))} | {score} |")
    return "\n".join(lines)


def _render_coverage(coverage: Mapping[str, Mapping[str, int]]) -> str:
    lines = [
        "## Coverage",
        f"Of the same tests, as coverage counts lines and branches; the goal is {_GOAL} % of both together.",
        "| package | lines | branches | both |\n|---|---|---|---|",
    ]
    for package in PACKAGES:
        found = [counts for module, counts in coverage.items() if module.startswith(f"{package}/")]
        lines[-1] += f"\n| {package} | {' | '.join(f'{share:.1f} %' for share in _measure(found))} |"
    low = sorted((_measure([counts])[2], module) for module, counts in coverage.items())
    names = ", ".join(f"`{module}` {share:.0f} %" for share, module in low if share < _LOW)
    lines.append(f"Files below {_LOW} %: {names or 'none'}.")
    return "\n\n".join(lines)


def _measure(found: Sequence[Mapping[str, int]]) -> tuple[float, float, float]:
    lines, all_lines, branches, all_branches = (
        sum(counts[name] for counts in found)
        for name in ("covered_lines", "num_statements", "covered_branches", "num_branches")
    )
    return (
        100 * lines / max(all_lines, 1),
        100 * branches / max(all_branches, 1) if all_branches else 100.0,
        100 * (lines + branches) / (all_lines + all_branches) if all_lines else 100.0,
    )
