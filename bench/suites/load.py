"""Measures loading a state, one tensor, a slice or the names, against other formats, the disk and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import torch

from bench.kit.arena import Arena, at_least, compare, compare_ms, is_own, names_like, open_arena
from bench.kit.bare_work import HASHED_READ, copy_limits, read_limits
from bench.kit.measure import (
    Contestant,
    Goal,
    Result,
    Sizes,
    Timings,
    WrongResult,
    drop_pages,
    load_pages,
    name_bound,
    race,
    random_bytes,
)
from bench.kit.peers import CONTENT_STORE, DCP, HOLDFAST, HOLDFAST_FAST, SAFETENSORS, TORCH, Peer, find_peers
from bench.kit.states import (
    State,
    clear_state,
    pick_name,
    plan_large,
    plan_mixed,
    plan_small,
    verify_state,
    verify_tensor,
)
from bench.kit.stores import list_packs

_ROUNDS: Final = 3
_IN_PLACE: Final = ", in place"
_MAPPED_MS: Final = 20.0
# As for saves: the content store has two files for each of many tensors. DCP opens small tensors one by one, and takes
# ten times as long as the next slowest format, to save, to load cold and to load warm.
_LEFT_OUT: Final = {plan_mixed: (CONTENT_STORE,), plan_small: (CONTENT_STORE, DCP[0])}
Prepare = Callable[[Peer], Callable[[], None]]
Found = TypeVar("Found")


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure loads of three kinds of state, and loads of parts of the first one."""
    rounds = min(_ROUNDS, sizes.rounds)
    results: list[Result] = []
    for number, plan in enumerate((plan_large, plan_mixed, plan_small)):
        arena = open_arena(plan(sizes), work, rounds=rounds, seed=1000 * (number + 5))
        peers = [peer for peer in _find_loaders() if peer not in _LEFT_OUT.get(plan, ())]
        try:
            for peer in [HOLDFAST, *peers]:
                arena.save(peer)
            results += _measure_cold(arena, peers, is_large=plan is plan_large, is_small=plan is plan_small)
            if plan is plan_large:
                results += _measure_parts(arena, peers)
            # The page cache must have room for all files: formats that were never the fastest are left out.
            warm = [peer for peer in peers if peer is not CONTENT_STORE]
            results += _measure_warm(arena, warm, is_large=plan is plan_large, is_small=plan is plan_small)
        finally:
            arena.close()
    return results


def _find_loaders() -> list[Peer]:
    # DCP reads with one thread, regardless of how many have written.
    return [peer for peer in find_peers() if peer not in DCP[1:]]


def _loads(
    arena: Arena, peers: Sequence[Peer], prepare: Prepare, *, in_place: Sequence[Peer], target: State | None
) -> dict[str, Contestant]:
    """Return loads into new memory and, if there is a target, loads in place by `in_place`."""
    contestants = {peer.name: arena.loading(peer, prepare(peer)) for peer in peers}
    for peer in in_place if target is not None else ():
        contestants[peer.name + _IN_PLACE] = Contestant(
            partial(_fill, peer, arena.folder(peer), target or {}),
            partial(_clear_and, target or {}, prepare(peer)),
            partial(verify_state, expected=arena.state, who=peer.name),
            verify_once=not is_own(peer),
        )
    return contestants


def _fill(peer: Peer, folder: Path, target: State) -> State:
    peer.fill(folder, target)
    return target


def _clear_and(target: State, prepare: Callable[[], None]) -> None:
    clear_state(target)
    prepare()


def _make_row(
    arena: Arena, timings: dict[str, Timings], label: str, own: str, rivals: Sequence[str], ratio: float | None = None
) -> Result:
    goal = at_least(ratio) if ratio is not None else None
    return compare(f"{label}, {arena.label}", timings, own, rivals, size_bytes=arena.size_bytes, goal=goal)


def _measure_cold(arena: Arena, peers: Sequence[Peer], *, is_large: bool, is_small: bool) -> list[Result]:
    target = arena.target if is_large else None

    def prepare(peer: Peer) -> Callable[[], None]:
        return partial(drop_pages, arena.files(peer))

    every = [HOLDFAST, *peers]
    # In place, the content store loads into new memory and copies.
    to_fill = [peer for peer in every if peer is not CONTENT_STORE]
    contestants = _loads(arena, every, prepare, in_place=to_fill, target=target)
    for peer in every:
        for name in names_like(contestants, peer.name):
            contestants[name] = replace(contestants[name], release=partial(arena.release, peer))
    packs = list_packs(arena.folder(HOLDFAST))
    limits = read_limits(packs) | read_limits(packs, then_hash=True) if is_large else {}
    timings = race(contestants | limits, rounds=arena.rounds)
    row = partial(_make_row, arena, timings)
    names = [peer.name for peer in peers]
    in_place = [name for name in timings if name.endswith(_IN_PLACE) and not name.startswith("Holdfast")]
    raw, hashed = names_like(timings, "raw read,"), names_like(timings, HASHED_READ)
    own = "Holdfast" + _IN_PLACE
    rows = [row("cold load", "Holdfast", names, None if not (is_large or is_small) else 1.0)]
    if is_large:
        rows += [
            row("cold load, in place", own, in_place),
            row("cold load", "Holdfast", ["DCP"], 1.3),
            name_bound(row("cold load", "Holdfast", raw, 0.9), row("cold load", "Holdfast", hashed)),
            row("cold load", "Holdfast", hashed),
            name_bound(row("cold load, in place", own, raw, 0.9), row("cold load, in place", own, hashed)),
            row("cold load, in place", own, hashed),
        ]
    return rows


def _measure_warm(arena: Arena, peers: Sequence[Peer], *, is_large: bool, is_small: bool) -> list[Result]:
    target = arena.target if is_large else None
    # It reads files that Holdfast has written.
    fast = replace(
        HOLDFAST_FAST, load=_elsewhere(arena, HOLDFAST_FAST.load), fill=_elsewhere(arena, HOLDFAST_FAST.fill)
    )

    def prepare(peer: Peer) -> Callable[[], None]:
        return partial(load_pages, arena.files(HOLDFAST if peer is fast else peer))

    to_fill = [HOLDFAST, fast, *(peer for peer in peers if peer in (TORCH, DCP[0]))]
    contestants = _loads(arena, [HOLDFAST, fast, *peers], prepare, in_place=to_fill, target=target)
    # For small tensors the number counts, not the bytes.
    contestants |= {} if is_small else copy_limits(random_bytes(arena.size_bytes, seed=10))
    timings = race(contestants, rounds=arena.rounds)
    row = partial(_make_row, arena, timings)
    names = [peer.name for peer in peers]
    if is_small:
        return [row("warm load", "Holdfast", names, 1.0)]

    def when_large(ratio: float) -> float | None:
        return ratio if is_large else None

    rows = [
        row("warm load", "Holdfast", names),
        row("warm load", "Holdfast", ["DCP"], when_large(1.5)),
        row("warm load", "Holdfast", ["memcpy to new memory and BLAKE3"], when_large(0.85)),
        row('warm load, verify="fast"', fast.name, ["torch.save"], when_large(0.9)),
        row('warm load, verify="fast"', fast.name, ["memcpy to new memory"], when_large(0.7)),
    ]
    if is_large:
        rows += [
            row("warm load, in place", "Holdfast" + _IN_PLACE, ["DCP" + _IN_PLACE], 1.5),
            row("warm load, in place", "Holdfast" + _IN_PLACE, ["memcpy and BLAKE3"], 0.85),
            row('warm load, verify="fast", in place', fast.name + _IN_PLACE, ["torch.save" + _IN_PLACE]),
            row('warm load, verify="fast", in place', fast.name + _IN_PLACE, ["memcpy"], 0.7),
        ]
    return rows


def _elsewhere(arena: Arena, act: Callable[[Path, State], Found]) -> Callable[[Path, State], Found]:
    return lambda _, state: act(arena.folder(HOLDFAST), state)


def _measure_parts(arena: Arena, peers: Sequence[Peer]) -> list[Result]:
    """Measure one tensor, a sixteenth of it, the names, and the whole state as a map; all of it cold."""
    name = pick_name(arena.state)
    whole = arena.state[name]
    every = [HOLDFAST, *peers]
    rows = slice(len(whole) // 4, len(whole) // 4 + max(1, len(whole) // 16))

    def cold(peer: Peer, act: Callable[[Path], object], verify: Callable[[object], None]) -> Contestant:
        return Contestant(partial(act, arena.folder(peer)), partial(drop_pages, arena.files(peer)), verify)

    def is_whole(found: object) -> None:
        verify_tensor(found, whole, what=name)

    def is_part(found: object) -> None:
        verify_tensor(found, whole[rows], what=f"{name}[{rows.start}:{rows.stop}]")

    one = race(
        {peer.name: cold(peer, partial(_read_one, peer, name, whole), is_whole) for peer in every},
        rounds=3 * arena.rounds,
    )
    sliced = race(
        {peer.name: cold(peer, partial(_read_rows, peer, name, rows), is_part) for peer in every if peer.read_rows},
        rounds=3 * arena.rounds,
    )
    listed = race(
        {peer.name: cold(peer, peer.list_names, partial(_verify_names, arena)) for peer in every},
        rounds=3 * arena.rounds,
    )
    return [
        _make_part_row("one tensor, cold", one, whole),
        _make_part_row("a slice, cold", sliced, whole[rows]),
        compare_ms(f"open and list, {arena.label}", listed, "Holdfast"),
        _measure_map(arena, [peer for peer in every if peer.open_mapped], cold),
    ]


def _measure_map(arena: Arena, peers: Sequence[Peer], cold: Callable[..., Contestant]) -> Result:
    contestants = {peer.name: cold(peer, peer.open_mapped, partial(_verify_map, arena)) for peer in peers}
    timings = race(contestants, rounds=arena.rounds)
    return compare_ms(f"open as a map, {arena.label}", timings, "Holdfast", Goal("figure", "<=", _MAPPED_MS))


def _verify_map(arena: Arena, found: object) -> None:
    """Raise unless the names and one tensor are right: reading the whole map takes longer than all the rest."""
    if not isinstance(found, dict):
        raise WrongResult(f"a map of a state is not a dict: {str(found)[:200]}")
    _verify_names(arena, list(found))
    name = pick_name(arena.state)
    verify_tensor(found[name], arena.state[name], what=name)
    found.clear()  # unmaps the file: mapped pages cannot be dropped


def _read_one(peer: Peer, name: str, like: torch.Tensor, folder: Path) -> torch.Tensor:
    return peer.read_one(folder, name, like)


def _read_rows(peer: Peer, name: str, rows: slice, folder: Path) -> torch.Tensor:
    if peer.read_rows is None:
        raise WrongResult(f"{peer.name} cannot read a part of a tensor")
    return peer.read_rows(folder, name, rows)


def _verify_names(arena: Arena, found: object) -> None:
    if not isinstance(found, list) or sorted(found) != sorted(arena.state):
        raise WrongResult(f"the names are not those that were saved: {str(found)[:200]}")


def _make_part_row(label: str, timings: dict[str, Timings], tensor: torch.Tensor) -> Result:
    """Compare with safetensors, which the goal names, or with the fastest of the installed formats."""
    rivals = [name for name in timings if name != "Holdfast"]
    chosen = [SAFETENSORS.name] if SAFETENSORS.name in timings else rivals
    found = compare(label, timings, "Holdfast", rivals, size_bytes=tensor.nbytes, goal=None)
    goal = at_least(0.9)
    if chosen == rivals or found.against == SAFETENSORS.name:
        return replace(found, goal=goal)
    row = compare(label, timings, "Holdfast", chosen, size_bytes=tensor.nbytes, goal=goal)
    return replace(row, note=found.note, samples=found.samples, figures=found.figures)
