"""Measures operations as a store grows: lookups and commits should stay constant, others grow with what they read.

The store contains one run of many steps, each with a large frozen part and a small changed one. It is grown once, and
copied by hard links on the way: objects never change, so such a copy is an independent store.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from bench.kit.measure import Contestant, Goal, Result, Sizes, Timings, WrongResult, count_bytes, race, random_bytes
from bench.kit.stores import UnsyncedFiles, open_store, remove_store, save_entries
from holdfast.digest import Digest, hash_bytes
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import natural_order
from holdfast.repo.format.pack import NewChunk
from holdfast.repo.handle.index import ChunkIndex
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot, iter_names, read_name, read_snapshot
from holdfast.repo.upkeep.collect import plan_collect
from holdfast.repo.write.existing import read_base
from holdfast.repo.write.transaction import Draft, ManifestPart, SnapshotContent, Transaction

_CHUNK_BYTES: Final = 600
"""Just too large to be stored inline in the manifest."""
_CHANGED: Final = 100
"""One in this many entries changes from step to step."""
_SMALL_BYTES: Final = 4096
_INDEX_BYTES: Final = 64 << 20
_LOOK_UPS: Final = 100
_NEW: Final = 10_000_000
"""The first step that is in no store yet."""
_ABSENT: Final = [hash_bytes(number.to_bytes(4, "little")) for number in range(_LOOK_UPS)]


@dataclass(frozen=True, slots=True)
class _Workload:
    """An operation on a store of a given size, the check of its result, and how its cost may grow."""

    name: str
    prepare: Callable[[Path, int], Callable[[], object]]
    is_right: Callable[[object, int], bool]
    is_flat: bool = True


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Grow a store, and measure every operation on its copy at each size, in turns."""
    roots = {snapshots: work / f"{snapshots}" for snapshots in sizes.growth}
    for snapshots, grown in _grow(work / "growing", sizes):
        shutil.copytree(grown, roots[snapshots], copy_function=os.link)
    megabytes = count_bytes(roots[max(roots)]) / 1e6
    # Operations of constant cost are quick, so their noise is relatively large.
    results = [
        _measure(workload, roots, rounds=sizes.rounds * (3 if workload.is_flat else 1))
        for workload in _list_workloads(sizes)
    ]
    for root in (work / "growing", *roots.values()):
        remove_store(root)
    return [*results, Result(f"{max(roots)} snapshots of {sizes.growth_entries} entries", megabytes, "MB")]


def _list_workloads(sizes: Sizes) -> list[_Workload]:
    """Return all workloads; saves come last, because they make the small store grow most."""
    present = [digest for digest, _ in _make_chunks(0, sizes.growth_entries)][:_LOOK_UPS]
    return [
        _Workload("read one record", _record_reader, lambda found, n: found == f"run/step-{n // 2}"),
        _Workload(f"{len(present)} look-ups", partial(_look_up, present), lambda found, n: found == len(present)),
        _Workload(f"{len(present)} look-ups of absent chunks", partial(_look_up, _ABSENT), lambda found, n: found == 0),
        _Workload("open the index", _index_opener, lambda found, n: found == n, is_flat=False),
        _Workload("find a base without an index", _base_finder, _is_last, is_flat=False),
        _Workload("latest under a prefix", _latest_finder, _is_last, is_flat=False),
        _Workload("list", _lister, lambda found, n: found == n, is_flat=False),
        _Workload("plan a collection", _planner, lambda found, n: found == 0, is_flat=False),
        _Workload("small save, same handle", partial(_saver, is_fresh=False), _is_saved),
        _Workload("small save, fresh handle", partial(_saver, is_fresh=True), _is_saved, is_flat=False),
    ]


def _grow(root: Path, sizes: Sizes) -> Iterator[tuple[int, Path]]:
    """Commit step after step without any fsync, yielding at each size to measure."""
    repo = open_repository(LocalStore(root, files=UnsyncedFiles()), create=True)
    repo.verify_may_write()
    entries: list[Entry] = []
    changed = max(1, sizes.growth_entries // _CHANGED)
    for step in range(max(sizes.growth)):
        positions = [(step * changed + i) % sizes.growth_entries for i in range(changed)]
        entries = _commit(repo, step, entries, positions if entries else range(sizes.growth_entries))
        if step + 1 in sizes.growth:
            yield step + 1, root


def _make_chunks(step: int, number: int) -> list[tuple[Digest, memoryview]]:
    data = random_bytes(_CHUNK_BYTES * number, seed=step)
    chunks = [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
    return [(hash_bytes(chunk), chunk) for chunk in chunks]


def _commit(repo: Repository, step: int, before: Sequence[Entry], positions: Sequence[int]) -> list[Entry]:
    """Commit a snapshot that differs from the one before at `positions`; return its entries."""
    chunks = _make_chunks(step, len(positions))
    entries = dict(enumerate(before))
    with Transaction(repo, purpose="growth") as transaction:
        locations = transaction.packer.append([NewChunk(digest, data, 1) for digest, data in chunks])
        for position, (digest, _), location in zip(positions, chunks, locations, strict=True):
            ref = ChunkRef(digest, _CHUNK_BYTES, location)
            entries[position] = Entry(f"layers.{position}.weight", _CHUNK_BYTES, (ref,))
        committed = list(entries.values())
        draft = Draft(read_name(repo.store, f"run/step-{step}"))
        content = SnapshotContent(draft)
        with transaction.sealing(content):
            content.parts = [ManifestPart(None, committed)]
        transaction.commit(content)
    return committed


def _record_reader(root: Path, snapshots: int) -> Callable[[], str]:
    return lambda: read_snapshot(open_store(root).store, f"run/step-{snapshots // 2}").name


def _open_index(root: Path) -> ChunkIndex:
    return ChunkIndex(LocalStore(root), limit_bytes=_INDEX_BYTES).refresh()


def _index_opener(root: Path, snapshots: int) -> Callable[[], int]:
    return lambda: sum(len(fragment.packs) for fragment in _open_index(root)._fragments.values())


def _look_up(digests: Sequence[Digest], root: Path, snapshots: int) -> Callable[[], int]:
    index = _open_index(root)
    return lambda: sum(len(index.find(digest, _CHUNK_BYTES)) for digest in digests)


def _base_finder(root: Path, snapshots: int) -> Callable[[], str]:
    def find() -> str:
        found = read_base(open_store(root), f"run/step-{_NEW}")
        return found.name if found else ""

    return find


def _latest_finder(root: Path, snapshots: int) -> Callable[[], str]:
    def find() -> str:
        found = (name for name in iter_names(LocalStore(root), "run/") if isinstance(name, CommittedSnapshot))
        newest = max(found, key=lambda snapshot: (snapshot.time_s, natural_order(snapshot.name)), default=None)
        return newest.name if newest else ""

    return find


def _lister(root: Path, snapshots: int) -> Callable[[], int]:
    return lambda: sum(1 for _ in iter_names(LocalStore(root)))


def _planner(root: Path, snapshots: int) -> Callable[[], int]:
    return lambda: plan_collect(LocalStore(root), min_age_s=0.0).dead_bytes


def _saver(root: Path, snapshots: int, *, is_fresh: bool) -> Callable[[], int]:
    repo = open_store(root)
    steps = count(_NEW + is_fresh * _NEW)

    def save() -> int:
        step = next(steps)
        data = random_bytes(_SMALL_BYTES, seed=step)
        return save_entries(open_store(root) if is_fresh else repo, f"run/step-{step}", [("value", data)]).new_bytes

    return save


def _is_last(found: object, snapshots: int) -> bool:
    return found == f"run/step-{snapshots - 1}"


def _is_saved(found: object, snapshots: int) -> bool:
    return found == _SMALL_BYTES


def _measure(workload: _Workload, roots: Mapping[int, Path], *, rounds: int) -> Result:
    contestants = {
        str(snapshots): Contestant(
            workload.prepare(root, snapshots), verify=partial(_verify, workload=workload, snapshots=snapshots)
        )
        for snapshots, root in roots.items()
    }
    race(contestants, rounds=1)  # brings the files that are read into the page cache
    timings = race(contestants, rounds=rounds)
    return _judge(workload, {snapshots: timings[str(snapshots)] for snapshots in roots})


def _verify(result: object, *, workload: _Workload, snapshots: int) -> None:
    if not workload.is_right(result, snapshots):
        raise WrongResult(f"{workload.name!r} in a store of {snapshots} snapshots returned {str(result)[:500]}")


def _judge(workload: _Workload, timings: Mapping[int, Timings]) -> Result:
    """Compare the largest store with the smallest one; costs per snapshot with the middle one."""
    smallest, middle, largest = sorted(timings)
    milliseconds = {snapshots: 1e3 * found.median for snapshots, found in timings.items()}
    note = ", ".join(f"{figure:.3g} ms at {snapshots}" for snapshots, figure in milliseconds.items())
    samples = {str(snapshots): found.seconds for snapshots, found in timings.items()}
    if workload.is_flat:
        figure, limit, against = milliseconds[largest], milliseconds[smallest], f"at {smallest}"
        figures = {str(snapshots): found for snapshots, found in milliseconds.items()}
        return Result(workload.name, figure, "ms", against, limit, Goal("ratio", "<=", 1.5), note, samples, figures)
    figures = {str(snapshots): 1e3 * found / snapshots for snapshots, found in milliseconds.items()}
    figure, limit = figures[str(largest)], figures[str(middle)]
    name = f"{workload.name}, per snapshot"
    return Result(name, figure, "us", f"at {middle}", limit, Goal("ratio", "<=", 1.2), note, samples, figures)
