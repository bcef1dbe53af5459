"""Measures planning a checkpoint of very many ranks on the busiest rank: in Holdfast, and in torch's default planners.

One process acts as one rank after the other. Tensors are DTensors over a mesh of ranks that only claim to exist, and
have no memory. Each side runs its own code on rank 0, which is also the coordinator. The messages of the other ranks
are prepared beforehand, and the messages that rank 0 receives and sends are really encoded and decoded. The network and
the writing are not measured: bytes are counted instead.

For Holdfast this is all of `plan_save`, the coverage check included, then the manifest of a part, the references to all
parts and the root. For torch it is its local plan, the gathered plans, `create_global_plan` and the scattered plans,
without the metadata file that it writes at the end. For a load, Holdfast is measured on the rank that owns the most
names; torch on any rank, since each reads all metadata and plans.
"""

from __future__ import annotations

import gc
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from bench.kit.claimed_ranks import (
    ITEM_BYTES,
    EchoRanks,
    Shapes,
    be_first,
    cut_shape,
    make_id,
    make_part,
    make_ref,
    make_shapes,
    make_state,
)
from bench.kit.measure import Goal, Result, Sizes, WrongResult
from holdfast.digest import Digest, hash_bytes
from holdfast.distributed.checkpoint.exchange import (
    ChunkExchange,
    Router,
    Wanted,
    answer_all,
    decode_rows,
    pack_questions,
)
from holdfast.distributed.checkpoint.plan import plan_save
from holdfast.distributed.talk import wire
from holdfast.repo.format.boxes import volume
from holdfast.repo.format.entry import Entry, digest_parts, digest_snapshot
from holdfast.repo.format.layout import ManifestRef, PartRef, parse_part
from holdfast.repo.format.manifest import Manifest, build_table, decode_manifest, encode_manifest
from holdfast.repo.read.read_plan import Region
from holdfast.snapshot.save import SaveOptions
from holdfast.trees.registered import Types

_MOST_ITEMS: Final = 1 << 20
"""The limit for all items of torch's plans: each takes kilobytes. For more ranks fewer parameters are planned, and the
rest is extrapolated linearly, which favours torch: its time grows faster than the number of items."""
_CACHED: Final = "bench"
_SETTLED_RANKS: Final = 64
"""From this number of ranks on, a rank's own work no longer hides its work for all ranks."""
_JUDGED_RANKS: Final = 1024


@dataclass(frozen=True, slots=True)
class Cost:
    """The time and bytes of the busiest rank."""

    seconds: float
    size_bytes: int

    def scale(self, factor: float) -> Cost:
        """Return the cost scaled linearly to more of the same work."""
        return Cost(self.seconds * factor, int(self.size_bytes * factor))


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Plan saves and loads of increasing numbers of ranks."""
    found: dict[str, dict[int, Cost]] = {}
    for ranks in sizes.ranks:
        shapes = make_shapes(sizes.parameters)
        for name, cost in _measure_save(shapes, ranks).items():
            found.setdefault(name, {})[ranks] = cost
        for name, cost in _measure_load(shapes, ranks).items():
            found.setdefault(name, {})[ranks] = cost
        gc.collect()
    judged = _JUDGED_RANKS if _JUDGED_RANKS in sizes.ranks else max(sizes.ranks)
    return [
        _compare("plan a save", found["save"], found["DCP save"], judged, goal=20.0),
        _compare("plan a save, DCP with cached plans", found["save"], found["DCP save, cached"], judged),
        _compare("plan a load", found["load"], found["DCP load"], judged),
        *(_make_growth_row(what, found[what]) for what in ("save", "load")),
        *(_make_bytes_row(what, found[what], found[f"DCP {what}"], judged) for what in ("save", "load")),
    ]


def _pick_few(shapes: Shapes, ranks: int) -> Shapes:
    """Return the parameters that torch plans, as many as it can."""
    most = _MOST_ITEMS if ranks <= _JUDGED_RANKS else _MOST_ITEMS // 4
    return dict(list(shapes.items())[: max(1, most // ranks)])


def _time(work: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


# Saving, here


def _measure_save(shapes: Shapes, ranks: int) -> dict[str, Cost]:
    echo = EchoRanks(ranks)
    with be_first(ranks) as mesh:
        state = make_state(shapes, mesh)
        own = _plan_ours(state, echo)
        few = _pick_few(shapes, ranks)
        others = _plan_theirs({name: state[name] for name in few}, few, ranks)
    return {"save": own} | {name: cost.scale(len(shapes) / len(few)) for name, cost in others.items()}


def _plan_ours(state: Mapping[str, DTensor], echo: EchoRanks) -> Cost:
    ranks = echo.world_size
    seconds, planned = _time(lambda: plan_save("step-1", dict(state), SaveOptions(), Types(), echo, range(ranks)))
    request = planned.request
    entries = []
    for number, source in enumerate(request.sources):
        place = request.places[number]
        sizes = [stop - start for start, stop in zip([0, *source.cuts[:-1]], source.cuts, strict=True)]
        chunks = [make_ref(source.name, box, size) for box, size in zip(place.boxes, sizes, strict=True)]
        entries.append(Entry(source.name, place.size_bytes, tuple(chunks), source.spec, None, place.dims))
    written, size_bytes = _time(lambda: _write_manifests(echo, entries, request.root))
    if request.root is None or len(request.root.entries) != len(state):
        raise WrongResult(f"{len(state)} tensors of {ranks} ranks were not planned correctly")
    return Cost(seconds + written, echo.echo.size_bytes + size_bytes)


def _write_manifests(echo: EchoRanks, entries: Sequence[Entry], root: Any) -> int:
    """Encode a part; receive the references to all parts, and encode the root; return the size of both."""
    part = encode_manifest(None, entries)
    ref = PartRef(ManifestRef(make_id(1), hash_bytes(part), len(part)), digest_snapshot(None, entries))
    gathered = echo.all_gather("write", lambda: [ref.to_json()])
    refs = [parse_part(each, where="a rank") for own in gathered for each in own]
    digest_parts(root.spec, root.entries, [each.digest for each in refs])
    whole = encode_manifest(root.spec, root.entries, refs)
    hash_bytes(whole)
    echo.all_gather("stale", lambda: False)
    return len(part) + len(whole)


# Saving, in torch


def _plan_theirs(state: Mapping[str, DTensor], shapes: Shapes, ranks: int) -> dict[str, Cost]:
    _forget_plans()
    local_s, own = _time(lambda: _make_local_plan(state))
    gathered = [pickle.dumps(own)]
    gathered += [pickle.dumps(_move_plan(own, shapes, rank, ranks)) for rank in range(1, ranks)]
    first, scattered = _time(lambda: _plan_globally(state, gathered))
    received = sum(map(len, gathered))
    # The same again, now with warm caches.
    again_s, nothing = _time(lambda: _make_local_plan(state))
    if nothing.usable:
        raise WrongResult("torch has not found its cached plan again")
    unusable = [pickle.dumps(nothing)] * ranks
    second, scattered_again = _time(lambda: _plan_globally(state, unusable))
    _forget_plans()
    return {
        "DCP save": Cost(local_s + first, received + scattered),
        "DCP save, cached": Cost(again_s + second, sum(map(len, unusable)) + scattered_again),
    }


def _make_planner(state: Mapping[str, DTensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner.set_up_planner(dict(state), None, is_coordinator=True)
    planner._cached_plans_key = _CACHED
    return planner


def _make_local_plan(state: Mapping[str, DTensor]) -> SavePlan:
    planner = _make_planner(state)
    plan = planner.create_local_plan()
    if plan.usable:
        SavePlanner._cached_save_plan[_CACHED] = plan
    return plan


def _plan_globally(state: Mapping[str, DTensor], gathered: Sequence[bytes]) -> int:
    plans = [pickle.loads(each) for each in gathered]
    delta, _ = _make_planner(state).create_global_plan(plans)
    return sum(len(pickle.dumps(each)) for each in delta)


def _move_plan(plan: SavePlan, shapes: Shapes, rank: int, ranks: int) -> SavePlan:
    """Return the plan of another rank."""
    items = []
    for item in plan.items:
        box = cut_shape(shapes[item.index.fqn], rank, ranks)
        if not volume(box) or item.tensor_data is None:
            continue
        offsets, sizes = torch.Size(box.starts), torch.Size(box.sizes)
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        data = TensorWriteData(chunk=chunk, properties=item.tensor_data.properties, size=item.tensor_data.size)
        items.append(WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data=plan.planner_data)


def _forget_plans() -> None:
    for cache in (
        SavePlanner._cached_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
        SavePlanner._cached_final_save_plan,
    ):
        cache.clear()


# Loading: twice as many ranks as have saved it


class SilentRank:
    """A rank that sends nothing: only its number is used."""

    is_coordinator: Final = False

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.world_size = rank, ranks


def _measure_load(shapes: Shapes, ranks: int) -> dict[str, Cost]:
    saved = max(1, ranks // 2)
    own = _locate_ours(shapes, saved, ranks)
    few = _pick_few(shapes, ranks)
    with be_first(ranks) as mesh:
        theirs = _load_theirs(make_state(few, mesh), few, saved)
    return {"load": own, "DCP load": theirs.scale(len(shapes) / len(few))}


def make_wants(shapes: Shapes, rank: int, ranks: int) -> dict[str, Wanted]:
    """Return the region of each parameter that a rank requests."""
    return {name: (Region(cut_shape(shape, rank, ranks), shape, ITEM_BYTES),) for name, shape in shapes.items()}


def _locate_ours(shapes: Shapes, saved: int, ranks: int) -> Cost:
    """Return the cost for an owner of names to locate the chunks of these names and to send the locations to others."""
    part = encode_manifest(None, make_part(shapes, 0, saved))
    ref = PartRef(ManifestRef(make_id(1), hash_bytes(part), len(part)), Digest(bytes(32)))
    heads = [Entry(name, ITEM_BYTES * math.prod(shape), (), dims=1) for name, shape in shapes.items()]
    root = encode_manifest({"tree": list(shapes)}, heads, [ref] * saved)
    router = Router.plan(decode_manifest(root, where="root"), ranks)
    owner = router.find_owner(next(iter(shapes)))
    owned = {name: shape for name, shape in shapes.items() if router.find_owner(name) == owner}
    # This rank sends as much to the others as they send to it.
    sent = [_ask(router, owned, rank, saved, ranks)[owner] for rank in range(ranks)]

    def locate() -> tuple[int, int]:
        decoded = decode_manifest(root, where="root")
        parts = {0: decode_manifest(part, where="part")}
        exchange = ChunkExchange(SilentRank(owner, ranks), decoded, parts)  # type: ignore[arg-type]  # only its number is used
        numbers = {name: number for number, name in enumerate(exchange.heads.names)}
        stated = list(exchange.heads.iter_entries())
        wants = make_wants(shapes, owner, ranks)
        asked = [(stated[numbers[name]], wanted) for name, wanted in wants.items()]
        questions = pack_questions(Router.plan(decoded, ranks), parts, asked, None)
        answers = answer_all([wire.decode(b"".join(wire.encode(each))) for each in sent])
        # As many come from the other owners.
        found = [list(decode_rows(answers[owner])) for _ in range(router.owners)]
        view = Manifest(build_table(decoded.spec, stated), "here")
        if len(view) != len(shapes) or not all(found):
            raise WrongResult("an owner of names does not know the locations of their chunks")
        moved = sum(len(b"".join(wire.encode(each))) for each in questions if each)
        return moved, sum(map(len, answers)) + router.owners * len(answers[owner])

    seconds, (asked_bytes, answered_bytes) = _time(locate)
    received = sum(len(b"".join(wire.encode(each))) for each in sent)
    return Cost(seconds, len(root) + len(part) + asked_bytes + received + answered_bytes)


def _ask(router: Router, shapes: Shapes, rank: int, saved: int, ranks: int) -> list[Any]:
    """Return the message of a rank, for these names only."""
    parts = {}
    if rank < saved:
        parts[rank] = Manifest(build_table(None, make_part(shapes, rank, saved)), "here")
    asked = [
        (Entry(name, ITEM_BYTES * math.prod(shapes[name]), ()), wanted)
        for name, wanted in make_wants(shapes, rank, ranks).items()
    ]
    return pack_questions(router, parts, asked, None)


def _load_theirs(state: Mapping[str, DTensor], shapes: Shapes, saved: int) -> Cost:
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), None, is_coordinator=True)
    own = planner.create_local_plan()
    plans = [_move_plan(own, shapes, rank, saved) for rank in range(saved)]
    planned, metadata = create_default_global_save_plan(plans)
    # What the metadata file contains for each item: its location.
    metadata.storage_data = {item.index: ("__0_0.distcp", 0, 1) for plan in planned for item in plan.items}
    data = pickle.dumps(metadata)
    del plans, planned, metadata

    def load() -> object:
        read = pickle.loads(data)
        return create_default_local_load_plan(dict(state), read)

    seconds, _ = _time(load)
    return Cost(seconds, len(data))


# Rows


def _compare(what: str, own: Mapping[int, Cost], other: Mapping[int, Cost], judged: int, **goals: float) -> Result:
    ratios = {ranks: other[ranks].seconds / own[ranks].seconds for ranks in own}
    return Result(
        f"{what}, {judged} ranks",
        ratios[judged],
        "x cheaper",
        "",
        None,
        Goal("figure", ">=", goals["goal"]) if goals else None,
        ", ".join(
            f"{ranks} ranks: {own[ranks].seconds:.3f} s against {other[ranks].seconds:.3f} s" for ranks in sorted(own)
        ),
        {"Holdfast": [own[ranks].seconds for ranks in own], "DCP": [other[ranks].seconds for ranks in own]},
        {str(ranks): ratio for ranks, ratio in ratios.items()},
    )


def _make_growth_row(what: str, costs: Mapping[int, Cost]) -> Result:
    """Return the exponent with which the time grows with the number of ranks."""
    most = max(costs)
    settled = _SETTLED_RANKS if _SETTLED_RANKS in costs and most > _SETTLED_RANKS else min(costs)
    power = math.log(costs[most].seconds / costs[settled].seconds) / math.log(most / settled)
    return Result(
        f"plan a {what}, growth from {settled} to {most} ranks",
        power,
        "power",
        "",
        None,
        Goal("figure", "<=", 1.1),
        ", ".join(f"{cost.seconds:.3f} s at {ranks}" for ranks, cost in costs.items()),
        {str(ranks): [cost.seconds] for ranks, cost in costs.items()},
        {str(ranks): cost.seconds for ranks, cost in costs.items()},
    )


def _make_bytes_row(what: str, own: Mapping[int, Cost], other: Mapping[int, Cost], judged: int) -> Result:
    return Result(
        f"bytes at the busiest rank, plan a {what}, {judged} ranks",
        own[judged].size_bytes / 1e6,
        "MB",
        "DCP",
        other[judged].size_bytes / 1e6,
        None,
        ", ".join(
            f"{ranks} ranks: {own[ranks].size_bytes / 1e6:.2f} MB against {other[ranks].size_bytes / 1e6:.2f} MB"
            for ranks in sorted(own)
        ),
        {},
        {str(ranks): cost.size_bytes / 1e6 for ranks, cost in own.items()},
    )
