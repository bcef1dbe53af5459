"""Measures first saves, repeated saves and background saves of a state, against other formats and the disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from bench.kit.arena import Arena, at_least, compare, names_like, open_arena
from bench.kit.bare_work import (
    HASHED_WRITE,
    copy_limits,
    count_cores,
    fingerprint_memory,
    hash_memory,
    random_pages,
    write_limits,
)
from bench.kit.measure import (
    Contestant,
    Goal,
    Result,
    Sizes,
    Timings,
    count_bytes,
    name_bound,
    race,
    random_bytes,
)
from bench.kit.peers import CONTENT_STORE, DCP, HOLDFAST, Peer, find_peers
from bench.kit.repeated_saves import RepeatedSaves
from bench.kit.states import copy_state, plan_large, plan_mixed, plan_small

_ROUNDS: Final = 3
_FEW_CHANGED: Final = {"unchanged": 0.0, "1 % changed": 0.01}
_MANY_CHANGED: Final = {"10 % changed": 0.1, "100 % changed": 1.0}
_CONTENT_STORE_AGAIN: Final = "content store, unchanged"
_BLAKE3: Final = "BLAKE3 of memory"
_XXH3: Final = "XXH3 of memory"
_HINTED: Final = "Holdfast, unchanged, change hints"


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure saves of three kinds of state; for the first, also the stored bytes and how long a caller waits."""
    rounds = min(_ROUNDS, sizes.rounds)
    results: list[Result] = []
    for number, plan in enumerate((plan_large, plan_mixed, plan_small)):
        arena = open_arena(plan(sizes), work, rounds=rounds, seed=1000 * (number + 1))
        try:
            results += _measure_saves(arena, is_goal=plan is plan_large, is_small=plan is plan_small)
            if plan is plan_large:
                results += [*_measure_stored(arena), *_measure_async(arena)]
        finally:
            arena.close()
    return results


def _find_hinted(arena: Arena) -> dict[str, Contestant]:
    """Return a save that uses in-process change hints, if this version of Holdfast has them."""
    try:
        hinted = RepeatedSaves(arena, "hinted", change_hints=True)
    except TypeError:
        print(
            "  save again with change hints: left out, because holdfast.open has no parameter change_hints",
            file=sys.stderr,
        )
        return {}
    return {_HINTED: hinted.saving(0.0)}


def _saving_unchanged(arena: Arena, peer: Peer) -> Contestant:
    """Return a save into a folder that already has the state; each round first saves it, untimed, as for Holdfast."""
    apart = replace(peer, name=f"{peer.name} again")
    folder = arena.folder(apart)
    folder.mkdir()

    def save() -> None:
        peer.save(folder, arena.state)

    return Contestant(save, save, lambda _: arena.verify_saved(apart), partial(arena.release, apart), verify_once=True)


def _saving_changed(again: RepeatedSaves, fractions: Mapping[str, float]) -> dict[str, Contestant]:
    return {f"Holdfast, {label}": again.saving(fraction) for label, fraction in fractions.items()}


def _measure_saves(arena: Arena, *, is_goal: bool, is_small: bool) -> list[Result]:
    # PyTorch's content store has two files for each tensor, and more threads of DCP only help with large ones.
    left_out = [] if is_goal else [CONTENT_STORE, *DCP[1:]]
    peers = [peer for peer in find_peers() if peer not in left_out]
    # DCP opens many small tensors one by one, and takes ten times as long as the next slowest format.
    most = {DCP[0].name: 1} if is_small else {}
    contestants = {peer.name: arena.saving(peer, most_rounds=most.get(peer.name)) for peer in [HOLDFAST, *peers]}
    if CONTENT_STORE in peers:
        contestants[_CONTENT_STORE_AGAIN] = _saving_unchanged(arena, CONTENT_STORE)
    data = random_pages(arena.size_bytes, seed=8)
    limits = {_BLAKE3: Contestant(partial(hash_memory, data, threads=count_cores()))}
    limits |= write_limits(arena.work / "raw", data)
    if is_goal:
        contestants |= _find_hinted(arena)
        limits[_XXH3] = Contestant(partial(fingerprint_memory, data, threads=count_cores()))
    again = RepeatedSaves(arena)
    timings = race(contestants | _saving_changed(again, _FEW_CHANGED) | limits, rounds=arena.rounds)
    (arena.work / "raw").unlink()
    if is_goal:
        # A separate race: before each repeated save, the whole state has to be saved, and that takes the most time.
        timings |= race(_saving_changed(again, _MANY_CHANGED), rounds=arena.rounds)
    # Other formats do not get faster if only a part has changed: each save costs them a first save.
    return _make_save_rows(arena, timings, [peer.name for peer in peers], is_goal=is_goal, is_small=is_small)


def _make_save_rows(
    arena: Arena, timings: dict[str, Timings], peers: list[str], *, is_goal: bool, is_small: bool
) -> list[Result]:
    raw = names_like(timings, "raw write")
    dcp = names_like(peers, "DCP")
    again = [*peers, *names_like(timings, _CONTENT_STORE_AGAIN)]

    def row(label: str, own: str, rivals: list[str], ratio: float | None) -> Result:
        goal = at_least(ratio) if ratio is not None else None
        return compare(f"{label}, {arena.label}", timings, own, rivals, size_bytes=arena.size_bytes, goal=goal)

    def when_large(ratio: float) -> float | None:
        return ratio if is_goal else None

    fastest_peer = min(timings[name].best for name in peers)
    reachable = fastest_peer / min(timings[name].best for name in raw)
    first = min(1.8, reachable) if is_goal else 1.5 if is_small else None
    hashed = row("first save", "Holdfast", names_like(timings, HASHED_WRITE), None)
    hinted = [
        row("save again, unchanged, change hints", _HINTED, rivals, ratio)
        for rivals, ratio in ((dcp, 15.0), ([_XXH3], 0.7))
        if _HINTED in timings
    ]
    return [
        row("first save", "Holdfast", peers, first),
        name_bound(row("first save", "Holdfast", raw, when_large(0.9)), hashed),
        hashed,
        row("save again, unchanged", "Holdfast, unchanged", dcp, when_large(6.0)),
        row("save again, unchanged", "Holdfast, unchanged", again, None),
        row("save again, unchanged", "Holdfast, unchanged", [_BLAKE3], when_large(0.9)),
        *hinted,
        row("save again, 1 % changed", "Holdfast, 1 % changed", peers, when_large(5.0)),
        *(
            row(f"save again, {label}", f"Holdfast, {label}", peers, None)
            for label in (_MANY_CHANGED if is_goal else ())
        ),
    ]


def _measure_stored(arena: Arena) -> list[Result]:
    """Measure the bytes on disk after a first save of each format, and the bytes that a save with 1 % changed adds."""
    stored = {peer.name: count_bytes(arena.folder(peer)) for peer in [HOLDFAST, *find_peers()]}
    own = stored.pop("Holdfast")
    least = min(stored, key=lambda name: stored[name])
    again = RepeatedSaves(arena)
    again.change(0.01)
    before = count_bytes(again.root)
    again.verify(again.save(), fraction=0.01)
    grown = count_bytes(again.root) - before
    changed = round(0.01 * arena.size_bytes)
    return [
        Result(f"stored by a first save, {arena.label}", own, "bytes", least, stored[least]),
        Result(f"stored by a save, 1 % changed, {arena.label}", grown, "bytes", "changed bytes", changed),
    ]


def _measure_async(arena: Arena) -> list[Result]:
    """Measure how long `save_async` blocks the caller, with new memory for copies and with reused memory."""
    again = RepeatedSaves(arena)

    def prepare(*, is_first: bool) -> None:
        again.store.close()  # releases the memory for copies
        if not is_first:
            again.save_in_background().wait()

    data = random_bytes(arena.size_bytes, seed=9)
    contestants = {
        "Holdfast, first": Contestant(
            again.save_in_background, partial(prepare, is_first=True), again.verify_in_background
        ),
        "Holdfast, next": Contestant(
            again.save_in_background, partial(prepare, is_first=False), again.verify_in_background
        ),
        "clone()": Contestant(partial(copy_state, arena.state), verify=_verify_copy(arena)),
        "memcpy": copy_limits(data)["memcpy"],
    }
    timings = race(contestants, rounds=arena.rounds)
    again.store.close()
    return [
        _make_blocked_row(f"blocked by the first save_async, {arena.label}", timings, "Holdfast, first", "clone()"),
        _make_blocked_row(f"blocked by the next save_async, {arena.label}", timings, "Holdfast, next", "memcpy"),
    ]


def _verify_copy(arena: Arena) -> Callable[[object], None]:
    return partial(arena.verify_loaded, who="clone()")


def _make_blocked_row(workload: str, timings: dict[str, Timings], own: str, rival: str) -> Result:
    return Result(
        workload,
        1e3 * timings[own].best,
        "ms",
        rival,
        1e3 * timings[rival].best,
        Goal("ratio", "<=", 1.15),
        f"medians {1e3 * timings[own].median:.0f} and {1e3 * timings[rival].median:.0f}",
        {name: timings[name].seconds for name in (own, rival)},
        {name: 1e3 * timings[name].best for name in (own, rival)},
    )
