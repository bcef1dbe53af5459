"""One commit under one lease: its order, what it leaves when it fails, and fences and marks during the commit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import pytest

from holdfast.errors import CommitUnknown, LeaseLost, NameInUse, RankError, StoreError, StoreFull, StoreGone
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import LEASES, MANIFESTS, MARKS, PACKS, SNAPSHOTS, pack_key
from holdfast.repo.format.pack import NewChunk
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names import leases
from holdfast.repo.names.leases import ABANDONED_S, EXPIRE_S, RENEW_S
from holdfast.repo.names.roots import is_settled, read_leases
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState, read_name
from holdfast.repo.upkeep.collect import Rules, collect, fence
from holdfast.repo.write.transaction import Draft, ManifestPart, SnapshotContent, Transaction
from tests.faults.hooked_store import HookedStore, nth, once
from tests.kit.hooking import Hook
from tests.kit.saving import (
    inline_ref,
    keys,
    load_bytes,
    new_repo,
    noise,
    pack_of,
    read_entries,
    save_bytes,
    snapshot_of,
)
from tests.kit.standing import put_mark
from tests.kit.thread_ranks import ThreadRanks, run_threads
from tests.unit.repo.names.test_roots_rollback import save_twice

ENTRIES = [Entry("x", 4, (inline_ref(b"1234"),))]


def commit(transaction: Transaction, repo: Repository, name: str = "a") -> None:
    commit_part(transaction, Draft(read_name(repo.store, name)), ManifestPart(None, ENTRIES))


def commit_part(transaction: Transaction, draft: Draft, part: ManifestPart) -> CommittedSnapshot:
    content = SnapshotContent(draft)
    with transaction.sealing(content):
        content.parts = [part]
    return transaction.commit(content)


def commit_together(transaction: Transaction, make_parts: Callable[[], list[ManifestPart]]) -> int:
    content = SnapshotContent(Draft(NameState("a", None, 0)), root=ManifestPart(None, []))
    with transaction.sealing(content):
        content.parts = make_parts()
    return transaction.commit(content).generation


def every(name: str, prefix: str, act: Callable[[], None]) -> Callable[[str, str], None]:
    """Return a hook that acts whenever `name` meets a key starting with `prefix`."""

    def hook(met: str, key: str) -> None:
        if met == name and key.startswith(prefix):
            act()

    return hook


def fence_all(store: MemoryStore) -> None:
    for lease in read_leases(store).values():
        fence(store, lease)


@pytest.fixture
def ready(repo: Repository) -> Repository:
    """A repository that was made a store."""
    repo.verify_may_write()
    return repo


def test_nothing_happens_before_it_is_entered(ready: Repository) -> None:
    Transaction(ready, purpose="save")
    assert keys(ready.store, LEASES) == []


def test_inside_a_lease_tells_what_it_is_for(ready: Repository) -> None:
    with Transaction(ready, purpose="save 'a'") as transaction:
        assert read_leases(ready.store)[transaction.lease_id].purpose == "save 'a'"
        commit(transaction, ready)
    assert keys(ready.store, LEASES) == []
    assert load_bytes(ready, "a") == {"x": b"1234"}


def test_a_draft_says_what_the_record_holds(ready: Repository, clock: VirtualClock) -> None:
    clock.advance(77)
    with Transaction(ready, purpose="save") as transaction:
        draft = Draft(read_name(ready.store, "a"), metadata={"k": "v"}, time_s=5.0)
        made = commit_part(transaction, draft, ManifestPart([1], ENTRIES))
    assert made == snapshot_of(ready, "a")
    assert (made.time_s, made.metadata, made.num_entries, made.logical_bytes) == (5.0, {"k": "v"}, 1, 4)
    assert ready.recent.find("a") == made


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()])
def test_leaving_by_an_exception_leaves_nothing(ready: Repository, error: BaseException) -> None:
    with pytest.raises(type(error)), Transaction(ready, purpose="save") as transaction:  # noqa: PT012 - its order
        transaction.packer.append([NewChunk(inline_ref(b"z").digest, memoryview(b"z"), 64)])
        raise error
    assert keys(ready.store, LEASES) == keys(ready.store, PACKS) == keys(ready.store, SNAPSHOTS) == []


def test_leaving_without_a_commit_leaves_no_lease(ready: Repository) -> None:
    with Transaction(ready, purpose="save"):
        pass
    assert keys(ready.store, LEASES) == []


def test_what_is_marked_or_bad_is_avoided(ready: Repository) -> None:
    save_bytes(ready, "a", {"x": noise(2000, 1)})
    save_bytes(ready, "b", {"x": noise(2000, 2)})
    marked, bad = (pack_key(pack_of(ready, name, "x").pack_id) for name in "ab")
    put_mark(ready.store, [marked])
    ready.store.create(bad.replace("packs/", "bad/") + "@00000000", b"")
    with Transaction(ready, purpose="save") as transaction:
        assert transaction.avoid == {marked, bad}


def test_a_collection_that_was_given_up_is_mentioned(
    ready: Repository, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    put_mark(ready.store, [])
    clock.advance(ABANDONED_S + 1)
    with caplog.at_level(logging.WARNING):
        save_bytes(ready, "a", {"x": b"1"})
    assert "a garbage collection was given up" in caplog.text


def test_who_is_fenced_before_the_commit_commits_nothing(ready: Repository, store: MemoryStore) -> None:
    with pytest.raises(LeaseLost), Transaction(ready, purpose="save") as transaction:  # noqa: PT012 - its order
        fence_all(store)
        commit(transaction, ready)
    assert keys(store, SNAPSHOTS) == []


def test_marks_that_never_end_make_it_give_up(ready: Repository, store: MemoryStore) -> None:
    save_bytes(ready, "a", {"x": noise(2000)})
    entry = read_entries(ready, "a")["x"]
    put_mark(store, [pack_key(pack_of(ready, "a", "x").pack_id)])
    with pytest.raises(LeaseLost, match="garbage collections keep marking chunks that it uses"):  # noqa: PT012 - its loop
        with Transaction(ready, purpose="save") as transaction:
            content = SnapshotContent(Draft(read_name(store, "b")), parts=[ManifestPart(None, [entry])])
            while not content.whole or content.is_stale:
                with transaction.sealing(content):
                    pass
    assert read_name(store, "b").snapshot is None


def test_a_name_taken_meanwhile_is_a_conflict_and_only_leaves_a_manifest(ready: Repository) -> None:
    state = read_name(ready.store, "a")
    save_bytes(ready, "a", {"x": b"theirs"})
    manifests = len(keys(ready.store, MANIFESTS))
    with pytest.raises(NameInUse), Transaction(ready, purpose="save") as transaction:
        commit_part(transaction, Draft(state), ManifestPart(None, ENTRIES))
    assert load_bytes(ready, "a") == {"x": b"theirs"}
    assert keys(ready.store, LEASES) == []
    assert len(keys(ready.store, MANIFESTS)) == manifests + 1


def test_a_save_that_is_interrupted_when_its_record_is_there_keeps_its_fence(
    ready: Repository, store: MemoryStore
) -> None:
    """Without the fence the record would count as settled, although the collector may have removed its bytes."""

    def interrupt() -> None:
        fence_all(store)
        raise KeyboardInterrupt

    repo = new_repo(HookedStore(store, after=once("create", SNAPSHOTS, interrupt)))
    with pytest.raises(KeyboardInterrupt), Transaction(repo, purpose="save") as transaction:
        commit(transaction, repo)
    assert not is_settled(store, snapshot_of(ready, "a"))
    assert [lease.state for lease in read_leases(store).values()] == ["fenced"]


@pytest.mark.parametrize(("name", "prefix"), [("create", SNAPSHOTS), ("create", LEASES), ("delete", LEASES)])
def test_memory_that_runs_out_once_the_record_may_be_there_leaves_the_commit_unknown(
    name: str, prefix: str, ready: Repository, store: MemoryStore
) -> None:
    def fail() -> None:
        if keys(store, SNAPSHOTS):
            raise MemoryError

    repo = new_repo(HookedStore(store, after=every(name, prefix, fail)))
    with pytest.raises(CommitUnknown, match="check what 'a' contains, or save again") as caught:
        with Transaction(repo, purpose="save") as transaction:
            commit(transaction, repo)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert caught.value.name == "a"
    assert load_bytes(ready, "a") == {"x": b"1234"}


def test_memory_that_runs_out_before_the_record_is_a_memory_error(ready: Repository, store: MemoryStore) -> None:
    def fail() -> None:
        raise MemoryError

    repo = new_repo(HookedStore(store, after=once("create", MANIFESTS, fail)))
    with pytest.raises(MemoryError), Transaction(repo, purpose="save") as transaction:
        commit(transaction, repo)
    assert keys(store, SNAPSHOTS) == []


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_store_that_vanishes_during_a_save_gets_no_record(
    ready: Repository, store: MemoryStore, is_replaced: bool
) -> None:
    def vanish() -> None:
        for key in store.contents():
            store.delete(key)
        if is_replaced:
            new_repo(store).verify_may_write()

    repo = new_repo(HookedStore(store, after=once("create", MANIFESTS, vanish)))
    with pytest.raises(StoreGone):
        save_bytes(repo, "a", {"x": noise(5000)})
    assert keys(store, SNAPSHOTS) == []


def test_the_lease_is_renewed_while_the_coordinator_waits_for_other_ranks(
    ready: Repository, store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[Callable[[], bool]] = []
    is_waiting = threading.Event()

    @contextmanager
    def beating(beat: Callable[[], bool], *, every_s: float, name: str) -> Iterator[None]:
        assert every_s < RENEW_S
        beats.append(beat)
        yield
        beats.remove(beat)

    monkeypatch.setattr(leases, "beating", beating)

    def work_long() -> None:
        assert is_waiting.wait(20)
        for _ in range(ceil(EXPIRE_S / RENEW_S) + 1):
            clock.advance(RENEW_S)
            for beat in beats:
                beat()
        collect(store, Rules(min_age_s=0.0))

    def act(ranks: ThreadRanks) -> int:
        def make_parts() -> list[ManifestPart]:
            if ranks.is_coordinator:
                is_waiting.set()
            else:
                work_long()
            return [ManifestPart(None, ENTRIES)]

        with Transaction(ready, purpose="save", ranks=ranks) as transaction:
            return commit_together(transaction, make_parts)

    assert run_threads(2, act) == [0, 0]
    assert beats == []


class HeldStore(HookedStore):
    """Counts the locks at this moment; simulates the same store as seen by another host."""

    held = 0

    @contextmanager
    def hold(self, *, exclusive: bool) -> Iterator[bool]:
        with super().hold(exclusive=exclusive) as is_held:
            self.held += 1
            yield is_held
            self.held -= 1


def test_every_rank_holds_the_store_while_it_writes(ready: Repository) -> None:
    """A collector on its host must not find itself alone: it would remove what is being written."""
    stores = [HeldStore(ready.store) for _ in range(3)]
    held: dict[int, int] = {}

    def act(ranks: ThreadRanks) -> int:
        def make_parts() -> list[ManifestPart]:
            held[ranks.rank] = stores[ranks.rank].held
            return [ManifestPart(None, ENTRIES)]

        with Transaction(new_repo(stores[ranks.rank]), purpose="save", ranks=ranks) as transaction:
            return commit_together(transaction, make_parts)

    assert run_threads(3, act) == [0, 0, 0]
    assert held == {0: 1, 1: 1, 2: 1}
    assert [store.held for store in stores] == [0, 0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_writes_gives_signs_of_life_and_notices_that_another_has_failed(
    ready: Repository, monkeypatch: pytest.MonkeyPatch, hook: Hook, rank: int
) -> None:
    beats: list[int] = []

    def notice(ranks: ThreadRanks) -> None:
        if ranks.rank == rank:
            raise RankError("another rank has failed")

    monkeypatch.setattr(ThreadRanks, "beat", lambda ranks: beats.append(ranks.rank))
    hook(ThreadRanks, "check_failures", notice)

    def act(ranks: ThreadRanks) -> int:
        with Transaction(ready, purpose="save", ranks=ranks) as transaction:

            def make_parts() -> list[ManifestPart]:
                chunk = NewChunk(inline_ref(b"z").digest, memoryview(b"z"), 64)
                transaction.packer.append([chunk])
                return [ManifestPart(None, ENTRIES)]

            return commit_together(transaction, make_parts)

    ends = run_threads(2, act)

    assert all(isinstance(end, RankError) and list(end.failures) == [rank] for end in ends)
    assert sorted(beats) == [0, 1]
    assert read_name(ready.store, "a").snapshot is None


def test_a_name_taken_meanwhile_is_a_rank_error_on_all_ranks(ready: Repository) -> None:
    save_bytes(ready, "a", {"x": b"theirs"})

    def act(ranks: ThreadRanks) -> int:
        with Transaction(ready, purpose="save", ranks=ranks) as transaction:
            return commit_together(transaction, lambda: [ManifestPart(None, ENTRIES)])

    ends = run_threads(2, act)

    assert all(isinstance(end, RankError) and end.failures[0].type_name == "NameInUse" for end in ends)
    assert load_bytes(ready, "a") == {"x": b"theirs"}
    assert keys(ready.store, LEASES) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_record_that_the_store_refuses_is_no_commit(ready: Repository, store: MemoryStore, world_size: int) -> None:
    def refuse() -> None:
        raise StoreFull("no room for the record")

    repo = new_repo(HookedStore(store, before=once("create", SNAPSHOTS, refuse)))

    def act(ranks: ThreadRanks) -> int:
        with Transaction(repo, purpose="save", ranks=ranks) as transaction:
            return commit_together(transaction, lambda: [ManifestPart(None, ENTRIES)])

    ends = run_threads(world_size, act)

    assert all(isinstance(end, RankError) and end.failures[0].type_name == "StoreFull" for end in ends)
    assert keys(store, SNAPSHOTS) == keys(store, LEASES) == []


def test_leaving_by_an_exception_removes_the_file_of_an_open_pack(tmp_path: Path) -> None:
    repo = new_repo(LocalStore(tmp_path))
    repo.verify_may_write()
    with pytest.raises(KeyboardInterrupt), Transaction(repo, purpose="save") as transaction:  # noqa: PT012 - its order
        transaction.packer.append([NewChunk(inline_ref(b"z").digest, memoryview(b"z"), 64)])
        assert list((tmp_path / "packs").iterdir()) != []
        raise KeyboardInterrupt
    assert list((tmp_path / "packs").iterdir()) == []


def fence_and_take(store: MemoryStore) -> Callable[[], None]:
    """Return what fences live leases and deletes the manifests that were written since now."""
    old = keys(store, MANIFESTS)

    def act() -> None:
        for lease in read_leases(store).values():
            if lease.is_live:
                fence(store, lease)
        for key in keys(store, MANIFESTS):
            if key not in old:
                store.delete(key)

    return act


def test_a_fenced_save_that_somebody_else_has_overwritten_cannot_withdraw_and_says_so(
    ready: Repository, store: MemoryStore
) -> None:
    def overwrite() -> None:
        save_bytes(new_repo(store), "a", {"x": b"theirs"}, overwrite=True)

    after = once("create", SNAPSHOTS, fence_and_take(store))
    repo = new_repo(HookedStore(store, after=after, before=nth(2, "create", SNAPSHOTS, overwrite)))
    with pytest.raises(CommitUnknown, match="could not be withdrawn"):
        with Transaction(repo, purpose="save") as transaction:
            commit(transaction, repo)
    assert load_bytes(ready, "a") == {"x": b"theirs"}


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_fenced_save_withdraws_in_favour_of_an_unsettled_one_only_if_that_is_not_marked(
    ready: Repository, store: MemoryStore, is_marked: bool
) -> None:
    save_twice(ready, ["fenced"])
    held = snapshot_of(ready, "a")
    put_mark(store, [pack_key(pack_of(ready, "a", "x").pack_id)])
    take = fence_and_take(store)

    def act() -> None:
        take()
        for key in [] if is_marked else keys(store, MARKS):
            store.delete(key)

    repo = new_repo(HookedStore(store, after=once("create", SNAPSHOTS, act)))
    with pytest.raises(CommitUnknown if is_marked else LeaseLost):
        with Transaction(repo, purpose="save") as transaction:
            commit(transaction, repo)
    newest = snapshot_of(ready, "a")
    assert newest.generation == held.generation + (1 if is_marked else 2)
    assert (newest.digest == held.digest) == (not is_marked)


def test_a_lease_that_is_given_up_and_cannot_be_removed_is_released(store: MemoryStore, ready: Repository) -> None:
    def refuse(name: str, key: str) -> None:
        if name == "delete" and key.startswith(LEASES):
            raise StoreError("input/output error", key=key)

    with Transaction(new_repo(HookedStore(store, before=refuse)), purpose="save"):
        pass
    assert [lease.state for lease in read_leases(store).values()] == ["released"]


def test_an_overtaken_save_that_was_fenced_keeps_its_fence(store: MemoryStore, ready: Repository) -> None:
    """Its record stands below another's: without the fence it would count as settled."""

    def overtake() -> None:
        fence_all(store)
        save_bytes(new_repo(store), "a", {"x": b"theirs"}, overwrite=True)

    repo = new_repo(HookedStore(store, after=once("create", SNAPSHOTS, overtake)))
    with pytest.raises(NameInUse), Transaction(repo, purpose="save") as transaction:
        commit(transaction, repo)
    assert [lease.state for lease in read_leases(store).values()] == ["fenced"]
    assert load_bytes(ready, "a") == {"x": b"theirs"}
