"""Measures loads of what was just saved, first and second loads, and loads by several processes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from bench.kit.arena import Arena, at_least, compare, names_like, open_arena
from bench.kit.bare_work import copy_limits, read_limits
from bench.kit.loading_processes import Loaders, digest_state, starting_loaders
from bench.kit.measure import Contestant, Goal, Result, Sizes, Timings, drop_pages, race, random_bytes
from bench.kit.peers import CONTENT_STORE, DCP, HOLDFAST, Peer, find_peers
from bench.kit.states import Shape, State, clear_state, verify_state
from bench.kit.stores import list_packs

_TENSOR_BYTES: Final = 16 << 20
_SEED: Final = 9000
_AT_ONCE: Final = (2, 4)
_MOST_READ: Final = 1.05
"""How often the bytes of a state may be read from the disk: records, manifests and read-ahead add a little."""
_COPIED: Final = "memcpy to new memory and BLAKE3"
_COPIED_IN_PLACE: Final = "memcpy and BLAKE3"
_IN_PLACE: Final = ", in place"


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure all loads with one state; its files are in the page cache only if a save or load left them there."""
    size = min(_TENSOR_BYTES, sizes.save_bytes // 4)
    shape = Shape(f"{sizes.save_bytes // size} x {size / (1 << 20):g} MiB", (size,) * (sizes.save_bytes // size))
    arena = open_arena(shape, work, rounds=sizes.rounds, seed=_SEED)
    # The content store has a file for each tensor, and is never the fastest. DCP reads with one thread in any case.
    peers = [HOLDFAST, *(peer for peer in find_peers() if peer is not CONTENT_STORE and peer not in DCP[1:])]
    try:
        for peer in peers:
            arena.save(peer)
        limits = copy_limits(random_bytes(arena.size_bytes, seed=_SEED))
        return [
            *_measure_twice(arena, peers, {name: limits[name] for name in (_COPIED, _COPIED_IN_PLACE)}),
            *_measure_at_once(arena, peers, {_COPIED: limits[_COPIED]}),
        ]
    finally:
        arena.close()


def _measure_twice(arena: Arena, peers: Sequence[Peer], copies: dict[str, Contestant]) -> list[Result]:
    """Measure the load of what was just saved, the first load of cold files, and the load after it."""
    contestants = read_limits(list_packs(arena.folder(HOLDFAST))) | copies
    for peer in peers:
        drop = partial(drop_pages, arena.files(peer))
        load_once = partial(_load_once, arena, peer, drop)
        # In a folder of its own: the files of the other loads must stay.
        fresh = replace(peer, name=f"{peer.name} again")
        loads = {
            "after save": (fresh, arena.loading(fresh, partial(_save_again, arena, fresh))),
            "first": (peer, arena.loading(peer, drop)),
            "second": (peer, arena.loading(peer, load_once)),
            "second" + _IN_PLACE: (peer, _fill_in_place(arena, peer, load_once)),
        }
        for name, (loaded, contestant) in loads.items():
            contestants[f"{name}: {peer.name}"] = replace(contestant, release=partial(arena.release, loaded))
    timings = race(contestants, rounds=arena.rounds)
    row = partial(_make_row, arena, timings, peers)
    raw = names_like(timings, "raw read,")
    return [
        row("load what was just saved", "after save"),
        row("load what was just saved", "after save", rivals=raw),
        row("first load", "first", goal=at_least(1.2)),
        row("first load", "first", rivals=raw),
        row("second load", "second"),
        row("second load", "second", rivals=[_COPIED], goal=at_least(0.85)),
        row("second load, in place", "second" + _IN_PLACE),
        row("second load, in place", "second" + _IN_PLACE, rivals=[_COPIED_IN_PLACE], goal=at_least(0.85)),
    ]


def _save_again(arena: Arena, peer: Peer) -> None:
    arena.renew(arena.folder(peer))
    peer.save(arena.folder(peer), arena.state)


def _load_once(arena: Arena, peer: Peer, drop: Callable[[], None]) -> None:
    drop()
    # In place: new memory, released just before the clock starts, would disturb the load on a virtual machine.
    peer.fill(arena.folder(peer), arena.target)
    clear_state(arena.target)


def _fill_in_place(arena: Arena, peer: Peer, prepare: Callable[[], None]) -> Contestant:
    return Contestant(
        partial(_fill, peer, arena.folder(peer), arena.target),
        prepare,
        partial(verify_state, expected=arena.state, who=peer.name),
        verify_once=peer is not HOLDFAST,
    )


def _fill(peer: Peer, folder: Path, target: State) -> State:
    peer.fill(folder, target)
    return target


def _make_row(
    arena: Arena,
    timings: dict[str, Timings],
    peers: Sequence[Peer],
    label: str,
    kind: str,
    *,
    rivals: Iterable[str] = (),
    goal: Goal | None = None,
) -> Result:
    """Compare with the fastest rival; without rivals, with the fastest peer."""
    own = f"{kind}: {HOLDFAST.name}"
    chosen = list(rivals) or [f"{kind}: {peer.name}" for peer in peers if peer is not HOLDFAST]
    row = compare(f"{label}, {arena.label}", timings, own, chosen, size_bytes=arena.size_bytes, goal=goal)
    return replace(row, against=row.against.removeprefix(f"{kind}: "), note=row.note.replace(f"{kind}: ", ""))


def _measure_at_once(arena: Arena, peers: Sequence[Peer], copies: dict[str, Contestant]) -> list[Result]:
    """Measure several processes that load the same cold files; the figure counts the bytes of all of them."""
    expected = digest_state(arena.state)
    rows = []
    with starting_loaders(max(_AT_ONCE), arena.state) as loaders:
        for count in _AT_ONCE:
            read_bytes: dict[str, int] = {}
            contestants = {
                f"{count}: {peer.name}": Contestant(
                    partial(_load_at_once, loaders, count, peer, arena.folder(peer), read_bytes),
                    partial(drop_pages, arena.files(peer)),
                    partial(_verify_all, loaders, count, expected),
                    partial(arena.release, peer),
                )
                for peer in peers
            }
            timings = race(contestants | copies, rounds=arena.rounds)
            # Each process loads the whole state; the copy is of one state, so its time counts once for each process.
            copied = replace(timings[_COPIED], seconds=tuple(count * each for each in timings[_COPIED].seconds))
            row = partial(
                _make_row, arena, timings | {_COPIED: copied}, peers, f"{count} processes at once", str(count)
            )
            rows += [_multiply(row(), count), _multiply(row(rivals=[_COPIED]), count), _count(arena, count, read_bytes)]
    return rows


def _load_at_once(loaders: Loaders, count: int, peer: Peer, folder: Path, read_bytes: dict[str, int]) -> None:
    read = loaders.load(count, peer.name, folder)
    read_bytes[peer.name] = max(read, read_bytes.get(peer.name, 0))


def _verify_all(loaders: Loaders, count: int, expected: bytes, _: object) -> None:
    loaders.verify(count, expected)


def _multiply(row: Result, count: int) -> Result:
    """Return a row whose GB/s count the bytes of all processes."""
    figures = {name: count * figure for name, figure in row.figures.items()}
    limit = None if row.limit is None else count * row.limit
    return replace(row, figure=count * row.figure, limit=limit, figures=figures, note="")


def _count(arena: Arena, count: int, read_bytes: dict[str, int]) -> Result:
    """Return how often all processes together have read the state from the disk, in the worst round."""
    times = {name: read / arena.size_bytes for name, read in read_bytes.items()}
    return Result(
        f"read from the disk by {count} processes at once, {arena.label}",
        times[HOLDFAST.name],
        "x",
        "once",
        1.0,
        Goal("ratio", "<=", _MOST_READ),
        ", ".join(f"{name} {each:.2f}" for name, each in times.items() if name != HOLDFAST.name),
        figures=times,
    )
