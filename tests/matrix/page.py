"""Renders the page on compatibility from the results of all pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tests.kit.capabilities import LACKS
from tests.matrix.results import PairResult
from tests.matrix.selection import CORE, LEFT_OUT, SLOW

_HEAD: Final = """\
`make matrix` creates a virtual environment for each pair of Python and torch below, runs the core suites in it and
writes this page. `make matrix PAIR=3.10-2.6` runs one pair and replaces its rows. The core is everything but the
compile cache and the plug-ins for training frameworks.
"""
_LACKS_HEAD: Final = """\
Holdfast finds out by itself what the installed Python and torch have. Tests of something that they lack are
skipped, and the reason names it.
"""
_OTHER_HEAD: Final = "These tests were skipped for another reason than something that Python or torch lacks."
_SUITES_HEAD: Final = "The core suites are these folders, without their slow tests:"


def render_compatibility(results: Sequence[PairResult]) -> str:
    """Return the text of the page below its title."""
    return "\n".join(
        [
            _HEAD,
            "## What was run\n",
            *_iter_runs(results),
            *_iter_failures(results),
            "\n## What a version lacks\n",
            _LACKS_HEAD,
            *_iter_skips(results, lacks=True),
            "\n## The compile cache\n",
            *_iter_compile_cache(results),
            "\n## Other tests that were skipped\n",
            _OTHER_HEAD + "\n",
            *_iter_skips(results, lacks=False),
            "\n## The core suites\n",
            *_iter_suites(),
            "",
        ]
    )


def _iter_runs(results: Sequence[PairResult]) -> Iterator[str]:
    yield "| pair | Python | torch | numpy | passed | failed | skipped |\n|---|---|---|---|---|---|---|"
    for result in results:
        found = result.outcome
        numbers = f"{found.passed:,} | {len(found.failed)} | {sum(found.skipped.values())}"
        yield f"| {result.pair} | {result.python} | {result.torch} | {result.numpy} | {numbers} |"


def _iter_failures(results: Sequence[PairResult]) -> Iterator[str]:
    for result in results:
        if result.outcome.failed:
            yield f"\nFailed with {result.pair}:\n"
            yield from (f"- `{name}`" for name in result.outcome.failed)


def _iter_skips(results: Sequence[PairResult], *, lacks: bool) -> Iterator[str]:
    """Yield a table of the reasons that a version causes, or of the others: how many tests each pair skipped for it."""
    counts: Mapping[str, dict[str, int]] = {
        reason: {result.pair: result.outcome.skipped.get(reason, 0) for result in results}
        for reason in sorted({reason for result in results for reason in result.outcome.skipped})
        if reason.startswith(LACKS) == lacks
    }
    if not counts:
        yield "None."
        return
    pairs = [result.pair for result in results]
    yield f"| reason | {' | '.join(pairs)} |\n|---|{'---|' * len(pairs)}"
    for reason, by_pair in counts.items():
        yield f"| {_escape(reason)} | {' | '.join(str(by_pair[pair] or '') for pair in pairs)} |"


def _iter_compile_cache(results: Sequence[PairResult]) -> Iterator[str]:
    yield "| pair | compile cache |\n|---|---|"
    for result in results:
        yield f"| {result.pair} | {_escape(result.compile_cache) or 'is used'} |"


def _iter_suites() -> Iterator[str]:
    yield f"{_SUITES_HEAD} {', '.join(f'`{path}`' for path in CORE)}."
    yield f"The slow tests of {', '.join(f'`{path}`' for path in SLOW)} are run as well. Not part of them:\n"
    yield "| left out | why |\n|---|---|"
    yield from (f"| `{path}` | {why} |" for path, why in LEFT_OUT.items())


def _escape(text: str) -> str:
    """Return a text that may stand in a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
