"""Measures saving and loading against raw durable writes and hashing, and the cost of small saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from bench.kit.bare_work import count_cores, hash_memory, random_pages, read_limits, write_limits
from bench.kit.measure import (
    Contestant,
    Goal,
    Result,
    Sizes,
    Timings,
    WrongResult,
    count_bytes,
    drop_pages,
    list_files,
    load_pages,
    race,
    random_bytes,
    random_entries,
    throughput,
)
from bench.kit.stores import (
    CountingFiles,
    Entries,
    list_packs,
    load_entries,
    open_store,
    remove_store,
    save_entries,
    verify_equal,
)
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.write.writer import SaveResult

_SMALL_BYTES: Final = 4096


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure first saves, saves of content that is already present, loads, and small saves."""
    # An eighth of the state: the suites with tensors measure large ones.
    entries = random_entries(sizes.save_bytes // 4, sizes.entries, seed=7)
    measured = [
        *_measure_first(sizes, work, entries),
        *_measure_present(sizes, work, entries),
        *_measure_small(sizes, work),
        _measure_flatness(sizes, work),
    ]
    remove_store(work / "present")
    return measured


def _total(entries: Entries) -> int:
    return sum(len(data) for _, data in entries)


def _verify_saved(result: object, *, new_bytes: int) -> None:
    if not isinstance(result, SaveResult) or result.new_bytes != new_bytes:
        raise WrongResult(f"a save that should have written {new_bytes} new bytes returned {result}")


def _measure_first(sizes: Sizes, work: Path, entries: Entries) -> list[Result]:
    root = work / "first"
    size = _total(entries)
    saving = Contestant(
        lambda: save_entries(open_store(root), "run/first", entries),
        partial(remove_store, root),
        partial(_verify_saved, new_bytes=size),
    )
    data = random_pages(size, seed=8)
    name = "first save, durable"
    timings = race({name: saving} | write_limits(work / "raw", data), rounds=sizes.rounds)
    verify_equal(load_entries(open_store(root), "run/first"), entries=entries)
    (work / "raw").unlink()
    remove_store(root)
    return [throughput(name, timings, size, against="raw write")]


def _measure_present(sizes: Sizes, work: Path, entries: Entries) -> list[Result]:
    root = work / "present"
    size = _total(entries)
    repo = open_store(root)
    save_entries(repo, "run/step-0", entries)
    stored = count_bytes(root)
    numbers = count(1)

    def save_again(prefix: str, *, verify_reuse: bool) -> SaveResult:
        return save_entries(repo, f"{prefix}{next(numbers)}", entries, verify_reuse=verify_reuse)

    nothing_new = partial(_verify_saved, new_bytes=0)
    load_pages(list_packs(root))
    names = ("save again", "save again, verify_reuse=False", "load, in page cache")
    present: dict[str, Contestant] = {
        names[0]: Contestant(partial(save_again, "run/step-", verify_reuse=True), verify=nothing_new),
        names[1]: Contestant(partial(save_again, "run/step-", verify_reuse=False), verify=nothing_new),
        names[2]: _loading(root, entries),
        "BLAKE3 of memory": Contestant(partial(hash_memory, random_bytes(size, seed=9), threads=count_cores())),
    }
    timings = race(present, rounds=sizes.rounds)
    before = count_bytes(root)
    save_again("elsewhere/", verify_reuse=True)
    grown = 100 * (count_bytes(root) - before) / stored
    return [
        *(throughput(name, timings, size, against="BLAKE3 of memory") for name in names),
        *_measure_cold_load(sizes, root, entries),
        Result("growth by a save under an unrelated name", grown, "%", goal=Goal("figure", "<=", 1.0)),
    ]


def _loading(root: Path, entries: Entries, prepare: Callable[[], None] = lambda: None) -> Contestant:
    return Contestant(
        lambda: load_entries(open_store(root), "run/step-0"), prepare, partial(verify_equal, entries=entries)
    )


def _measure_cold_load(sizes: Sizes, root: Path, entries: Entries) -> list[Result]:
    packs = list_packs(root)
    name = "load, not in page cache"
    contestants = {name: _loading(root, entries, partial(drop_pages, packs))}
    timings = race(contestants | read_limits(packs), rounds=sizes.rounds)
    return [throughput(name, timings, _total(entries), against="raw read")]


def _measure_small(sizes: Sizes, work: Path) -> list[Result]:
    """Count the fsyncs of a small save into an existing store, and measure the stored size of a thousand scalars."""
    files = CountingFiles()
    repo = open_repository(LocalStore(work / "small", files=files), create=True)
    save_entries(repo, "run/first", _small(0))
    files.syncs = 0
    save_entries(repo, "run/second", _small(1))
    syncs = files.syncs
    remove_store(work / "small")
    root = work / "tiny"
    tiny = [(f"scalar-{i}", random_bytes(8, seed=i)) for i in range(sizes.tiny_entries)]
    name = f"{sizes.tiny_entries} scalars"
    contestant = Contestant(
        lambda: save_entries(open_store(root), "run/tiny", tiny),
        partial(remove_store, root),
        partial(_verify_saved, new_bytes=_total(tiny)),
    )
    seconds = race({name: contestant}, rounds=sizes.rounds)[name]
    verify_equal(load_entries(open_store(root), "run/tiny"), entries=tiny)
    stored = count_bytes(root)
    files_note = f"{len(list_files(root))} files"
    remove_store(root)
    return [
        Result("fsyncs of a small save", syncs, "", goal=Goal("figure", "<=", 6)),
        Result(
            f"{name}, first save of a store", 1e3 * seconds.best, "ms", note=f"median {1e3 * seconds.median:.0f} ms"
        ),
        Result(f"{name}, stored", stored, "bytes", goal=Goal("figure", "<=", 200_000), note=files_note),
    ]


def _small(number: int) -> Entries:
    return [("value", random_bytes(_SMALL_BYTES, seed=number))]


@dataclass(frozen=True, slots=True)
class _FilledStore:
    """A store with a given number of snapshots, each with different bytes."""

    root: Path
    snapshots: int

    def fill(self) -> None:
        repo = open_store(self.root)
        for number in range(self.snapshots):
            save_entries(repo, f"run-{number % 10}/step-{number}", _small(number))


def _measure_flatness(sizes: Sizes, work: Path) -> Result:
    """Compare the time of a small save with few snapshots in the store and with many."""
    stores = [_FilledStore(work / "few", sizes.few_snapshots), _FilledStore(work / "many", sizes.many_snapshots)]
    numbers = count(1_000_000)
    contestants = {}
    for filled in stores:
        filled.fill()
        contestants[str(filled.snapshots)] = Contestant(
            partial(_save_small, filled.root, numbers), verify=partial(_verify_saved, new_bytes=_SMALL_BYTES)
        )
    timings = race(contestants, rounds=3 * sizes.rounds)
    for filled in stores:
        remove_store(filled.root)
    return _compare(timings, str(sizes.few_snapshots), str(sizes.many_snapshots))


def _save_small(root: Path, numbers: count[int]) -> SaveResult:
    number = next(numbers)
    return save_entries(open_store(root), f"run-3/step-{number}", _small(number))


def _compare(timings: dict[str, Timings], few: str, many: str) -> Result:
    note = f"median {1e3 * timings[many].median:.1f} against {1e3 * timings[few].median:.1f} ms"
    samples = {name: found.seconds for name, found in timings.items()}
    workload = f"small save among {many} snapshots"
    limit = 1e3 * timings[few].median
    return Result(
        workload, 1e3 * timings[many].median, "ms", f"among {few}", limit, Goal("ratio", "<=", 1.5), note, samples
    )
