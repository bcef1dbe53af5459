"""Chunk locations: each rank gets those of the regions that it wants, as if it had read all parts, and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.digest import hash_bytes
from holdfast.distributed.checkpoint.exchange import ChunkExchange, Router, Wanted, open_together
from holdfast.errors import Corrupt, RankError
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.boxes import Box, is_span, overlap, slices, span_of, volume, whole
from holdfast.repo.format.chunk import ChunkRef, Location
from holdfast.repo.format.entry import NO_RANK, Entry, digest_snapshot
from holdfast.repo.format.layout import MANIFESTS, ManifestRef, PartRef, manifest_key
from holdfast.repo.format.manifest import Manifest, build_table, encode_manifest
from holdfast.repo.format.rank_manifests import read_manifests
from holdfast.repo.read.read_plan import Region
from tests.kit.saving import Watched
from tests.kit.thread_ranks import ThreadRanks, run_threads
from tests.kit.tilings import boxes_in, shapes, tilings

ITEM_BYTES = 4


def file_id(number: int) -> str:
    return f"{number:024x}-{number:016x}"


def make_chunk(name: str, box: Sequence[int], size_bytes: int, pack: int = 1) -> ChunkRef:
    digest = hash_bytes(f"{name} {box}".encode())
    return ChunkRef(digest, size_bytes, Location(file_id(pack), 4096, size_bytes, 0, bytes(16)), box=tuple(box))


def place_boxes(name: str, shape: tuple[int, ...], boxes: Sequence[Box], pack: int) -> Entry:
    """Return what a part says of a tensor of which it has these boxes."""
    dims = len(shape)
    size = ITEM_BYTES * volume(whole(shape))
    if dims < 2:
        spans = [span_of(box, shape, ITEM_BYTES) for box in boxes]
        chunks = [make_chunk(name, (start, stop - start), stop - start, pack) for start, stop in spans]
        return Entry(name, size, tuple(chunks), dims=1)
    chunks = [make_chunk(name, (*box.starts, *box.sizes), ITEM_BYTES * volume(box), pack) for box in boxes]
    return Entry(name, size, tuple(chunks), dims=dims)


def write_snapshot(
    store: ObjectStore, root: Sequence[Entry], parts: Sequence[tuple[Json, Sequence[Entry]]]
) -> ManifestRef:
    refs = []
    for number, (spec, entries) in enumerate(parts):
        refs.append(PartRef(_write(store, number + 1, spec, entries), digest_snapshot(spec, entries)))
    return _write(store, 0, {"tree": "root"}, root, refs)


def _write(
    store: ObjectStore, number: int, spec: Json, entries: Sequence[Entry], parts: Sequence[PartRef] = ()
) -> ManifestRef:
    data = encode_manifest(spec, entries, parts)
    store.create(manifest_key(file_id(number)), data)
    return ManifestRef(file_id(number), hash_bytes(data), len(data))


def locate_together(
    store: ObjectStore, ref: ManifestRef, wants: Sequence[Mapping[str, Wanted]]
) -> tuple[list[Manifest], list[ThreadRanks]]:
    """Let each rank find what it wants, by name."""

    def act(ranks: ThreadRanks) -> tuple[Manifest, ThreadRanks]:
        exchange = open_together(store, ref, ranks)
        numbers = {name: number for number, name in enumerate(exchange.heads.names)}
        own = {numbers[name]: wanted for name, wanted in wants[ranks.rank].items() if name in numbers}
        return exchange.locate(own), ranks

    results = run_threads(len(wants), act)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    found = [result for result in results if not isinstance(result, BaseException)]
    return [manifest for manifest, _ in found], [ranks for _, ranks in found]


@dataclass(frozen=True, slots=True)
class Model:
    """A snapshot of many parts, and what its tensors are."""

    shapes: Mapping[str, tuple[int, ...]]
    root: Sequence[Entry]
    parts: Sequence[tuple[Json, Sequence[Entry]]]


@st.composite
def models(draw: st.DrawFn) -> Model:
    world_size = draw(st.integers(1, 5))
    parts: list[list[Entry]] = [[] for _ in range(world_size)]
    found = {f"t{number}": draw(shapes()) for number in range(draw(st.integers(0, 5)))}
    for name, shape in found.items():
        held: list[list[Box]] = [[] for _ in range(world_size)]
        for box in draw(tilings(shape)):
            held[draw(st.integers(0, world_size - 1))].append(box)
        for rank, boxes in enumerate(held):
            if boxes:
                parts[rank].append(place_boxes(name, shape, boxes, rank + 1))
    root = [Entry(name, ITEM_BYTES * volume(whole(shape)), (), dims=1, note="n") for name, shape in found.items()]
    for number in range(draw(st.integers(0, 2))):
        name = f"own{number}"
        holders = draw(st.sets(st.integers(0, world_size - 1), min_size=1))
        sizes = {rank: draw(st.integers(0, 9)) for rank in sorted(holders)}
        for rank, size in sizes.items():
            chunks = (make_chunk(f"{name} of {rank}", (), size),) if size else ()
            parts[rank].append(Entry(name, size, chunks, spec={"size": size}, rank=rank))
        # As the first who has it tells it.
        first = min(holders)
        root.append(Entry(name, sizes[first], (), spec={"size": sizes[first]}, dims=1))
    specs = [draw(st.sampled_from([None, {"tree": rank}])) for rank in range(world_size)]
    return Model(found, root, [(spec, _complete(own, root, spec)) for own, spec in zip(parts, specs, strict=True)])


def _complete(own: Sequence[Entry], root: Sequence[Entry], spec: Json) -> list[Entry]:
    """Return the entries of a part: one that tells its tree itself names all that is in it, if others have it, too."""
    names = {entry.name for entry in own}
    others = [] if spec is None else [entry for entry in root if entry.name not in names]
    return [*own, *(entry for entry in others if not entry.name.startswith("own"))]


@st.composite
def wants_of(draw: st.DrawFn, model: Model) -> dict[str, Wanted]:
    names = [entry.name for entry in model.root]
    wants: dict[str, Wanted] = {}
    for name in draw(st.sets(st.sampled_from(names))) if names else ():
        shape = model.shapes.get(name)
        if shape is None or draw(st.booleans()):
            wants[name] = None
        else:
            boxes = draw(st.lists(boxes_in(shape), max_size=3))
            wants[name] = tuple(Region(box, shape, ITEM_BYTES) for box in boxes)
    return wants


def place_all(entry: Entry) -> dict[tuple[int, ...], ChunkRef]:
    """Return the chunks of an entry by their place."""
    ends = np.cumsum([0, *(chunk.size_bytes for chunk in entry.chunks)]).tolist()
    if entry.dims:
        return {chunk.box: chunk for chunk in entry.chunks}
    placed = [chunk._replace(box=(end, chunk.size_bytes)) for chunk, end in zip(entry.chunks, ends, strict=False)]
    return {chunk.box: chunk for chunk in placed}


def holds_some(box: tuple[int, ...], dims: int, region: Region) -> bool:
    """Tell by brute force whether a chunk holds an item of a region."""
    if dims > 1:
        return overlap(Box(box[:dims], box[dims:]), region.box) is not None
    mask = np.zeros(region.shape, np.uint32)
    mask[slices(region.box)] = 0xFFFFFFFF
    return any(mask.tobytes()[box[0] : box[0] + box[1]])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_rank_finds_what_it_wants_as_all_parts_together_tell_it(data: st.DataObject) -> None:
    model = data.draw(models())
    store = MemoryStore()
    ref = write_snapshot(store, model.root, model.parts)
    world_size = data.draw(st.sampled_from([1, 2, 3, 4, len(model.parts)]))
    wants = [data.draw(wants_of(model)) for _ in range(world_size)]

    found, _ = locate_together(store, ref, wants)

    manifests = read_manifests(store, ref)
    for rank, manifest in enumerate(found):
        view = manifests.view(rank if world_size == len(model.parts) else None)
        assert (manifest.spec, list(manifest.names)) == (view.spec, list(view.names))
        for name in manifest.names:
            expected, own = view.find_entry(name), manifest.find_entry(name)
            assert own._replace(chunks=(), dims=0) == expected._replace(chunks=(), dims=0)
            wanted = wants[rank].get(name, ())
            if wanted is None or world_size == 1:
                assert own == expected
                continue
            chunks = place_all(expected)
            is_wanted = {box: any(holds_some(box, expected.dims, each) for each in wanted) for box in chunks}
            assert place_all(own) == {box: chunk for box, chunk in chunks.items() if is_wanted[box]}


def make_rows(world_size: int, rows: int, tensors: int, *, dim: int = 0) -> Model:
    """Return square tensors of which each rank has some rows, or columns."""
    named = {f"layers.{number}.weight": (rows, rows) for number in range(tensors)}
    edges = [rows * rank // world_size for rank in range(world_size + 1)]
    parts: list[tuple[Json, list[Entry]]] = [(None, []) for _ in range(world_size)]
    for (name, shape), rank in product(named.items(), range(world_size)):
        box = cut(shape, dim, edges[rank], edges[rank + 1])
        parts[rank][1].append(place_boxes(name, shape, [box], rank + 1))
    root = [Entry(name, ITEM_BYTES * rows * rows, (), dims=1) for name in named]
    return Model(named, root, parts)


def cut(shape: tuple[int, ...], dim: int, start: int, stop: int) -> Box:
    starts, sizes = [0] * len(shape), list(shape)
    starts[dim], sizes[dim] = start, stop - start
    return Box(tuple(starts), tuple(sizes))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_each_part_is_read_once_over_all_ranks(world_size: int) -> None:
    model = make_rows(5, 20, 3)
    store = Watched(MemoryStore())
    ref = write_snapshot(store, model.root, model.parts)

    locate_together(store, ref, [dict.fromkeys(model.shapes)] * world_size)

    keys = [key for key, _, _ in store.reads]
    assert sorted(keys) == sorted(manifest_key(file_id(number)) for number in range(6))
    assert all(key.startswith(MANIFESTS) for key in keys)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_receives_only_rows_that_hold_what_it_wants(dim: int) -> None:
    model = make_rows(8, 32, 6, dim=dim)
    store = MemoryStore()
    ref = write_snapshot(store, model.root, model.parts)
    wants: list[dict[str, Wanted]] = [
        {
            name: (Region(cut(shape, dim, 8 * rank, 8 * rank + 8), shape, ITEM_BYTES),)
            for name, shape in model.shapes.items()
        }
        for rank in range(4)
    ]

    found, ranks = locate_together(store, ref, wants)

    # Two of eight parts each; and whoever owns a name gets each row of it once.
    assert [manifest.num_chunks for manifest in found] == [2 * 6] * 4
    asked = [[message for message in each.received[0] if message] for each in ranks]
    router = Router.plan(read_manifests(store, ref).root, 4)
    owned = [sum(router.find_owner(name) == rank for name in model.shapes) for rank in range(4)]
    assert [bool(messages) for messages in asked] == [bool(count) for count in owned]
    assert router.owners == 2
    assert owned == [0, 3, 0, 3]


def test_nothing_wanted_is_nothing_found() -> None:
    model = make_rows(4, 16, 2)
    store = MemoryStore()
    ref = write_snapshot(store, model.root, model.parts)

    found, ranks = locate_together(store, ref, [{}, {}, {}])

    assert [manifest.num_chunks for manifest in found] == [0, 0, 0]
    assert [each.received[1] for each in ranks] == [[b""] * 3] * 3


def test_a_snapshot_of_one_manifest_is_read_by_one_rank() -> None:
    store = Watched(MemoryStore())
    entry = Entry("x", 4, (make_chunk("x", (), 4),))
    ref = _write(store, 0, None, [entry])

    found, _ = locate_together(store, ref, [{"x": None}] * 3)

    assert [manifest.find_entry("x") for manifest in found] == [entry] * 3
    assert len(store.reads) == 1


def test_parts_that_do_not_make_up_what_is_wanted_are_damage_for_all() -> None:
    model = make_rows(4, 16, 2)
    store = MemoryStore()
    ref = write_snapshot(store, model.root, [*model.parts[:3], (None, [])])

    def act(ranks: ThreadRanks) -> Manifest:
        return open_together(store, ref, ranks).locate({0: None} if ranks.rank == 2 else {})

    results = run_threads(3, act)

    assert all(isinstance(result, RankError) and "do not add up to" in str(result) for result in results)


def test_an_own_value_that_is_not_what_the_root_tells_is_damage() -> None:
    store = MemoryStore()
    own = Entry("own", 4, (make_chunk("own", (), 4),), spec="floats", rank=0)
    ref = write_snapshot(store, [Entry("own", 4, (), spec="ints", dims=1)], [(None, [own]), (None, [])])

    def act(ranks: ThreadRanks) -> Manifest:
        return open_together(store, ref, ranks).locate({0: None})

    results = run_threads(3, act)

    assert all(
        isinstance(result, Corrupt) and "'own': size or spec in the manifest of rank 0" in str(result)
        for result in results
    )


def test_many_ranks_share_few_owners_and_large_parts_need_more() -> None:
    root = Manifest(build_table(None, [Entry(f"t{number}", 0, ()) for number in range(1000)]), "here")
    few = Router.plan(root, 1024)
    large = ManifestRef(file_id(1), hash_bytes(b""), 1 << 20)
    names = [Entry(f"t{number}", 0, ()) for number in range(1000)]
    parts = [PartRef(large, hash_bytes(b""))] * 1024
    many = Router.plan(Manifest(build_table(None, names, parts), "here"), 1024)

    assert len({few.find_owner(name) for name in root.names}) == 32
    assert len({many.find_owner(name) for name in root.names}) == 128
    assert few.find_owner("t5") != few.find_owner("t6")
    assert 0 <= few.find_owner("elsewhere") < 1024


def test_a_row_of_bytes_is_cut_for_columns_and_rows_alike() -> None:
    shape = (6, 8)
    assert is_span(Box((1, 0), (2, 8)), shape)
    assert not is_span(Box((1, 2), (2, 3)), shape)
    model = make_rows(6, 12, 1)
    store = MemoryStore()
    ref = write_snapshot(store, model.root, model.parts)
    box = Box((3, 2), (4, 3))
    wanted: dict[str, Wanted] = {"layers.0.weight": (Region(box, (12, 12), ITEM_BYTES),)}

    found, _ = locate_together(store, ref, [wanted, {}])

    # Rows 3 to 6 are in the parts that hold rows 2-3, 4-5 and 6-7.
    assert [chunk.box[0] for chunk in found[0].entry(0).chunks] == [2 * 48, 4 * 48, 6 * 48]
    assert found[0].entry(0).dims == 1


def test_the_view_of_a_rank_is_told_by_the_exchange_itself() -> None:
    model = make_rows(2, 4, 1)
    store = MemoryStore()
    ref = write_snapshot(store, model.root, model.parts)

    results = run_threads(2, lambda ranks: open_together(store, ref, ranks))

    heads = [result.heads for result in results if isinstance(result, ChunkExchange)]
    assert [each.num_chunks for each in heads] == [0, 0]
    assert [each.entry(0).rank for each in heads] == [NO_RANK, NO_RANK]
