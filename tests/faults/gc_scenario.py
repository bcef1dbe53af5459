"""The verbs that look after space and damage, each with the store that it is done to, for the fault and power tests."""

from __future__ import annotations

from typing import Final

from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import INDEX, MARKS, PACKS, generation_key, lease_stem, new_lease_id, snapshot_stem
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.generations import create_generation
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot, set_tag
from holdfast.repo.upkeep.collect import Rules, collect, publish_mark
from holdfast.repo.upkeep.prune import Keep, apply_prune, read_prune_plan
from holdfast.repo.upkeep.repair import apply_repair, plan_repair
from holdfast.repo.upkeep.transfer import apply_repack, copy_snapshot, plan_repack
from holdfast.testing.faults import Crashed, Fault, FaultyStore
from tests.faults.damage import flip
from tests.faults.scenario import Content, Verb, random_bytes, save_content

# A lease that looks dead is dead: in these tests no other process works.
AT_ONCE: Final = Rules(min_age_s=0.0, expire_s=0.0)

SHARED: Final = random_bytes("shared", 3_000)
BIG: Final[Content] = {"shared": SHARED, "own": random_bytes("big", 40_000), "inline": b"big"}
SMALL: Final[Content] = {"shared": SHARED, "own": random_bytes("small", 2_000), "inline": b"small"}
OTHER: Final[Content] = {"shared": SHARED, "own": random_bytes("other", 2_500)}


def leave_dead_save(store: ObjectStore, name: str, content: Content, *, before: str) -> None:
    """Let a save die just before it creates the last thing below `before`: its lease and its files stay."""
    rehearsal = FaultyStore(_twin(store))
    save_content(rehearsal, name, content, overwrite=True)
    at = max(
        number for number, met in enumerate(rehearsal.log, 1) if met.name == "create" and met.key.startswith(before)
    )
    try:
        save_content(FaultyStore(store, fault=Fault.CRASH, at=at), name, content, overwrite=True)
    except Crashed:
        return
    raise AssertionError("the save did not die")


def _twin(store: ObjectStore) -> MemoryStore:
    twin = MemoryStore()
    for info in store.iter_objects(""):
        twin.create(info.key, store.read(info.key, limit_bytes=info.size_bytes))
    return twin


def prepare_garbage(store: ObjectStore) -> None:
    """Leave one of everything that a collector removes, beside two names and a tag that must stay."""
    save_content(store, "run/1", BIG)
    save_content(store, "run/2", SMALL)
    save_content(store, "run/1", OTHER, overwrite=True)
    save_content(store, "gone", {"own": random_bytes("gone", 6_000)})
    delete_snapshot(store, "gone")
    set_tag(store, "t", read_snapshot(store, "run/2"))
    leave_dead_save(store, "dead", {"own": random_bytes("dead", 5_000)}, before="manifests/")
    # Committed, but never released: what it replaced is still a root.
    leave_dead_save(store, "run/2", {**SMALL, "own": random_bytes("newer", 2_200)}, before="leases/")
    _leave_marks(store)


def _leave_marks(store: ObjectStore) -> None:
    """Leave what collectors that died have left: a mark, one that is torn, and the file of a lease that was removed."""
    dead = [info for info in store.iter_objects(PACKS) if info.key not in read_live(store).needs]
    publish_mark(store, dead[:1])
    store.create(generation_key(MARKS + new_lease_id(), 0), b"holdfast")
    lease_id = new_lease_id()
    fields = {"kind": "lease", "lease": lease_id, "state": "released", "write_id": "x", "purpose": "", "host": ""}
    create_generation(store, lease_stem(lease_id), 2, {**fields, "pid": 1, "time": 0.0}, durable=False)


def prepare_sparse(store: ObjectStore) -> None:
    """Leave a pack of which little is needed, by two names."""
    save_content(store, "run/1", BIG)
    save_content(store, "run/2", SMALL)
    save_content(store, "run/3", OTHER)
    delete_snapshot(store, "run/1")
    set_tag(store, "t", read_snapshot(store, "run/2"))


def prepare_damage(store: ObjectStore) -> None:
    """Leave a rotten pack all of whose chunks have another copy, no index, and torn records."""
    save_content(store, "run/1", SMALL)
    (rotten,) = store.iter_objects(PACKS)
    # Under another prefix and without the index these bytes are not found: they are stored twice.
    discard(store, INDEX)
    save_content(store, "elsewhere/2", SMALL)
    discard(store, INDEX)
    data = store.read(rotten.key, limit_bytes=1 << 20)
    store.delete(rotten.key)
    store.create(rotten.key, flip(data, 100))
    store.create(generation_key(snapshot_stem("torn"), 0), b"")
    store.create(generation_key(MARKS + new_lease_id(), 0), b"holdfast")


def discard(store: ObjectStore, prefix: str) -> None:
    for info in list(store.iter_objects(prefix)):
        store.delete(info.key)


def collect_all(store: ObjectStore) -> None:
    collect(store, AT_ONCE)


def prune_and_collect(store: ObjectStore) -> None:
    apply_prune(store, read_prune_plan(store, "run/", Keep(last=1)))
    collect(store, AT_ONCE)


def repack(store: ObjectStore) -> None:
    repo = open_repository(store)
    apply_repack(repo, plan_repack(repo, read_live(store).current))


def repair(store: ObjectStore) -> None:
    repo = open_repository(store)
    apply_repair(repo, plan_repair(repo))


def _make_source() -> MemoryStore:
    source = MemoryStore("memory://source")
    save_content(source, "run/1", {**BIG, "two chunks": random_bytes("two chunks", (1 << 20) + 5_000)})
    return source


SOURCE: Final = _make_source()


def copy(store: ObjectStore) -> int:
    """Copy into `store` and return how many bytes were moved."""
    target = open_repository(store, create=True)
    return copy_snapshot(open_repository(SOURCE), read_snapshot(SOURCE, "run/1"), target).new_bytes


def _copy(store: ObjectStore) -> None:
    copy(store)


def _prepare_nothing(_store: ObjectStore) -> None:
    return


def prepare_half(store: ObjectStore) -> None:
    """Hold some of what is to be copied, under another name."""
    save_content(store, "run/2", {"shared": SHARED, "other": random_bytes("two chunks", (1 << 20) + 5_000)})


COLLECT: Final = Verb("collect", prepare_garbage, collect_all)
PRUNE: Final = Verb("prune and collect", prepare_garbage, prune_and_collect)
REPACK: Final = Verb("repack", prepare_sparse, repack)
REPAIR: Final = Verb("repair", prepare_damage, repair)
COPY: Final = Verb("copy into nothing", _prepare_nothing, _copy)
COPY_HALF: Final = Verb("copy into half of it", prepare_half, _copy)
GC_VERBS: Final = (COLLECT, PRUNE, REPACK, REPAIR, COPY, COPY_HALF)
