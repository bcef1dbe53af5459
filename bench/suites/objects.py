"""Measures saves and loads in a bucket on loopback against obstore alone and other libraries, and counts requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import torch

from bench.kit.arena import at_least, compare
from bench.kit.buckets import (
    RAW,
    VERIFIED,
    BucketPeer,
    RawObjects,
    find_bucket_peers,
    find_weed,
    make_holdfast,
    serve_bucket,
)
from bench.kit.measure import Contestant, Goal, Result, Sizes, WrongResult, race, random_bytes
from bench.kit.states import Shape, State, make_state, verify_state
from holdfast.objects.cloud.cloud_store import PACK_BYTES, REQUESTS_AT_ONCE, CloudStore
from holdfast.repo.handle.index import merge_tiers
from holdfast.repo.upkeep.collect import plan_collect
from holdfast.store import Store
from tests.kit.many_snapshots import fill_server
from tests.kit.rounds import Rounds, count_rounds
from tests.kit.s3_server import serve_s3
from tests.unit.objects.cloud.servers import open_cloud

_MIB: Final = 1 << 20
_ROUNDS: Final = 5
_TENSORS: Final = 64
_OBJECT_BYTES: Final = (16 * _MIB, 64 * _MIB)
_RANGE_BYTES: Final = (4 * _MIB, 8 * _MIB)
_SNAPSHOTS: Final = 1000
"""The goals of latest, ls and gc refer to this many."""
_LOADED: Final = 128
_SAVES: Final = 4


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure transfers if SeaweedFS is installed, and count the requests and rounds of each operation."""
    results: list[Result] = []
    weed = find_weed()
    if weed is not None:
        with serve_bucket(weed, work) as endpoint:
            results += _measure_transfers(endpoint, sizes, work)
    return results + _count_operations(min(_SNAPSHOTS, 4 * sizes.many_snapshots), sizes)


def _measure_transfers(endpoint: str, sizes: Sizes, work: Path) -> list[Result]:
    each = min(4 * _MIB, sizes.save_bytes // 4 // _TENSORS)
    state = make_state(Shape("bucket", (each,) * _TENSORS), seed=19)
    data = random_bytes(each * _TENSORS, seed=20)
    raws = [
        RawObjects(endpoint, data, object_bytes=object_bytes, range_bytes=range_bytes)
        for object_bytes, range_bytes in zip(_OBJECT_BYTES, _RANGE_BYTES, strict=True)
    ]
    peers, own = find_bucket_peers(endpoint), make_holdfast(endpoint)
    cached = make_holdfast(endpoint, cache=work / "cache")
    rounds = min(_ROUNDS, 2 * sizes.rounds)
    prefixes = (f"p{number}" for number in count())
    saves = {raw.name: _saving_raw(raw, prefixes) for raw in raws}
    saves |= {peer.name: _saving(peer, state, prefixes) for peer in (own, *peers)}
    timings = race(saves, rounds=rounds)
    label = f"{_TENSORS} x {each / _MIB:g} MiB"
    row = partial(compare, timings=timings, own=own.name, size_bytes=data.nbytes)
    names = [peer.name for peer in peers]
    rows = [row(f"save to a bucket, {label}", rivals=[raw.name for raw in raws], goal=at_least(0.9))]
    if peers:
        rows.append(row(f"save to a bucket, {label}", rivals=names, goal=at_least(1.0)))
    loads = {raw.name: _loading_raw(raw, next(prefixes)) for raw in raws}
    loads |= {VERIFIED: _loading_verified(raws[-1], next(prefixes))}
    loads |= {peer.name: _loading(peer, state, next(prefixes)) for peer in (own, cached, *peers)}
    timings = race(loads, rounds=rounds)
    row = partial(compare, timings=timings, size_bytes=data.nbytes)
    rows.append(
        row(f"load from a bucket, {label}", own=own.name, rivals=[raw.name for raw in raws], goal=at_least(0.8))
    )
    rows.append(row(f"load from a bucket, {label}", own=own.name, rivals=[VERIFIED], goal=None))
    if peers:
        rows.append(row(f"load from a bucket, {label}", own=own.name, rivals=names, goal=at_least(2.0)))
    rows.append(row(f"load from a bucket, cached, {label}", own=cached.name, rivals=[own.name], goal=None))
    return rows


def _saving(peer: BucketPeer, state: State, prefixes: Iterator[str]) -> Contestant:
    """Return a timed save below a new prefix, verified by loading."""
    used: list[str] = []

    def prepare() -> None:
        used.append(next(prefixes))
        peer.open(used[-1])

    def verify(_: object) -> None:
        verify_state(peer.load(used[-1], state), state, who=peer.name)

    return Contestant(lambda: peer.save(used[-1], state), prepare, verify, verify_once=True)


def _saving_raw(raw: RawObjects, prefixes: Iterator[str]) -> Contestant:
    used: list[str] = []
    return Contestant(
        lambda: raw.save(used[-1]),
        lambda: used.append(next(prefixes)),
        lambda _: _verify_raw(raw, raw.load(used[-1])),
        verify_once=True,
    )


def _loading(peer: BucketPeer, state: State, prefix: str) -> Contestant:
    """Return a timed load into new memory; that of Holdfast is verified in every round."""
    peer.open(prefix)
    peer.save(prefix, state)

    def verify(found: object) -> None:
        verify_state(found, state, who=peer.name)
        if isinstance(found, dict):
            found.clear()

    is_other = not peer.name.startswith("Holdfast")
    return Contestant(lambda: peer.load(prefix, state), lambda: peer.open(prefix), verify, verify_once=is_other)


def _loading_raw(raw: RawObjects, prefix: str) -> Contestant:
    raw.save(prefix)
    return Contestant(lambda: raw.load(prefix), verify=partial(_verify_raw, raw), verify_once=True)


def _loading_verified(raw: RawObjects, prefix: str) -> Contestant:
    raw.save(prefix)
    return Contestant(lambda: raw.load_verified(prefix), verify=partial(_verify_raw, raw), verify_once=True)


def _verify_raw(raw: RawObjects, found: object) -> None:
    if not (isinstance(found, list) and raw.is_equal(found)):
        raise WrongResult(f"{RAW} returned other bytes than it was given")


class _Counter:
    """Counts requests and sequential rounds, without a clock, in a store that has many snapshots, a minute apart."""

    def __init__(self, snapshots: int) -> None:
        self.results: list[Result] = []
        self._snapshots = snapshots

    def add(
        self,
        what: str,
        act: Callable[[Store], object],
        *,
        most: tuple[int, int | None],
        before: Callable[[Store], object] | None = None,
        same_handle: bool = False,
    ) -> None:
        """Count an operation of a new handle, opening included, or of the one that did what comes before."""
        with serve_s3() as server:
            fill_server(server, self._snapshots)
            store = Store(open_cloud(server))
            if before:
                before(store)
            with count_rounds(CloudStore, "_ask") as rounds:
                act(store if same_handle else Store(open_cloud(server)))
            self.results.extend(_make_rows(what, rounds, *most))


def _count_operations(snapshots: int, sizes: Sizes) -> list[Result]:
    """Count the operations that people wait for; a new handle takes a round and two requests to open the store."""
    loaded = min(_LOADED, sizes.save_bytes // _MIB)
    model, small = _make_model(loaded), {"w": torch.arange(1000)}
    packs = -(-loaded * _MIB // PACK_BYTES) + 1
    label = f", {snapshots:,} snapshots"
    # With these, no store has more names than one answer lists.
    counter = _Counter(snapshots - _SAVES - 2)
    add = counter.add
    add("open" + label, lambda store: None, most=(1, None))
    add("open and latest" + label, lambda store: store.latest("run/"), most=(3, None))
    add("open and ls" + label, lambda store: store.snapshots("run/"), most=(21, None))
    add(
        f"open and load of {loaded} x 1 MiB",
        lambda store: store.load("many"),
        before=lambda store: store.save("many", model),
        most=(9, 42),
    )
    add(
        "small save, same handle",
        lambda store: store.save("new/2", small),
        before=lambda store: _save_often(store, "new", {"w": torch.zeros(1000)}),
        same_handle=True,
        most=(12, None),
    )
    add(
        "unchanged save, same handle",
        lambda store: store.save("again/2", model),
        before=lambda store: _save_often(store, "again", model),
        same_handle=True,
        most=(12, 20 + packs),
    )
    add(
        "open and unchanged save",
        lambda store: store.save("again/2", model),
        before=lambda store: store.save("again/1", model),
        most=(13, 22 + packs),
    )
    add("open and gc plan" + label, lambda store: plan_collect(store.repository.store), before=_delete, most=(61, None))
    add("open and gc" + label, lambda store: store.gc(), before=_delete, most=(151, None))
    return counter.results


def _save_often(store: Store, name: str, state: dict[str, torch.Tensor]) -> None:
    """Merge the fragments of the index, which every eighth save does, and save a few times."""
    merge_tiers(store.repository.store)
    for number in range(_SAVES):
        store.save(f"{name}/before-{number}", state)


def _delete(store: Store) -> None:
    """Leave something to collect behind."""
    store.save("dead", {"w": torch.arange(5000)})
    store.delete("dead")


def _make_rows(what: str, rounds: Rounds, most_rounds: int, most_requests: int | None) -> list[Result]:
    goals: Mapping[str, tuple[int, int | None]] = {
        "rounds": (rounds.count_waves(REQUESTS_AT_ONCE), most_rounds),
        "requests": (len(rounds.requests), most_requests),
    }
    return [
        Result(what, figure, unit, goal=None if most is None else Goal("figure", "<=", most))
        for unit, (figure, most) in goals.items()
    ]


def _make_model(count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(21)
    return {f"w{n}": torch.randint(0, 255, (_MIB,), dtype=torch.uint8, generator=generator) for n in range(count)}
