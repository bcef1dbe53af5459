"""Maps each workload to the section of the documentation that explains its time and shows its figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from bench.kit.measure import Result

PARTS: Final = "processor-and-disk"
_BY_SUITE: Final = {
    "limits": "hashing",
    "where": PARTS,
    "check": "check",
    "save": "entries",
    "peak": "memory",
    "cli": "command-line",
    "growth": "many-snapshots",
    "scale": "large-states",
    "reread": "loading-again",
}
_BY_WORKLOAD: Final = {
    "first save": "first-save",
    "save again, unchanged, change hints": "change-hints",
    "save again, unchanged": "save-again",
    "save again": "changed-state",
    "stored by": "stored-bytes",
    "blocked by": "asynchronous-saves",
    "cold load": "cold-load",
    'warm load, verify="fast"': "fast-load",
    "warm load": "warm-load",
    "one tensor": "parts",
    "a slice": "parts",
    "open and list": "parts",
    "open as a map": "parts",
}
_SMALL: Final = "small-tensors"
ON_REQUEST: Final = frozenset(
    {
        "capture",
        "codecs",
        "compile",
        "deltas",
        "device_digest",
        "diff_runs",
        "exports",
        "follow",
        "imports",
        "mirror",
        "objects",
    }
    | {"planning", "put", "query", "recording", "reuse"}
)
"""Suites that run only if they are asked for, and that another page explains: they take long, with separate results.
DCP plans for minutes with a thousand ranks, and models take half a minute to compile."""
ANCHORS: Final = frozenset({*_BY_SUITE.values(), *_BY_WORKLOAD.values(), _SMALL})


def find_section(suite: str, workload: str) -> str:
    """Return the anchor of the section that a row belongs to."""
    if suite in _BY_SUITE:
        return _BY_SUITE[suite]
    if suite in ON_REQUEST:
        return ""
    if workload.endswith(" small"):
        return _SMALL
    return next(section for beginning, section in _BY_WORKLOAD.items() if workload.startswith(beginning))


def explain(suite: str, results: Iterable[Result]) -> list[Result]:
    """Return the rows of a suite, each with the anchor of its section."""
    return [replace(result, why=find_section(suite, result.workload)) for result in results]
