"""The part of the contract that is about keeping house: making ready, making durable, holding, clearing away."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ReadOnlyStore
from holdfast.objects.protocol import ObjectStore


class HousekeepingContract:
    """What a store must do besides keeping objects; `StoreContract` includes it."""

    def make_store(self, place: Path, *, read_only: bool = False) -> ObjectStore:
        """Return a store for the test that owns the empty directory `place`.

        The first call of a test returns an empty store; later ones with the same `place` must return another
        view of the same objects.
        """
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        """An empty store."""
        return self.make_store(tmp_path)

    def test_a_version_stays_while_nothing_changes_and_is_the_same_in_listings(self, store: ObjectStore) -> None:
        store.create("packs/one", b"first")
        version = store.stat("packs/one").version
        store.read("packs/one", limit_bytes=100)
        store.create("packs/two", b"second")
        assert store.stat("packs/one").version == version
        assert [info.version for info in store.list("packs/one")] == [version]

    def test_preparing_makes_no_object_and_may_be_repeated(self, store: ObjectStore) -> None:
        for _ in range(2):
            store.prepare(["packs/", "leases/"])
        assert store.list("") == []
        store.create("packs/one", b"first")
        store.prepare(["packs/"])
        assert [info.key for info in store.list("")] == ["packs/one"]

    def test_a_read_only_store_refuses_to_prepare(self, store: ObjectStore, tmp_path: Path) -> None:
        store.create("packs/one", b"first")
        with pytest.raises(ReadOnlyStore):
            self.make_store(tmp_path, read_only=True).prepare(["packs/"])

    def test_making_durable_changes_nothing_and_needs_nothing_to_be_there(self, store: ObjectStore) -> None:
        store.sync("tags/")
        store.create("tags/one", b"first")
        store.sync("tags/")
        assert [info.key for info in store.list("")] == ["tags/one"]

    def test_writers_hold_a_store_together_and_nobody_is_alone_meanwhile(self, store: ObjectStore) -> None:
        store.prepare(["packs/"])
        with store.hold(exclusive=False) as first, store.hold(exclusive=False) as second:
            assert first
            assert second
            with store.hold(exclusive=True) as is_alone:
                assert not is_alone

    def test_holding_leaves_no_object_behind_and_ends_with_an_error(self, store: ObjectStore) -> None:
        store.prepare(["packs/"])
        with pytest.raises(ZeroDivisionError), store.hold(exclusive=False):
            raise ZeroDivisionError
        with store.hold(exclusive=True):
            pass
        with store.hold(exclusive=False) as is_held:
            assert is_held
        assert store.list("") == []

    def test_clearing_away_spares_objects_and_what_is_young(self, store: ObjectStore) -> None:
        store.create("packs/one", b"first")
        with store.upload("packs/two") as upload:
            upload.append(b"sec")
            store.remove_debris(older_than_s=3600.0)
            upload.append(b"ond")
            upload.commit()
        assert store.remove_debris(older_than_s=0.0) == 0
        assert [info.key for info in store.list("")] == ["packs/one", "packs/two"]
