"""Records with coverage which tests execute which lines of the core, folder by folder of the tests."""

from __future__ import annotations

import _thread
import hashlib
import json
import sys
import tempfile
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
from coverage import Coverage, CoverageData
from coverage.exceptions import CoverageWarning

from tests.matrix.environments import ROOT
from tests.mutants.children import Job, run_jobs

PACKAGES: Final = ("repo", "objects", "snapshot", "distributed")
SUITES: Final = (
    *(f"tests/unit/{package}" for package in PACKAGES),
    *(f"tests/{name}" for name in ("property", "contract", "stateful", "faults", "interleaving", "attacks", "model")),
    *(f"tests/{name}" for name in ("compat", "distributed")),
)
"""The suites whose tests may kill mutants. Not `tests/cli`: most of its tests start processes, and take long."""
_LIMIT_S: Final = 3600.0
_NO_TESTS: Final = 5
_MOST_TESTS: Final = 400
_MOST_RANK_TESTS: Final = 12
_CASES: Final = 3


class Tracer:
    """A plugin of pytest that traces the core, with the name of the running test as coverage's context."""

    def __init__(self, copy: Path, data: Path) -> None:
        self.coverage = make_coverage(copy, data)
        self.coverage.start()
        # Before `holdfast` is imported: its pools start threads with this function, which coverage does not know.
        start = _thread.start_new_thread
        vars(_thread)["start_new_thread"] = lambda function, arguments: start(_run_traced, (function, *arguments))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Name the test whose lines are traced."""
        self.coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_unconfigure(self) -> None:
        """Write the data."""
        self.coverage.stop()
        with warnings.catch_warnings():
            # Some folders execute nothing of the core, or only in processes.
            warnings.simplefilter("ignore", CoverageWarning)
            self.coverage.save()


def _run_traced(function: Callable[..., None], *arguments: object) -> None:
    sys.settrace(threading.gettrace())
    function(*arguments)


def make_coverage(copy: Path, data: Path | None) -> Coverage:
    """Return coverage of the core's packages in a copy of the source."""
    source = [str(copy / "holdfast" / package) for package in PACKAGES]
    return Coverage(data_file=data, branch=True, source=source, config_file=False, messages=False)


def list_folders(suites: Sequence[str] = SUITES) -> list[str]:
    """Return the folders with tests below some suites, and that of the tests of the user's objects."""
    files = (file for suite in suites for file in ROOT.joinpath(suite).rglob("test_*.py"))
    return sorted({"tests/unit", *(file.parent.relative_to(ROOT).as_posix() for file in files)})


def digest_files(files: Iterable[Path]) -> str:
    """Return a digest of the names and contents of files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def locate(folder: str, state: Path) -> tuple[Path, Path]:
    """Return the files with the lines and with the tests of a folder; a change of its tests changes their names."""
    digest = digest_files([Path(__file__), *ROOT.joinpath(folder).glob("*.py")])
    name = f"{folder.replace('/', '-')}-{digest}"
    return state / f"{name}.lines", state / f"{name}.json"


def trace_folders(folders: Sequence[str], copies: Sequence[Path], state: Path) -> None:
    """Run the tests of each folder that has not been traced as it is now, and write what they executed."""
    waiting = [folder for folder in folders if not locate(folder, state)[1].exists()]
    jobs = (_plan_folder(folder, state) for folder in waiting)
    for number, (job, ended) in enumerate(run_jobs(jobs, copies), 1):
        report = locate(job.name, state)[1]
        counts = f"{len(ended.tests)} tests, {len(ended.failed)} failed, {ended.seconds:.0f} s"
        print(f"traced {number}/{len(waiting)} {job.name}: {counts}", flush=True)
        if ended.status not in (0, 1, _NO_TESTS):
            print(ended.output.read_text(encoding="utf-8", errors="replace")[-3000:], flush=True)
            continue
        for name in ended.failed:
            print(f"  fails when it is traced, and is not used: {name}")
        report.write_text(json.dumps(ended.tests), encoding="utf-8")


def _plan_folder(folder: str, state: Path) -> Job:
    files = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.joinpath(folder).glob("test_*.py"))
    data = locate(folder, state)[0]
    data.unlink(missing_ok=True)
    return Job(folder, files, _LIMIT_S, plugins=lambda copy: [Tracer(copy, data)])


class TestMap:
    """Which tests execute which lines of a module, and how long they take."""

    __test__ = False

    def __init__(self, folders: Sequence[str], state: Path) -> None:
        """Read what `trace_folders` wrote; tests that failed or were skipped then are left out."""
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self._data: list[CoverageData] = []
        for folder in folders:
            lines, report = locate(folder, state)
            if not report.exists():
                continue
            for name, seen in json.loads(report.read_text(encoding="utf-8")).items():
                if seen["outcome"] == "passed":
                    self.seconds[name], self.cpu_seconds[name] = seen["s"], seen["cpu_s"]
            if lines.exists():
                self._data.append(CoverageData(str(lines)))
                self._data[-1].read()
        self._modules: dict[str, dict[int, set[str]]] = {}

    def find_tests(self, module: str, lines: tuple[int, int]) -> set[str]:
        """Return the tests that execute one of the lines `lines[0]` to `lines[1]`."""
        if module not in self._modules:
            found = self._modules[module] = defaultdict(set)
            for data in self._data:
                for file in _find_files(data, module):
                    for line, contexts in data.contexts_by_lineno(file).items():
                        found[line].update(contexts)
        traced = self._modules[module].items()
        tests = {test for line, found in traced if lines[0] <= line <= lines[1] for test in found}
        return tests & self.seconds.keys()

    def find_rank_tests(self, module: str) -> list[str]:
        """Return some tests that start ranks, quick ones, for code that only ranks execute; they cannot be traced."""
        folder, _, stem = module.removesuffix(".py").rpartition("/")
        tests = [name for name in self.seconds if name.startswith(f"tests/{folder}/")]
        tests.sort(key=lambda name: (stem not in name.partition("::")[0], self.seconds[name], name))
        return tests[:_MOST_RANK_TESTS]

    def measure_coverage(self) -> dict[str, dict[str, int]]:
        """Return for each module what coverage counted: statements, branches, and how many of them were executed."""
        coverage = make_coverage(ROOT / "src", None)
        for module in list_modules():
            arcs = {arc for data in self._data for file in _find_files(data, module) for arc in data.arcs(file) or ()}
            coverage.get_data().add_arcs({str(ROOT / "src/holdfast" / module): arcs})
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            coverage.json_report(outfile=str(report))
            files = json.loads(report.read_text(encoding="utf-8"))["files"]
        return {name.partition("holdfast/")[2]: entry["summary"] for name, entry in files.items()}


def choose_tests(tests: Iterable[str], module: str, cpu_seconds: Mapping[str, float], budget_s: float) -> list[str]:
    """Return tests for a mutant: first those of the module's own file, then a few cases of each, then the others."""
    folder, _, stem = module.removesuffix(".py").rpartition("/")
    own = f"tests/unit/{folder}/test_{stem}"
    cases: Counter[str] = Counter()
    ranked = []
    for name in sorted(tests, key=lambda name: (cpu_seconds[name], name)):
        cases[function := name.partition("[")[0]] += 1
        rank = 0 if name.startswith(own) else 1 + cases[function] // _CASES
        ranked.append((rank, cpu_seconds[name], name))
    chosen: list[str] = []
    costs: defaultdict[str, float] = defaultdict(float)
    for *_, seconds, name in sorted(ranked):
        if chosen and (sum(costs.values()) + seconds > budget_s or len(chosen) == _MOST_TESTS):
            break
        chosen.append(name)
        costs[name.partition("::")[0]] += seconds
    # Tests of a file together, since a fixture may serve them all.
    return sorted(chosen, key=lambda name: (not name.startswith(own), costs[file := name.partition("::")[0]], file))


def list_modules() -> list[str]:
    root = ROOT / "src/holdfast"
    return sorted(file.relative_to(root).as_posix() for name in PACKAGES for file in root.joinpath(name).rglob("*.py"))


def _find_files(data: CoverageData, module: str) -> list[str]:
    return [file for file in data.measured_files() if file.endswith(f"/holdfast/{module}")]
