"""A save during other events: marks appear, another save is first, sources change, hours pass, memory is short."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Sequence

import pytest

from holdfast.digest import Buffer
from holdfast.errors import HoldfastError, LeaseLost, NameInUse, SourceChanged
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.objects.protocol import ObjectStore, Upload
from holdfast.repo.format.layout import pack_key, snapshot_stem
from holdfast.repo.format.record import encode_record
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES
from holdfast.repo.names.generations import list_generations
from holdfast.repo.names.leases import RENEW_S
from holdfast.repo.write.writer import Request, WriteOptions, save
from tests.kit.saving import (
    MIB,
    Meanwhile,
    Watched,
    keys,
    load_bytes,
    new_repo,
    noise,
    only_pack,
    pack_of,
    read_entries,
    rot,
    save_bytes,
    snapshot_of,
)
from tests.kit.standing import put_under_lease, show_lease


def mark(store: MemoryStore, *marked: str) -> None:
    store.create("marks/0", encode_record({"kind": "mark", "keys": list(marked)}))


def test_chunks_marked_before_a_save_are_not_reused(store: MemoryStore) -> None:
    repo = new_repo(store)
    save_bytes(repo, "a", {"x": noise(5000)})
    marked = pack_of(repo, "a", "x").pack_id
    mark(store, pack_key(marked))
    save_bytes(repo, "b", {"x": noise(5000)})
    assert pack_of(repo, "b", "x").pack_id != marked


def test_chunks_marked_during_a_save_are_written_again(store: MemoryStore) -> None:
    entries = {"x": noise(3 * MIB), "y": noise(5000, 1), "z": b"inline", "new": noise(700, 2)}
    save_bytes(new_repo(store), "a", {"x": entries["x"], "y": entries["y"]})
    marked = pack_of(new_repo(store), "a", "x").pack_id
    repo = new_repo(Meanwhile(store, "manifests/", lambda: mark(store, pack_key(marked))))
    result = save_bytes(repo, "b", entries)
    used = {chunk.location.pack_id for e in read_entries(repo, "b").values() for chunk in e.chunks if chunk.location}
    assert marked not in used
    assert load_bytes(repo, "b") == entries
    assert result.new_bytes == result.logical_bytes


def test_a_save_whose_manifest_was_collected_says_that_its_lease_is_lost(store: MemoryStore) -> None:
    save_bytes(new_repo(store), "a", {"x": noise(5000)})
    marked, old = pack_of(new_repo(store), "a", "x").pack_id, keys(store, "manifests/")

    def collect() -> None:
        for key in set(keys(store, "manifests/")) - set(old):
            store.delete(key)

    def mark_then_collect_after_the_renewal() -> None:
        mark(store, pack_key(marked))
        watched.act_after("leases/", collect)

    watched = Meanwhile(store, "manifests/", mark_then_collect_after_the_renewal)
    with pytest.raises(LeaseLost, match="a garbage collection has removed what it wrote; save again"):
        save_bytes(new_repo(watched), "b", {"x": noise(5000)})


def test_a_mark_during_a_save_does_not_affect_inline_chunks(store: MemoryStore) -> None:
    save_bytes(new_repo(store), "a", {"x": noise(5000)})
    marked = pack_of(new_repo(store), "a", "x").pack_id
    repo = new_repo(Meanwhile(store, "manifests/", lambda: mark(store, pack_key(marked))))

    save_bytes(repo, "b", {"y": b"inline", "empty": b"", "z": b"too"}, spec={"a": 1})

    assert load_bytes(repo, "b") == {"y": b"inline", "empty": b"", "z": b"too"}


class Changing:
    """A source that gives other bytes when it is read again."""

    name, size_bytes = "changing", 5000
    spec: Json = None
    note: Json = None
    alias = 0
    cuts: Sequence[int] = ()
    item_bytes = 1

    def __init__(self, first: bytes) -> None:
        self._data = first

    def read(self, start: int, stop: int) -> memoryview:
        given, self._data = self._data, noise(self.size_bytes, 99)
        return memoryview(given)[start:stop]


def test_a_source_that_changed_when_it_must_be_read_again_commits_nothing(store: MemoryStore) -> None:
    save_bytes(new_repo(store), "a", {"x": noise(5000)})
    marked = pack_of(new_repo(store), "a", "x").pack_id
    repo = new_repo(Meanwhile(store, "manifests/", lambda: mark(store, pack_key(marked))))
    with pytest.raises(SourceChanged, match=r"nothing was committed\. Save again"):
        save(repo, Request("b", [Changing(noise(5000))]))
    assert list_generations(store, snapshot_stem("b")) == []
    assert keys(store, "leases/") == []


class WrittenTo(Watched):
    """When a pack is begun, another thread writes to the memory that is being saved."""

    def __init__(self, inner: ObjectStore, data: bytearray) -> None:
        super().__init__(inner)
        self._data = data

    def upload(self, key: str) -> Upload:
        self._data[100] ^= 1
        return super().upload(key)


def test_memory_that_changes_between_its_digest_and_the_pack_commits_nothing(store: MemoryStore) -> None:
    data = bytearray(noise(5000))
    repo = new_repo(WrittenTo(store, data))

    with pytest.raises(SourceChanged, match="'w' changed while it was being saved; nothing was committed"):
        save(repo, Request("a", [BytesSource("w", data)]))

    assert keys(store, "snapshots/") == keys(store, "leases/") == []


def test_a_save_overtaken_before_its_commit_raises_and_the_winner_stays(store: MemoryStore) -> None:
    racing = Meanwhile(store, "manifests/", lambda: save_bytes(new_repo(store), "a", {"x": b"winner"}))
    with pytest.raises(NameInUse, match="'a' was changed by another process"):
        save_bytes(new_repo(racing), "a", {"x": noise(5000)})
    assert load_bytes(new_repo(store), "a") == {"x": b"winner"}
    assert keys(store, "leases/") == []


def test_of_many_saves_of_one_name_exactly_one_wins(store: MemoryStore) -> None:
    save_bytes(new_repo(store), "before", {"x": b"1"})
    outcomes: list[int | str] = []

    def work(number: int) -> None:
        try:
            save_bytes(new_repo(store), "a", {"x": noise(2000, number)})
            outcomes.append(number)
        except NameInUse:
            outcomes.append("lost")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = (outcome for outcome in outcomes if outcome != "lost")
    assert isinstance(winner, int)
    assert load_bytes(new_repo(store), "a") == {"x": noise(2000, winner)}


class Slow:
    """A source whose every read takes a minute by the store's clock."""

    name = "slow"
    spec: Json = None
    note: Json = None
    alias = 0
    cuts: Sequence[int] = ()
    item_bytes = 1

    def __init__(self, data: bytes, clock: VirtualClock) -> None:
        self._data = data
        self._clock = clock

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def read(self, start: int, stop: int) -> memoryview:
        self._clock.advance(RENEW_S)
        return memoryview(self._data)[start:stop]


@pytest.mark.parametrize("held", [False, True])
def test_a_long_save_shows_that_it_lives_though_it_writes_nothing(
    store: MemoryStore, clock: VirtualClock, held: bool
) -> None:
    data = noise(12 * MIB)
    if held:
        save_bytes(new_repo(store), "a", {"x": data})
    leases: list[str] = []
    repo = new_repo(Meanwhile(store, "manifests/", lambda: leases.extend(keys(store, "leases/"))))
    save(repo, Request("b", [Slow(data, clock)]))
    assert len(leases) >= 2


class Forgetting(MemoryStore):
    """Takes packs and keeps nothing of them, so that a test measures the writer alone."""

    def upload(self, key: str) -> Upload:  # type: ignore[override]  # another kind of upload is the point
        return _Void(super().create, key)


class _Void(Upload):
    def __init__(self, create: Callable[[str, bytes], None], key: str) -> None:
        self._create = create
        self._key = key
        self._size = 0

    def append(self, *buffers: Buffer) -> None:
        self._size += sum(memoryview(buffer).nbytes for buffer in buffers)

    def commit(self) -> None:
        self._create(self._key, b"")

    def abort(self) -> None:
        return


class Generated:
    """Bytes made when they are read, no two chunks alike."""

    name, size_bytes = "generated", 300 * MIB
    spec: Json = None
    note: Json = None
    alias = 0
    cuts: Sequence[int] = ()
    item_bytes = 1

    def read(self, start: int, stop: int) -> memoryview:
        data = bytearray(stop - start)
        for first in range(start, stop, MIB):
            data[first - start : first - start + 8] = first.to_bytes(8, "little")
        return memoryview(data)


def test_memory_stays_in_its_budget_whatever_is_saved() -> None:
    repo = new_repo(Forgetting())
    tracemalloc.start()
    try:
        result = save(repo, Request("a", [Generated()]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.new_bytes == 300 * MIB
    assert peak < min(DEFAULT_BUDGET_BYTES, 64 * MIB)


class Failing:
    """A source that cannot be read to its end."""

    name, size_bytes = "failing", 20 * MIB
    spec: Json = None
    note: Json = None
    alias = 0
    cuts: Sequence[int] = ()
    item_bytes = 1

    def read(self, start: int, stop: int) -> memoryview:
        if start >= 15 * MIB:
            raise OSError("the disk is gone")
        return memoryview(bytes(stop - start))


def test_a_save_that_fails_leaves_nothing_visible_and_no_lease(store: MemoryStore) -> None:
    repo = new_repo(store)
    save_bytes(repo, "a", {"x": b"old"})
    with pytest.raises(OSError, match="the disk is gone"):
        save(repo, Request("a", [BytesSource("x", noise(5000)), Failing()], options=WriteOptions(overwrite=True)))
    assert load_bytes(repo, "a") == {"x": b"old"}
    assert keys(store, "leases/") == keys(store, "packs/") == []


class Vanishing(Watched):
    """Loses every index fragment as soon as it was listed."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        if key.startswith("index/") and start > 0:
            self.inner.delete(key)
        super().read_into(key, start, buffer)


def test_fragments_that_vanish_cost_only_space(store: MemoryStore) -> None:
    save_bytes(new_repo(store), "x/1", {"x": noise(5000)})
    repo = new_repo(Vanishing(store))
    result = save_bytes(repo, "y/1", {"x": noise(5000)})
    assert result.new_bytes in (0, 5000)
    assert load_bytes(repo, "y/1") == {"x": noise(5000)}


def test_a_save_after_one_that_failed_works(store: MemoryStore) -> None:
    repo = new_repo(store)
    with pytest.raises((HoldfastError, OSError)):
        save(repo, Request("a", [Failing()]))
    save_bytes(repo, "a", {"x": b"1"})
    assert snapshot_of(repo, "a").generation == 0


@pytest.mark.parametrize(("state", "existed"), [("live", False), ("fenced", False), ("released", True)])
def test_a_repeated_save_relies_only_on_a_save_that_has_ended(state: str, existed: bool) -> None:
    """One under way, or fenced, may still withdraw its record, and then nothing would be there."""
    store = MemoryStore()
    save_bytes(new_repo(store), "a", {"x": noise(2000)})
    show_lease(store, "live")
    if state != "live":
        show_lease(store, state)
    put_under_lease(store, "a")

    result = save_bytes(new_repo(store), "a", {"x": noise(2000)})

    assert (result.existed, result.generation) == (existed, 0 if existed else 1)


def test_a_repeated_save_of_what_has_rotted_writes_it_again() -> None:
    store = MemoryStore()
    save_bytes(new_repo(store), "a", {"x": noise(2000)})
    rot(store, only_pack(store), 500)

    result = save_bytes(new_repo(store), "a", {"x": noise(2000)})

    assert (result.existed, result.generation) == (False, 1)
    assert load_bytes(new_repo(store), "a") == {"x": noise(2000)}
