"""A store, its mirror and a third store: prune never removes the last copy that any reachable store can prove.

Each store has a clock of its own. A process opens the mirror with options, as the environment says, or not at all; the
environment may lead to another server. In between, both sides delete, overwrite, collect, lose files, and are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Literal

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from holdfast.errors import HoldfastError, StoreError
from holdfast.mirror import plan as mirror_plan
from holdfast.mirror import retention
from holdfast.mirror import setting as mirror_setting
from holdfast.mirror import worker as mirror_worker
from holdfast.mirror.mirror import Mirror
from holdfast.mirror.plan import DeletedName, MirrorListing, MirrorRefusal
from holdfast.mirror.retention import keep_unmirrored
from holdfast.mirror.setting import MirrorSetting, RecordedMirror
from holdfast.mirror.upload import UploadJob, UploadReport, upload_all
from holdfast.mirror.worker import UploadWorker
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.storage_options import StorageOptions
from holdfast.repo.format.layout import CONFIG, MANIFESTS, PACKS, SNAPSHOTS
from holdfast.repo.handle.config import read_config
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot, delete_snapshot, iter_user_names, read_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.upkeep.prune import Keep, apply_prune, read_prune_plan
from holdfast.repo.upkeep.transfer import copy_snapshot
from tests.kit.saving import keys, load_bytes, noise, replace_object, save_bytes

URL: Final = "s3://bucket/mirror"
NAMES: Final = ("run/1", "run/2", "run/3")
PIECES: Final = [noise(3000, seed) for seed in range(3)]
COLLECT: Final = Rules(min_age_s=0.0, expire_s=0.0)

names = st.sampled_from(NAMES)
contents = st.integers(0, len(PIECES) - 1)
places = st.sampled_from(["here", "there", "third"])
Content = tuple[str, int]
"""A name, and which of the pieces it has."""


def read_contents(store: MemoryStore) -> dict[str, Content]:
    """Return what a store has, by the bytes and not by its records alone: the truth that is compared with."""
    found: dict[str, Content] = {}
    for each in iter_user_names(store):
        with suppress(HoldfastError):
            if isinstance(each, CommittedSnapshot):
                seed = PIECES.index(load_bytes(open_repository(store), each.name)["x"])
                assert each.metadata == {"seed": seed}
                found[each.name] = each.name, seed
    return found


class MirrorMachine(RuleBasedStateMachine):
    """The three stores, and the process that has the first one open."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks = {place: VirtualClock() for place in ("here", "there", "third")}
        self.stores = {place: MemoryStore(f"memory://{place}", clock=clock) for place, clock in self.clocks.items()}
        self.environment: Literal["there", "third"] = "there"
        self.is_reachable = True
        self.deleted: dict[str, set[Content]] = {"there": set(), "third": set()}
        """What a user has deleted in each store that may be the mirror."""
        self.overwritten: dict[str, set[Content]] = {"there": set(), "third": set()}
        """What another machine has overwritten there: a process that had uploaded it does not look at it again."""
        self.damaged: set[str] = set()
        """Stores that have lost files; they may have to be repaired before they are complete again."""
        self.uploaded: set[str] = set()
        """Where something was uploaded to."""
        self.repo = open_repository(self.stores["here"], create=True)
        self.mirror: Mirror | None = None
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(mirror_setting, "open_store", self.open_place)
        # An upload is a step of its own, and not the work of a thread.
        self.patch.setattr(UploadWorker, "start", lambda worker: None)

    def teardown(self) -> None:
        self.patch.undo()

    def find_place(self, options: object) -> Literal["there", "third"]:
        """Return where a process arrives that opens the mirror: only with options, it is certainly the right place."""
        return "there" if options else self.environment

    def open_place(self, url: str, *, read_only: bool = False, storage_options: object = None) -> MemoryStore:
        assert url == URL
        if not self.is_reachable:
            raise StoreError(f"{url} cannot be reached")
        return self.stores[self.find_place(storage_options)]

    @property
    def target(self) -> Literal["there", "third"] | None:
        """Where this process uploads to."""
        return self.find_place(self.mirror._setting.options) if self.mirror else None

    @initialize(ahead=st.dictionaries(places, st.sampled_from([3600.0, -3600.0])), options=st.booleans())
    def begin(self, ahead: Mapping[str, float], options: bool) -> None:
        for place, seconds in ahead.items():
            self.clocks[place].advance(seconds)
        self.start_process("options" if options else "plain")

    @rule(how=st.sampled_from(["options", "plain", "none"]))
    def start_process(self, how: str) -> None:
        """Open the store anew: with a mirror and its options, with a mirror only, or without one."""
        self.repo, self.mirror = open_repository(self.stores["here"], create=True), None
        if how != "none":
            options = StorageOptions({"endpoint": "there"} if how == "options" else {})
            self.mirror = Mirror(self.repo, MirrorSetting(URL, False, options))

    @rule(place=places, seconds=st.sampled_from([1.0, 7200.0]))
    def advance(self, place: str, seconds: float) -> None:
        self.clocks[place].advance(seconds)

    def save(self, place: str, name: str, seed: int) -> None:
        repo = self.repo if place == "here" else open_repository(self.stores[place], create=True)
        before = read_contents(self.stores[place])
        if place != "here" and name in before:
            self.overwritten[place].add(before[name])
        save_bytes(repo, name, {"x": PIECES[seed]}, metadata={"seed": seed}, overwrite=True)
        self.deleted.get(place, set()).discard((name, seed))

    @rule(name=names, seed=contents)
    def save_here(self, name: str, seed: int) -> None:
        self.save("here", name, seed)

    @rule(place=places, name=names, seed=contents)
    def save_anywhere(self, place: str, name: str, seed: int) -> None:
        with suppress(HoldfastError):  # a store that has lost its config refuses
            self.save(place, name, seed)

    @rule(place=places, name=names)
    def delete(self, place: str, name: str) -> None:
        with suppress(HoldfastError):
            seed = read_snapshot(self.stores[place], name).metadata["seed"]
            assert isinstance(seed, int)
            delete_snapshot(self.stores[place], name)
            self.deleted.get(place, set()).add((name, seed))

    @rule(name=names, back=st.booleans())
    def copy(self, name: str, back: bool) -> None:
        """Copy a snapshot to the third store, or restore it from there with its old commit time."""
        other = open_repository(self.stores["third"], create=True)
        source, target = (other, self.repo) if back else (self.repo, other)
        with suppress(HoldfastError):
            copy_snapshot(source, read_snapshot(source.store, name), target, overwrite=True)
            self.deleted["third"] -= set() if back else set(read_contents(self.stores["third"]).values())

    @rule(place=places)
    def collect(self, place: str) -> None:
        with suppress(HoldfastError):
            collect(self.stores[place], COLLECT)

    @rule(below=st.sampled_from([PACKS, MANIFESTS, SNAPSHOTS, CONFIG]), is_cut=st.booleans())
    def lose(self, below: str, is_cut: bool) -> None:
        """Let the mirror lose files, or the ends of its packs."""
        self.damaged.add("there")
        store = self.stores["there"]
        for key in keys(store, PACKS if is_cut else below):
            if is_cut:
                replace_object(store, key, store.read(key, limit_bytes=1 << 20)[:2000])
            else:
                store.delete(key)

    @rule()
    def replace_mirror(self) -> None:
        """Put an empty place where the mirror was: the next upload makes it another store."""
        self.stores["there"] = MemoryStore("memory://there", clock=self.clocks["there"])
        self.deleted["there"].clear()
        self.overwritten["there"].clear()
        self.damaged.discard("there")

    @rule(environment=st.sampled_from(["there", "third"]), is_reachable=st.sampled_from([True, True, False]))
    def change_network(self, environment: Literal["there", "third"], is_reachable: bool) -> None:
        self.environment, self.is_reachable = environment, is_reachable

    def run_upload(self) -> bool:
        """Upload as the background does; return whether that succeeded."""
        assert self.mirror is not None
        assert self.target is not None
        worker = self.mirror._worker
        if not self.is_reachable:
            with pytest.raises(StoreError):
                worker._upload()
            return False
        self.uploaded.add(self.target)
        try:
            worker._upload()
        except HoldfastError:
            return False
        self.deleted[self.target] -= set(read_contents(self.stores[self.target]).values())
        return not worker.news.last_error

    @precondition(lambda self: self.mirror is not None)
    @rule()
    def upload(self) -> None:
        """After an upload, the mirror has all that was not deleted there, or saved there later with other content."""
        is_done, place = self.run_upload(), self.target
        if not is_done or place is None or place in self.damaged:
            return
        here, there = read_contents(self.stores["here"]), read_contents(self.stores[place])
        for name, content in here.items():
            if there.get(name) != content and content not in self.deleted[place] | self.overwritten[place]:
                assert name in there, f"{name} was not uploaded"
                times = [read_snapshot(self.stores[each], name).time_s for each in ("here", place)]
                assert times[0] < times[1], f"{name} was not uploaded"

    @rule(last=st.integers(1, 2))
    def prune(self, last: int) -> None:
        before = read_contents(self.stores["here"])
        plan = keep_unmirrored(self.repo, read_prune_plan(self.repo.store, "", Keep(last=last)))
        for name in (each.name for each in apply_prune(self.repo.store, plan).deleted):
            if self.mirror is None and not self.uploaded:
                continue  # the store has no mirror
            # Stores that something was uploaded to: another server with the same names may be anybody's.
            assert any(
                read_contents(self.stores[place]).get(name) == before[name] or before[name] in self.deleted[place]
                for place in self.uploaded
            ), f"the last copy of {name} was deleted"

    @precondition(lambda self: self.mirror is not None)
    @rule()
    def upload_and_prune(self) -> None:
        """What the mirror really has is pruned, so that no disk fills for nothing."""
        place = self.target
        if not self.run_upload() or place is None:
            return
        there = read_contents(self.stores[place])
        here = read_contents(self.stores["here"])
        plan = keep_unmirrored(self.repo, read_prune_plan(self.repo.store, "", Keep(last=1)))
        for each in plan.verdicts:
            if here[each.snapshot.name] == there.get(each.snapshot.name):
                reasons = [reason for reason in each.reasons if "mirror" in reason]
                assert not reasons, f"{each.snapshot.name} was kept, although the mirror has it: {reasons}"
        self.prune(1)


TestMirror = MirrorMachine.TestCase
TestMirror.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=15)


class LongMachine(MirrorMachine):
    """More and longer runs."""


TestAtLength = pytest.mark.slow(LongMachine.TestCase)
TestAtLength.settings = settings(max_examples=settings().max_examples * 5, stateful_step_count=30)


def open_as_the_environment_says(url: str, known: RecordedMirror, worker: UploadWorker | None) -> ObjectStore:
    return MirrorSetting(url).open_objects(read_only=True)


def refuse_what_was_ever_deleted(
    snapshot: CommittedSnapshot, there: MirrorListing
) -> CommittedSnapshot | MirrorRefusal | None:
    if isinstance(there.snapshots.get(snapshot.name), DeletedName):
        return MirrorRefusal(snapshot, "deleted", is_lacking=False)
    return JUDGE(snapshot, there)


def believe_any_store(
    url: str, store: ObjectStore, known: RecordedMirror, doomed: Mapping[str, CommittedSnapshot]
) -> Any:
    config = read_config(store)
    return COMPARE(url, store, replace(known, store_id=config.store_id if config else ""), doomed)


def rely_on_what_was_known_of_another_store(job: UploadJob, report: UploadReport) -> None:
    upload_all(replace(job, known_in=job.target.identity.store_id), report)


JUDGE, COMPARE = mirror_plan._judge, retention._compare
VARIANTS: Final[dict[str, tuple[object, str, object]]] = {
    "the options of the mirror are left out": (retention, "_open", open_as_the_environment_says),
    "any deletion is final": (mirror_plan, "_judge", refuse_what_was_ever_deleted),
    "a record is proof enough": (retention, "_read_faults", lambda store, copies: {}),
    "any store is believed": (retention, "_compare", believe_any_store),
    "what is known outlives the mirror": (mirror_worker, "upload_all", rely_on_what_was_known_of_another_store),
}
"""Known-bad variants: what is replaced, and by what."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_machine_finds_what_is_wrong(variant: str) -> None:
    class Wrong(MirrorMachine):
        def __init__(self) -> None:
            super().__init__()
            self.patch.setattr(*VARIANTS[variant])

    with pytest.raises(AssertionError, match=r"the last copy|was not uploaded|although the mirror has it"):
        run_state_machine_as_test(
            Wrong,
            settings=settings(max_examples=2000, stateful_step_count=30, derandomize=True, phases=[Phase.generate]),
        )
