"""Listings with a cache, in memory and in a file, against one without: equal answers, whatever is done between."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.errors import NotFound
from holdfast.objects.local.local_store import LocalStore
from holdfast.query import stored
from holdfast.query.select import parse_query, read_facts, select
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.listed import RecordCache, list_user_names
from holdfast.repo.names.snapshots import (
    CommittedSnapshot,
    delete_snapshot,
    delete_tag,
    iter_user_names,
    read_snapshot,
    set_tag,
)
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.write.writer import Request, WriteOptions, save

NAMES: Final = ("run/1", "run/2", "run/10", "other")
NOW: Final = Rules(min_age_s=0.0, expire_s=0.0)
WHERE: Final = "loss < 3 or tag = 'best'"

names = st.sampled_from(NAMES)


class ListingMachine(RuleBasedStateMachine):
    """One store in a directory; a cache that lives on, and one that is read from its file each time."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.repo = open_repository(LocalStore(self.folder / "s"), create=True)
        self.store = self.repo.store
        save(self.repo, Request("run/1", [BytesSource("x", b"1")]))
        self.store_id = self.repo.identity.store_id
        self.cache = RecordCache()

    @rule(name=names, loss=st.integers(0, 5), content=st.binary(max_size=3))
    def save(self, name: str, loss: int, content: bytes) -> None:
        metadata = {"metrics": {"loss": loss}}
        save(
            self.repo,
            Request(name, [BytesSource("x", content)], options=WriteOptions(metadata=metadata, overwrite=True)),
        )

    @rule(name=names)
    def delete(self, name: str) -> None:
        try:
            delete_snapshot(self.store, name)
        except NotFound:
            return

    @rule(name=names, tag=st.sampled_from(["best", "last"]))
    def tag(self, name: str, tag: str) -> None:
        try:
            set_tag(self.store, tag, read_snapshot(self.store, name), move=True)
        except NotFound:
            return

    @rule(tag=st.sampled_from(["best", "last"]))
    def untag(self, tag: str) -> None:
        try:
            delete_tag(self.store, tag)
        except NotFound:
            return

    @rule()
    def collect(self) -> None:
        collect(self.store, NOW)

    @rule(prefix=st.sampled_from(["run/", "none"]))
    def list_a_part(self, prefix: str) -> None:
        list_user_names(self.store, prefix, self.cache)

    @rule()
    def back_up(self) -> None:
        shutil.rmtree(self.folder / "backup", ignore_errors=True)
        shutil.copytree(self.folder / "s", self.folder / "backup")

    @precondition(lambda self: (self.folder / "backup").exists())
    @rule(name=names, loss=st.integers(0, 5))
    def restore_the_backup(self, name: str, loss: int) -> None:
        """An older state comes back: the next record of a name may have the key of one that was read before."""
        shutil.rmtree(self.folder / "s")
        shutil.copytree(self.folder / "backup", self.folder / "s")
        self.repo = open_repository(LocalStore(self.folder / "s"))
        self.store = self.repo.store
        self.save(name, loss, b"restored")

    @precondition(lambda self: any((self.folder / "cache").glob("*")))
    @rule(at=st.integers(0, 2000), delete=st.booleans())
    def damage_the_file(self, at: int, delete: bool) -> None:
        for path in (self.folder / "cache").iterdir():
            data = bytearray(path.read_bytes())
            data[at % len(data)] ^= 1
            path.write_bytes(data)
            if delete:
                path.unlink()

    @invariant()
    def the_answers_are_equal(self) -> None:
        if not hasattr(self, "folder"):
            return
        expected = [found for found in iter_user_names(self.store) if isinstance(found, CommittedSnapshot)]
        fresh = RecordCache()
        file = stored.CacheFile(str(self.folder / "cache"), self.store_id)
        file.read_into(fresh)
        for cache in (self.cache, fresh):
            found = list_user_names(self.store, "", cache)
            assert sorted(found, key=repr) == sorted(expected, key=repr)
            query = parse_query(where=WHERE, sort="-loss")
            asked = select(read_facts(self.store, expected, query), query)
            records = [each for each in found if isinstance(each, CommittedSnapshot)]
            answered = select(read_facts(self.store, records, query), query)
            assert [each.snapshot for each in answered] == [each.snapshot for each in asked]
        file.write_from(fresh)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


@pytest.fixture(autouse=True)
def writing_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MIN_NEW", 0)


ListingMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
TestListings = pytest.mark.usefixtures("writing_always")(ListingMachine.TestCase)
