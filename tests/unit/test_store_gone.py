"""A store that vanishes under an open handle: every change is refused, and nothing is made in its place."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest
import torch

import holdfast
from holdfast import CommitUnknown, NotAStore, Store, StoreGone
from holdfast.capture.record.observer import RecordingWarning
from holdfast.compile_cache.single_flight import single_flight
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.upkeep.transfer import copy_snapshot
from tests.faults.hooked_store import HookedStore, once

TREE: Final = {"w": torch.arange(2000.0)}
OTHER: Final = {"w": torch.arange(3000.0)}


def delete_tree(root: Path) -> None:
    shutil.rmtree(root)


def delete_contents(root: Path) -> None:
    """Leave an empty directory, as a filesystem does that is not mounted any more."""
    shutil.rmtree(root)
    root.mkdir()


def move_away(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def put_another_in_its_place(root: Path) -> None:
    move_away(root)
    other = root.with_name("other")
    with holdfast.open(other) as store:
        store.save("a", OTHER)
        store.save("b", TREE)
        store.save("c", OTHER)
        store.delete("c")
        store.tag("best", "a")
    other.rename(root)


def _import(store: Store) -> object:
    with TemporaryDirectory() as folder:
        torch.save({"w": torch.ones(3)}, f"{folder}/a.pt")
        return store.import_(f"{folder}/a.pt", "new")


CHANGES: Final[dict[str, Callable[[Store], object]]] = {
    "save": lambda store: store.save("new", TREE),
    "save, the same again": lambda store: store.save("b", TREE),
    "save_async": lambda store: store.save_async("new", TREE).wait(),
    "publish": lambda store: store.publish("new", TREE),
    "delete": lambda store: store.delete("a"),
    "tag": lambda store: store.tag("new", "a"),
    "untag": lambda store: store.untag("best"),
    "apply_prune": lambda store: store.apply_prune(store.plan_prune(keep_last=1)),
    "prune": lambda store: store.prune(keep_last=1),
    "gc": lambda store: store.gc(),
    "put": lambda store: store.put("new", __file__),
    "import_": _import,
}
READING: Final = frozenset(
    {
        "verify_import",
        "copy",
        "mirror",
        "get",
        "load",
        "load_into",
        "snapshot",
        "snapshots",
        "latest",
        "tags",
        "run",
        "runs",
        "diff_runs",
        "check",
        "diff",
    }
    | {"best", "bisect", "plan_prune", "statistics", "close", "repository", "url", "open_file", "manager"}
    | {"export", "export_async", "verify_export", "follow", "serve"}
)
RECORDING: Final = frozenset({"record", "compiler"})
"""Change the store by saves and leases alone, and let no trouble with it reach the training: see below."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = holdfast.open(tmp_path / "s")
    opened.save("a", TREE)
    opened.save("b", TREE)
    opened.tag("best", "a")
    return opened


def list_all(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*")) if root.exists() else []


def test_every_method_of_a_store_is_known_to_change_it_or_not() -> None:
    public = {name for name in dir(Store) if not name.startswith("_")}
    assert public == READING | RECORDING | {name.partition(",")[0] for name in CHANGES}


@pytest.mark.parametrize(
    ("change", "way"),
    [
        *((change, way) for change in CHANGES for way in (delete_contents, put_another_in_its_place)),
        ("save", delete_tree),
        ("save", move_away),
    ],
)
def test_a_change_is_refused_once_the_store_has_gone(
    store: Store, tmp_path: Path, change: str, way: Callable[[Path], None]
) -> None:
    way(tmp_path / "s")
    before = list_all(tmp_path)
    with pytest.raises(StoreGone, match="open it again") as caught:
        CHANGES[change](store)
    assert list_all(tmp_path) == before
    assert caught.value.expected_id == store.repository.identity.store_id != caught.value.found_id
    assert bool(caught.value.found_id) == (way is put_another_in_its_place)
    assert caught.value.expected_id in str(caught.value)


@pytest.mark.parametrize("way", [delete_tree, delete_contents, move_away])
def test_a_store_that_comes_back_is_used_again(store: Store, tmp_path: Path, way: Callable[[Path], None]) -> None:
    shutil.copytree(tmp_path / "s", tmp_path / "kept")
    way(tmp_path / "s")
    with pytest.raises(StoreGone):
        store.save("new", TREE)
    shutil.rmtree(tmp_path / "s", ignore_errors=True)
    (tmp_path / "kept").rename(tmp_path / "s")
    store.save("new", TREE)
    assert torch.equal(store.load("new")["w"], TREE["w"])


def test_nothing_is_copied_into_the_place_of_a_store_that_has_gone(store: Store, tmp_path: Path) -> None:
    target = holdfast.open(tmp_path / "target")
    target.save("x", TREE)
    delete_contents(tmp_path / "target")
    source = store.repository
    with pytest.raises(StoreGone):
        copy_snapshot(source, read_snapshot(source.store, "a"), target.repository)
    assert list_all(tmp_path / "target") == []


def test_a_recording_writes_nothing_where_a_store_has_gone(store: Store, tmp_path: Path) -> None:
    delete_contents(tmp_path / "s")
    model = torch.nn.Linear(2, 2)

    def record() -> None:
        with store.record("run", model) as recorder:
            model(torch.ones(1, 2))
            recorder.step()

    with pytest.warns(RecordingWarning, match="StoreGone"):
        record()
    assert list_all(tmp_path / "s") == []


def test_a_compiler_leaves_nothing_where_a_store_has_gone_and_compiles_alone(store: Store, tmp_path: Path) -> None:
    delete_contents(tmp_path / "s")

    def find() -> bytes | None:
        return None

    with single_flight(store.repository, "0" * 64, find) as turn:
        assert turn.role == "alone"
    assert list_all(tmp_path / "s") == []


@pytest.mark.parametrize("carry", [pickle.dumps, None])
def test_a_child_or_a_copy_of_a_handle_means_the_same_store(
    store: Store, tmp_path: Path, carry: Callable[[Store], bytes] | None
) -> None:
    packed = carry(store) if carry else b""
    delete_contents(tmp_path / "s")
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)
            (pickle.loads(packed) if carry else store).save("new", 1)
        except StoreGone:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list_all(tmp_path / "s") == []


def open_hooked(root: Path) -> tuple[HookedStore, Store]:
    hooked = HookedStore(LocalStore(root))
    return hooked, Store(hooked)


def test_a_store_that_goes_during_a_save_is_noticed_before_the_commit(store: Store, tmp_path: Path) -> None:
    hooked, saving = open_hooked(tmp_path / "s")
    hooked.after = once("commit", "packs/", lambda: delete_contents(tmp_path / "s"))
    with pytest.raises(holdfast.HoldfastError):
        saving.save("new", OTHER)
    with pytest.raises(NotAStore):
        holdfast.open(tmp_path / "s", create=False).load("new")


def test_a_store_that_goes_at_the_moment_of_the_commit_is_never_reported_as_saved(store: Store, tmp_path: Path) -> None:
    hooked, saving = open_hooked(tmp_path / "s")
    hooked.before = once("create", "snapshots/", lambda: delete_contents(tmp_path / "s"))
    with pytest.raises(CommitUnknown, match="is gone"):
        saving.save("new", OTHER)


def test_a_store_that_is_replaced_before_the_commit_is_left_as_it_is(store: Store, tmp_path: Path) -> None:
    hooked, saving = open_hooked(tmp_path / "s")
    hooked.after = once("commit", "packs/", lambda: put_another_in_its_place(tmp_path / "s"))
    with pytest.raises(holdfast.HoldfastError):
        saving.save("new", OTHER)
    assert [found.name for found in holdfast.open(tmp_path / "s").snapshots()] == ["a", "b"]


def test_two_first_saves_through_two_handles_make_one_store_and_both_stay_with_it(tmp_path: Path) -> None:
    first, second = holdfast.open(tmp_path / "s"), holdfast.open(tmp_path / "s")
    first.save("a", TREE)
    second.save("b", TREE)
    first.save("c", TREE)
    second.delete("a")
    assert first.repository.identity.store_id == second.repository.identity.store_id != ""


def test_a_first_save_that_loses_the_race_adopts_the_store_of_the_winner(tmp_path: Path) -> None:
    hooked, late = open_hooked(tmp_path / "s")
    early = holdfast.open(tmp_path / "s")

    def save_early() -> None:
        early.save("early", TREE)

    hooked.before = once("create", "config/", save_early)
    late.save("late", TREE)
    late.save("later", TREE)
    assert early.repository.identity.store_id == late.repository.identity.store_id
    assert [found.name for found in early.snapshots()] == ["early", "late", "later"]


def test_without_create_no_store_is_made(tmp_path: Path) -> None:
    with pytest.raises(NotAStore, match="is not a store"):
        holdfast.open(tmp_path / "s", create=False)
    assert not (tmp_path / "s").exists()
    holdfast.open(tmp_path / "s").save("a", TREE)
    store = holdfast.open(tmp_path / "s", create=False)
    store.save("b", TREE)
    delete_tree(tmp_path / "s")
    with pytest.raises(StoreGone):
        store.save("c", TREE)
    assert not (tmp_path / "s").exists()


def test_a_store_made_in_a_directory_that_was_there_and_empty_is_logged_as_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "s").mkdir()
    store = holdfast.open(tmp_path / "s")
    store.save("a", TREE)
    (record,) = [found for found in caplog.records if found.levelno >= logging.WARNING]
    assert str(tmp_path / "s") in record.getMessage()
    assert store.repository.identity.store_id in record.getMessage()
    assert "mount" in record.getMessage()


def test_a_store_made_in_a_new_directory_is_logged_as_information(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="holdfast"):
        store = holdfast.open(tmp_path / "s")
        store.save("a", TREE)
        store.save("b", TREE)
    assert [(found.levelno, "created a new store" in found.getMessage()) for found in caplog.records] == [
        (logging.INFO, True)
    ]


def test_another_handle_that_was_opened_before_the_first_save_is_not_confused_by_a_newer_store(tmp_path: Path) -> None:
    waiting = open_repository(LocalStore(tmp_path / "s"), create=True)
    holdfast.open(tmp_path / "s").save("a", TREE)
    assert waiting.verify_may_write().store_id == waiting.identity.store_id
    delete_contents(tmp_path / "s")
    holdfast.open(tmp_path / "s").save("a", TREE)
    with pytest.raises(StoreGone):
        waiting.verify_may_write()
