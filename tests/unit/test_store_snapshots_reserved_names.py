"""Names that begin with "@" are Holdfast's own: users neither save nor list them, and can look at them all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast import BadName, Store
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.layout import is_reserved
from holdfast.repo.names.snapshots import DamagedName, iter_names, iter_user_names
from tests.kit.saving import new_repo, record_key, save_bytes

OWN = "@own/thing"


@pytest.fixture
def store() -> Store:
    """A store with a user's snapshot, and a newer one of Holdfast's."""
    store = holdfast.open("memory://")
    store.save("run/1", {"a": 1})
    save_bytes(store.repository, OWN, {"x": b"data"})
    return store


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda store: store.save("@x", {}), "snapshot"),
        (lambda store: store.save_async("@x", {}), "snapshot"),
        (lambda store: store.tag("@x", "run/1"), "tag"),
    ],
)
def test_a_user_cannot_give_such_a_name(store: Store, act: Callable[[Store], object], what: str) -> None:
    with pytest.raises(BadName) as caught:
        act(store)

    assert str(caught.value) == (
        f"{what} name '@x' is refused: names that begin with '@' are Holdfast's own; choose another"
    )


def test_an_at_sign_elsewhere_is_the_users(store: Store) -> None:
    store.save("run@home/@x", {"a": 1})

    assert is_reserved("@")
    assert not is_reserved("run@home/@x")
    assert [snapshot.name for snapshot in store.snapshots()] == ["run/1", "run@home/@x"]


def test_listings_leave_them_out_unless_asked(store: Store) -> None:
    assert [snapshot.name for snapshot in store.snapshots()] == ["run/1"]
    assert [snapshot.name for snapshot in store.snapshots("@")] == [OWN]
    latest, own = store.latest(), store.latest("@own/")
    assert latest is not None
    assert own is not None
    assert (latest.name, own.name) == ("run/1", OWN)


def test_pruning_leaves_them_alone_unless_asked(store: Store) -> None:
    store.save("run/2", {"a": 2})

    assert [snapshot.name for snapshot in store.prune(keep_last=1).deleted] == ["run/1"]
    assert [snapshot.name for snapshot in store.plan_prune("@", keep_every=7).delete] == [OWN]


def test_they_can_be_looked_at_loaded_and_deleted_by_name(store: Store) -> None:
    assert store.load(OWN) == {"x": b"data"}
    store.delete(OWN)

    assert list(iter_names(store.repository.store, "@")) == []


def test_damaged_ones_are_left_out_as_well(tmp_path: Path) -> None:
    repo = new_repo(LocalStore(tmp_path))
    for name in (OWN, "@" + "long/" * 60 + "x", "mine"):
        save_bytes(repo, name, {"x": b"data"})
    (tmp_path / record_key(OWN)).write_bytes(b"?" * 200)

    assert [found.name for found in iter_user_names(repo.store) if not isinstance(found, DamagedName)] == ["mine"]
    assert len(list(iter_user_names(repo.store))) == 1
    assert len(list(iter_names(repo.store))) == 3
