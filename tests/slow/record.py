"""The last run of all slow tests, as a page that a person reads and from which `make test-slice` takes durations."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

PAGE: Final = "tests/slow/last_run.md"

_INTRO: Final = """# The last run of all slow tests

`make test-slow` runs them by folder and rewrites this page; `make test-slice` reads the durations of files here.
A test that failed was run once more alone: if it passed then, it is unstable.
"""
_FOLDER: Final = re.compile(r"\| `([\w/]+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([^|]+?) \|")
_FILE: Final = re.compile(r"\| `([\w/]+\.py)` \| ([\d.]+) \|")


@dataclass(frozen=True, slots=True)
class FolderRun:
    """What became of the slow tests of one folder."""

    passed: int
    failed: int
    unstable: int
    skipped: int
    minutes: float
    commit: str
    """The commit that was tested, shortened; with a `+` if the checkout had changes."""


@dataclass(frozen=True, slots=True)
class Record:
    """What the page says."""

    folders: dict[str, FolderRun] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """File -> seconds of its slow tests."""


def parse_page(text: str) -> Record:
    """Return what the text of the page says."""
    record = Record()
    for folder, passed, failed, unstable, skipped, minutes, commit in _FOLDER.findall(text):
        record.folders[folder] = FolderRun(
            int(passed), int(failed), int(unstable), int(skipped), float(minutes), commit
        )
    record.seconds.update({file: float(seconds) for file, seconds in _FILE.findall(text)})
    return record


def render_page(record: Record) -> str:
    """Return the text of the page."""
    rows = [*sorted(record.folders.items()), ("all", _add_folders(record.folders.values()))]
    folders = [
        f"| {name if name == 'all' else f'`{name}`'} | {run.passed} | {run.failed} | {run.unstable} | {run.skipped} |"
        f" {run.minutes:.1f} | {run.commit} |"
        for name, run in rows
    ]
    files = [f"| `{file}` | {seconds:.1f} |" for file, seconds in sorted(record.seconds.items())]
    return "\n".join(
        [
            _INTRO,
            "| folder | passed | failed | unstable | skipped | minutes | commit |",
            "|---|---|---|---|---|---|---|",
            *folders,
            "",
            "| file | seconds |",
            "|---|---|",
            *files,
            "",
        ]
    )


def _add_folders(runs: Iterable[FolderRun]) -> FolderRun:
    found = list(runs)
    return FolderRun(
        passed=sum(run.passed for run in found),
        failed=sum(run.failed for run in found),
        unstable=sum(run.unstable for run in found),
        skipped=sum(run.skipped for run in found),
        minutes=sum(run.minutes for run in found),
        commit=", ".join(sorted({run.commit for run in found})),
    )


def replace_folder(record: Record, folder: str, run: FolderRun, seconds: Mapping[str, float]) -> Record:
    """Return the record with a new run of one folder."""
    kept = {file: length for file, length in record.seconds.items() if not file.startswith(f"{folder}/")}
    return Record({**record.folders, folder: run}, {**kept, **seconds})


def read_seconds(report: Path) -> dict[str, float]:
    """Return file -> seconds from a JUnit report of pytest in the format `xunit1`."""
    found: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        found[str(case.get("file"))] += float(case.get("time", "0"))
    return dict(found)
