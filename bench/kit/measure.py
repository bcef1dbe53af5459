"""Times contestants in turns, checks their results, controls the page cache, and writes one table and one JSON file."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from holdfast.objects.local.files import PosixFiles

EXPLANATION: Final = "docs/explanation/where-the-time-goes.md"
RESULTS: Final = Path(__file__).resolve().parents[1] / "results" / "local"


class WrongResult(AssertionError):
    """A contestant returned a wrong result: its figure means nothing, and the run fails."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of each workload."""

    check_bytes: int
    save_bytes: int
    entries: int
    tiny_entries: int
    few_snapshots: int
    many_snapshots: int
    rounds: int
    starts: int
    growth: tuple[int, int, int]
    """The numbers of snapshots at which a growing store is measured."""
    growth_entries: int
    scale_bytes: tuple[int, ...]
    """The sizes at which a growing state is measured."""
    scale_tensors: tuple[int, ...]
    """The numbers of tensors at which a growing state is measured."""
    ranks: tuple[int, ...]
    """The numbers of ranks for which planning is measured."""
    parameters: int
    """The number of tensors that the ranks plan."""


FULL: Final = Sizes(
    check_bytes=2 << 30,
    save_bytes=1 << 30,
    entries=64,
    tiny_entries=1000,
    few_snapshots=10,
    many_snapshots=300,
    rounds=3,
    starts=7,
    growth=(10, 1000, 5000),
    growth_entries=200,
    scale_bytes=tuple(mebibytes << 20 for mebibytes in (64, 256, 1024, 2048, 4096, 8192)),
    scale_tensors=(1000, 10_000, 50_000, 200_000),
    ranks=(8, 64, 256, 1024, 4096),
    parameters=1000,
)
QUICK: Final = Sizes(
    check_bytes=128 << 20,
    save_bytes=64 << 20,
    entries=64,
    tiny_entries=1000,
    few_snapshots=10,
    many_snapshots=50,
    rounds=2,
    starts=3,
    growth=(10, 50, 200),
    growth_entries=100,
    scale_bytes=tuple(mebibytes << 20 for mebibytes in (64, 128, 256, 512)),
    scale_tensors=(1000, 3000, 10_000),
    ranks=(8, 64),
    parameters=1000,
)
TINY: Final = Sizes(
    check_bytes=4 << 20,
    save_bytes=4 << 20,
    entries=4,
    tiny_entries=10,
    few_snapshots=2,
    many_snapshots=4,
    rounds=1,
    starts=1,
    growth=(2, 4, 8),
    growth_entries=10,
    scale_bytes=(1 << 20, 2 << 20, 4 << 20),
    scale_tensors=(10, 20, 40),
    ranks=(2, 4, 8),
    parameters=18,
)


@dataclass(frozen=True, slots=True)
class Contestant:
    """Something to time: `prepare` is not timed, and `verify` raises if the result of `run` is wrong."""

    run: Callable[[], object]
    prepare: Callable[[], None] = lambda: None
    verify: Callable[[object], None] = lambda result: None
    release: Callable[[], None] = lambda: None
    """Releases what a round leaves in memory; not timed. New memory is slow to get on a virtual machine."""
    verify_once: bool = False
    """Verify only the first round: each round does the same, and verifying takes longer than the work."""
    most_rounds: int | None = None
    """The limit of rounds for a contestant that is so slow that more would only take time."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The seconds that one contestant took in each round."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...] = ()
    """CPU seconds of all threads of this process: the cost of the work, independent of other load."""

    @property
    def best(self) -> float:
        """The fastest round: the one that other load disturbed least."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The median round."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Goal:
    """The required value of a figure, or of its ratio to the limit."""

    of: Literal["figure", "ratio"]
    relation: Literal[">=", "<="]
    value: float

    def is_met(self, value: float) -> bool:
        return value >= self.value if self.relation == ">=" else value <= self.value


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    workload: str
    figure: float
    unit: str
    against: str = ""
    limit: float | None = None
    goal: Goal | None = None
    note: str = ""
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    """The figure of each contestant, or of this one at each size, in the unit of the figure."""
    why: str = ""
    """The section of `EXPLANATION` that explains the time."""

    @property
    def ratio(self) -> float | None:
        return self.figure / self.limit if self.limit else None

    @property
    def verdict(self) -> str:
        value = self.ratio if self.goal and self.goal.of == "ratio" else self.figure
        if self.goal is None or value is None:
            return ""
        return "pass" if self.goal.is_met(value) else "limit"


def race(contestants: Mapping[str, Contestant], *, rounds: int) -> dict[str, Timings]:
    """Time all contestants in every round, in a changing order, and verify the result of each."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    cpu: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        present = [name for name, one in contestants.items() if number < (one.most_rounds or rounds)]
        for name in random.sample(present, len(present)):
            contestant = contestants[name]
            contestant.prepare()
            started, cpu_started = time.perf_counter(), time.process_time()
            result = contestant.run()
            seconds[name].append(time.perf_counter() - started)
            cpu[name].append(time.process_time() - cpu_started)
            if number == 0 or not contestant.verify_once:
                contestant.verify(result)
            del result  # release its memory before the next contestant runs
            contestant.release()
    return {name: Timings(tuple(values), tuple(cpu[name])) for name, values in seconds.items()}


def throughput(
    workload: str, timings: Mapping[str, Timings], size_bytes: int, *, against: str = "", goal: Goal | None = None
) -> Result:
    """Return the GB/s of `workload` against the fastest contestant whose name starts with `against`.

    The best round of each side is compared: the one with the least disturbance. All samples go to the JSON file.
    """
    limits = {name: found for name, found in timings.items() if against and name.startswith(against)}
    fastest = min(limits, key=lambda name: limits[name].best, default="")
    gigabytes = size_bytes / 1e9
    own = timings[workload]
    paired = _paired_ratio(own, limits[fastest]) if fastest else ""
    return Result(
        workload,
        gigabytes / own.best,
        "GB/s",
        fastest,
        gigabytes / limits[fastest].best if fastest else None,
        goal,
        f"median {gigabytes / own.median:.2f} GB/s{paired}",
        {name: found.seconds for name, found in (limits | {workload: own}).items()},
        {name: gigabytes / found.best for name, found in (limits | {workload: own}).items()},
    )


def name_bound(row: Result, bound: Result) -> Result:
    """Return a row whose note compares it with the same bare work plus hashing, measured in the same run."""
    if not (row.limit and bound.limit):
        return row
    reached = f"{bound.against} reached {bound.limit / row.limit:.2f} of it, and this {bound.ratio:.2f} of that"
    return replace(row, note=f"{reached}; {row.note}")


def _paired_ratio(own: Timings, limit: Timings) -> str:
    # A contestant with fewer rounds has none to pair with the later ones.
    ratios = [theirs / ours for ours, theirs in zip(own.seconds, limit.seconds, strict=False)]
    text = f", median of rounds {statistics.median(ratios):.2f}"
    if own.cpu_seconds and limit.cpu_seconds:
        text += f", by CPU time {min(limit.cpu_seconds) / min(own.cpu_seconds):.2f}"
    return text


def random_bytes(size_bytes: int, *, seed: int) -> memoryview:
    """Return bytes that neither compress nor repeat, the same for the same seed."""
    words = -(-size_bytes // 8)
    values = np.random.Generator(np.random.SFC64(seed)).integers(0, 1 << 64, words, dtype=np.uint64)
    return values.data.cast("B")[:size_bytes]


def random_entries(size_bytes: int, count: int, *, seed: int) -> list[tuple[str, memoryview]]:
    """Return `count` named entries of equal size."""
    each = size_bytes // count
    data = random_bytes(each * count, seed=seed)
    return [(f"entry-{i:04}", data[i * each : (i + 1) * each]) for i in range(count)]


def list_files(root: Path) -> list[Path]:
    """Return every file below `root`."""
    return sorted(path for path in root.rglob("*") if path.is_file())


def count_bytes(root: Path) -> int:
    """Return the size of all files below `root`."""
    return sum(path.stat().st_size for path in list_files(root))


def drop_pages(paths: Iterable[Path]) -> None:
    """Drop files from the page cache; raises if they stay in it (a tmpfs, a memory map that is still open)."""
    for path in paths:
        _drop_file(path)
        if count_resident_bytes(path):
            gc.collect()  # a reference cycle may keep a map open, and a read-ahead may arrive late
            _drop_file(path)
        if resident := count_resident_bytes(path):
            raise WrongResult(f"{resident} bytes of {path} are still in the page cache")


def release_pages(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, if their filesystem can."""
    for path in paths:
        _drop_file(path)


def _drop_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # dirty pages cannot be dropped
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def load_pages(paths: Iterable[Path]) -> None:
    """Read files into the page cache."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass


def count_resident_bytes(path: Path) -> int:
    """Return how many bytes of a file are in the page cache, by mincore(2)."""
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as view:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        # An array over the map gives its address; it must be deleted before the map is closed.
        address = np.frombuffer(view, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return min(int((np.frombuffer(bytes(pages), np.uint8) & 1).sum()) * mmap.PAGESIZE, size)


def describe_machine(path: Path) -> dict[str, object]:
    """Return the facts about the machine that a reader needs to judge the figures."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "filesystem": PosixFiles().read_filesystem_type(str(path)),
        "python": platform.python_version(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def format_table(results: Sequence[Result]) -> str:
    """Return all results as one table; a row that misses its goal links to the section that explains its limit."""
    head = ("workload", "figure", "against", "limit", "ratio", "goal", "", "note")
    rows = [head, *(_format_row(result) for result in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _format_row(result: Result) -> tuple[str, ...]:
    goal = result.goal
    return (
        result.workload,
        f"{_format_number(result.figure)} {result.unit}",
        result.against,
        "" if result.limit is None else f"{_format_number(result.limit)} {result.unit}",
        "" if result.ratio is None else f"{result.ratio:.2f}",
        f"{goal.of} {goal.relation} {goal.value:g}" if goal else "",
        result.verdict,
        f"see {EXPLANATION}#{result.why}; {result.note}" if result.verdict == "limit" and result.why else result.note,
    )


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"


def write_json(
    path: Path, machine: Mapping[str, object], results: Sequence[Result], suite_seconds: Mapping[str, float]
) -> None:
    """Write everything that was measured, samples included."""
    rows = [asdict(result) | {"ratio": result.ratio, "verdict": result.verdict} for result in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {"machine": dict(machine), "suite_seconds": dict(suite_seconds), "results": rows}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
