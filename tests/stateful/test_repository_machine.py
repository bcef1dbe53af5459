"""A repository against a dict: whatever is done in whatever order, it shows what the dict holds."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from types import SimpleNamespace
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.errors import LeaseLost, NameInUse, NotFound
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format import layout
from holdfast.repo.format.layout import INDEX, LEASES, MANIFESTS, MARKS, PACKS, SNAPSHOTS, TAGS
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.generations import iter_stems
from holdfast.repo.names.leases import EXPIRE_S
from holdfast.repo.names.roots import is_settled, iter_needed, read_leases
from holdfast.repo.names.snapshots import (
    CommittedSnapshot,
    Tag,
    delete_snapshot,
    delete_tag,
    iter_names,
    iter_tags,
    read_snapshot,
    set_tag,
)
from holdfast.repo.upkeep.collect import Rules, collect, iter_marks, plan_collect, publish_mark
from holdfast.repo.upkeep.prune import Keep, apply_prune, read_prune_plan
from holdfast.repo.upkeep.repair import apply_repair, plan_repair, rebuild_index
from holdfast.repo.upkeep.transfer import apply_repack, copy_snapshot, plan_repack
from holdfast.repo.write.writer import Request, WriteOptions, save
from holdfast.testing.faults import Crashed, Fault, FaultyStore
from tests.faults.hooked_store import HookedStore
from tests.faults.scenario import Content, check_store, random_bytes, read_content
from tests.kit.deltas import trained

NAMES: Final = ("run/1", "run/2", "run/10", "other")
TAG_NAMES: Final = ("best", "latest")
PIECES: Final = {seed: random_bytes(seed, size) for seed, size in [("a", 700), ("b", 900), ("c", 5_000), ("d", 20)]}
NOW: Final = Rules(min_age_s=0.0, expire_s=0.0)
"""Takes everybody for dead at once."""
NEVER: Final = Rules(min_age_s=0.0, expire_s=1e12)
USUAL: Final = Rules(min_age_s=60.0)

names = st.sampled_from(NAMES)
tag_names = st.sampled_from(TAG_NAMES)


def make_content(seeds: Collection[str], step: int | None) -> Content:
    """Return pieces, and weights, which differ from one step to the next in few bits and so become deltas."""
    return {seed: PIECES[seed] for seed in sorted(seeds)} | ({} if step is None else {"w": trained(step, 6_000)})


contents = st.builds(
    make_content, st.sets(st.sampled_from(sorted(PIECES)), min_size=1), st.sampled_from([None, 0, 1, 2, 3])
)
rules = st.sampled_from([NOW, NEVER, USUAL])
# Early steps take the lease, late ones commit and release; an ordinary save takes about fifty.
moments = st.integers(1, 60)


class RepositoryMachine(RuleBasedStateMachine):
    """One store, a second one to copy to, and what both should hold."""

    def __init__(self) -> None:
        super().__init__()
        # Ids that are the same in every run, so that what fails can be repeated and made smaller.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(layout, "os", SimpleNamespace(urandom=random.Random(0).randbytes))
        self.make_stores()
        self.held: dict[str, Content] = {}
        self.held_second: dict[str, Content] = {}
        self.tags: dict[str, str] = {}
        self.repo: Repository

    def make_stores(self) -> None:
        """Make the two stores, and the clock of both."""
        clock = VirtualClock()
        self.advance: Callable[[float], None] = clock.advance
        self.store: ObjectStore = MemoryStore(clock=clock)
        self.second: ObjectStore = MemoryStore("memory://second", clock=clock)

    @initialize(name=names, content=contents)
    def begin(self, name: str, content: Content) -> None:
        self.repo = open_repository(self.store, create=True)
        self._save(self.store, name, content, overwrite=False)
        self.held[name] = content

    def _save(self, store: ObjectStore, name: str, content: Content, *, overwrite: bool) -> bool:
        """Save and tell whether the name held the same already."""
        repo = self.repo if store is self.store else open_repository(store)
        sources = [BytesSource(entry, data, item_bytes=2) for entry, data in content.items()]
        return save(
            repo, Request(name, sources, options=WriteOptions(overwrite=overwrite, compression="small", delta=3))
        ).existed

    @rule(name=names, content=contents)
    def save_or_be_refused(self, name: str, content: Content) -> None:
        if name in self.held and self.held[name] != content:
            with pytest.raises(NameInUse):
                self._save(self.store, name, content, overwrite=False)
            return
        is_held = name in self.held
        assert self._save(self.store, name, content, overwrite=False) <= is_held
        self.held[name] = content

    @rule(name=names, content=contents)
    def overwrite(self, name: str, content: Content) -> None:
        self._save(self.store, name, content, overwrite=True)
        self.held[name] = content

    @rule(name=names)
    def delete(self, name: str) -> None:
        if name in self.held:
            delete_snapshot(self.store, name)
            del self.held[name]
        else:
            with pytest.raises(NotFound):
                delete_snapshot(self.store, name)

    @rule(tag=tag_names, data=st.data())
    def tag(self, tag: str, data: st.DataObject) -> None:
        if self.held:
            name = data.draw(st.sampled_from(sorted(self.held)))
            set_tag(self.store, tag, read_snapshot(self.store, name), move=True)
            self.tags[tag] = name

    @rule(tag=tag_names)
    def untag(self, tag: str) -> None:
        if self.tags.pop(tag, None):
            delete_tag(self.store, tag)

    @rule(last=st.integers(1, 3))
    def prune(self, last: int) -> None:
        plan = read_prune_plan(self.store, "", Keep(last=last))
        deleted = {snapshot.name for snapshot in apply_prune(self.store, plan).deleted}
        assert deleted.isdisjoint(self.tags.values())
        assert len(self.held.keys() - deleted) >= min(last, len(self.held))
        for name in deleted:
            del self.held[name]

    @rule(seconds=st.sampled_from([1.0, 100.0, EXPIRE_S, 1e5]))
    def wait(self, seconds: float) -> None:
        self.advance(seconds)

    @rule(how=rules)
    def collect(self, how: Rules) -> None:
        collect(self.store, how)

    @rule()
    def mark_only(self) -> None:
        """Begin a collection that somebody else has to finish."""
        plan = plan_collect(self.store, min_age_s=0.0)
        marked = {key for mark in iter_marks(self.store) for key in mark.keys}
        fresh = [info for info in plan.dead if info.key not in marked]
        if fresh:
            publish_mark(self.store, fresh)

    @rule(at=moments, fault=st.sampled_from([Fault.CRASH, Fault.CRASH_AFTER]), how=rules)
    def collect_and_die(self, at: int, fault: Fault, how: Rules) -> None:
        with suppress(Crashed):
            collect(FaultyStore(self.store, fault=fault, at=at), how)

    @rule(name=names, content=contents, at=moments, fault=st.sampled_from([Fault.CRASH, Fault.CRASH_AFTER]))
    def save_and_die(self, name: str, content: Content, at: int, fault: Fault) -> None:
        try:
            self._save(FaultyStore(self.store, fault=fault, at=at), name, content, overwrite=True)
        except Crashed:
            # The old or the new; whoever looks sees which.
            shown = _read_all(self.store).get(name)
            assert shown in (content, self.held.get(name))
            if shown is not None:
                self.held[name] = shown
            return
        self.held[name] = content

    @rule(name=names, content=contents, at=moments, how=rules)
    def save_while_somebody_collects(self, name: str, content: Content, at: int, how: Rules) -> None:
        """Let a whole collection happen between two operations of a save, which it may take for dead."""
        hooked = HookedStore(self.store, before=_at(at, lambda: _collect(self.store, how)))
        try:
            self._save(hooked, name, content, overwrite=True)
        except LeaseLost:
            assert how is not NEVER
            return
        self.held[name] = content

    @rule(name=names, content=contents, other=contents, at=moments, how=rules)
    def collect_while_somebody_saves(self, name: str, content: Content, other: Content, at: int, how: Rules) -> None:
        """Let whole saves and a delete happen between two operations of a collection."""

        def act() -> None:
            self._save(self.store, name, content, overwrite=True)
            delete_snapshot(self.store, name)
            self._save(self.store, name, other, overwrite=False)
            self.held[name] = other

        collect(HookedStore(self.store, before=_at(at, act)), how)

    @rule(share=st.sampled_from([0.0, 0.5]))
    def repack(self, share: float) -> None:
        current = [found for found in iter_names(self.store) if isinstance(found, CommittedSnapshot)]
        apply_repack(self.repo, plan_repack(self.repo, current, dead_share=share))

    @rule(at=moments, how=rules)
    def repack_while_somebody_collects(self, at: int, how: Rules) -> None:
        repo = open_repository(HookedStore(self.store, before=_at(at, lambda: _collect(self.store, how))))
        with suppress(LeaseLost):
            current = [found for found in iter_names(repo.store) if isinstance(found, CommittedSnapshot)]
            apply_repack(repo, plan_repack(repo, current, dead_share=0.0))

    @rule()
    def repair(self) -> None:
        plan = plan_repair(self.repo)
        assert plan.losses == ()
        apply_repair(self.repo, plan)
        assert plan_repair(self.repo).actions == ()

    @rule()
    def reopen(self) -> None:
        self.repo = open_repository(self.store)

    @rule()
    def lose_the_index(self) -> None:
        for info in self.store.list(INDEX):
            self.store.delete(info.key)
        rebuild_index(self.repo)
        assert rebuild_index(self.repo) == 0

    @rule(which=st.integers(0, 7), position=st.integers(0, 4095))
    def damage_the_index(self, which: int, position: int) -> None:
        fragments = self.store.list(INDEX)
        if fragments:
            info = fragments[which % len(fragments)]
            whole = bytearray(self.store.read(info.key, limit_bytes=info.size_bytes))
            whole[position % len(whole)] ^= 1
            self.store.delete(info.key)
            self.store.create(info.key, bytes(whole))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def copy_there(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        target = open_repository(self.second, create=True)
        copy_snapshot(self.repo, read_snapshot(self.store, name), target, overwrite=True)
        self.held_second[name] = self.held[name]

    @precondition(lambda self: self.held_second)
    @rule(data=st.data())
    def copy_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held_second)))
        copy_snapshot(open_repository(self.second), read_snapshot(self.second, name), self.repo, overwrite=True)
        self.held[name] = self.held_second[name]

    @invariant()
    def every_name_shows_what_the_dict_holds(self) -> None:
        assert _read_all(self.store) == self.held
        assert _read_all(self.second) == self.held_second
        for name in NAMES:
            if name not in self.held:
                with pytest.raises(NotFound):
                    read_snapshot(self.store, name)

    @invariant()
    def every_tag_points_where_it_should(self) -> None:
        assert {tag.name: tag.snapshot_name for tag in iter_tags(self.store) if isinstance(tag, Tag)} == self.tags

    @invariant()
    def a_check_finds_no_error(self) -> None:
        assert [found for found in check_store(self.store) if found.severity == "error"] == []

    def teardown(self) -> None:
        """Collect while nobody acts: only what is needed stays, and what must stay by the rules."""
        try:
            self._collect_quietly()
        finally:
            self.patch.undo()

    def collect_at_last(self) -> None:
        """Collect after a time that is longer than any that a rule asks for."""
        self.advance(1e13)
        collect(self.store, NOW)

    def _collect_quietly(self) -> None:
        self.collect_at_last()
        for name, content in self.held.items():
            # Whoever died between commit and release was fenced, so what it replaced stays until the next save.
            if not is_settled(self.store, read_snapshot(self.store, name)):
                self._save(self.store, name, content, overwrite=True)
        self.collect_at_last()
        needed = {
            key for found in iter_names(self.store) if isinstance(found, CommittedSnapshot)
            for key in iter_needed(self.store, found)
        }  # fmt: skip
        assert {info.key for prefix in (PACKS, MANIFESTS) for info in self.store.list(prefix)} == needed
        for prefix in (SNAPSHOTS, TAGS):
            assert [stem for stem, generations in iter_stems(self.store, prefix) if len(generations) > 1] == []
        assert {mark.stem for mark in iter_marks(self.store) if needed.intersection(mark.keys)} == {
            stem for stem, _ in iter_stems(self.store, MARKS)
        }
        assert {lease.state for lease in read_leases(self.store).values()} <= {"fenced"}, list(self.store.list(LEASES))
        self.every_name_shows_what_the_dict_holds()


def _read_all(store: ObjectStore) -> dict[str, Content]:
    return {
        found.name: read_content(store, found) for found in iter_names(store) if isinstance(found, CommittedSnapshot)
    }


def _collect(store: ObjectStore, how: Rules) -> None:
    collect(store, how)


def _at(count: int, act: Callable[[], None]) -> Callable[[str, str], None]:
    """Return a hook that acts before the `count`-th operation."""
    left = [count]

    def hook(_name: str, _key: str) -> None:
        # The threads of a pool come in any order.
        left[0] -= threading.current_thread() is threading.main_thread()
        if left[0] == 0:
            left[0] = -1
            act()

    return hook


class QuickMachine(RepositoryMachine):
    """Few and short runs, for every run of the tests."""


# Each step ends with a check of every byte.
TestRepository = QuickMachine.TestCase
TestRepository.settings = settings(max_examples=settings().max_examples // 6, stateful_step_count=25)

RepositoryMachine.TestCase.settings = settings(max_examples=settings().max_examples // 3, stateful_step_count=40)
TestAtLength = pytest.mark.slow(RepositoryMachine.TestCase)
