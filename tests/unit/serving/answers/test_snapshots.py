"""Lists of snapshots: the filter box, numbers as columns, and lineage."""

from __future__ import annotations

import random

import pytest

from holdfast.errors import Corrupt, NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.query.lineage import LineageLog
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot
from holdfast.serving.answers import snapshots
from holdfast.serving.answers.snapshots import (
    choose,
    describe_children,
    describe_facts,
    describe_series,
    find_metrics,
    find_named,
    read_sizes,
)
from holdfast.serving.remembered import StoreState, WatchedListing
from tests.kit.saving import new_repo, save_bytes


def make_state() -> StoreState:
    repo = new_repo(MemoryStore())
    for name, metrics in (
        ("a/step-1", {"loss": 1.0, "acc": 0.5}),
        ("a/step-2", {"loss": "nan"}),
        ("b=1/x", {}),
        ("in/place", {"loss": 3}),
    ):
        save_bytes(
            repo, name, {"x": name.encode()}, metadata={"metrics": metrics, "epoch": 3, "flag": True, "name": "n"}
        )
    return WatchedListing(repo).read()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["a/step-1", "a/step-2", "b=1/x", "in/place"]),
        ("a/", ["a/step-1", "a/step-2"]),
        ("*/step-2", ["a/step-2"]),
        ("place", ["in/place"]),
        ("loss > 2", ["in/place"]),
        ("loss exists and epoch = 3", ["a/step-1", "a/step-2", "in/place"]),
        ("name like 'b=*/x'", ["b=1/x"]),
        ("nothing/", []),
        ("b=1/", ["b=1/x"]),
    ],
)
def test_the_filter_box_takes_names_globs_and_conditions(text: str, names: list[str]) -> None:
    assert [each.snapshot.name for each in choose(make_state(), text, "")] == names


def test_numbers_are_metrics_and_numbers_of_the_metadata() -> None:
    state = make_state()

    assert find_metrics(state.facts) == ["epoch", "loss", "acc"]
    found = describe_facts(state, find_named(state, "a/step-2"))
    assert found["numbers"] == {"loss": "nan", "epoch": 3}
    assert found["step"] == 2


def test_columns_have_gaps_where_there_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()

    found = describe_series(state, state.facts)
    monkeypatch.setattr(snapshots, "MAX_POINTS", 2)
    cut = describe_series(state, state.facts)

    by_name = dict(zip(found["names"], found["numbers"]["loss"], strict=True))
    assert by_name == {"a/step-1": 1.0, "a/step-2": None, "b=1/x": None, "in/place": 3}
    assert found["not_finite"] == {"loss": {str(found["names"].index("a/step-2")): "nan"}}
    assert (cut["total"], len(cut["names"])) == (4, 2)


def test_loads_before_saves_are_pairs_and_what_is_left_of_a_run_stands_for_its_first_snapshots() -> None:
    repo = new_repo(MemoryStore())
    log = LineageLog()
    for at, name in enumerate(("base/1", "run/1", "run/2", "run/3", "run/4", "run/5")):
        save_bytes(repo, name, {"x": bytes([at])}, environment=log.describe(name))
        log.note_saved(name)
        if name == "base/1":
            log.note_loaded(read_snapshot(repo.store, name))
    for gone in ("run/1", "run/3"):
        delete_snapshot(repo.store, gone)
    state = WatchedListing(repo).read()

    found = describe_series(state, state.facts)

    (load,) = found["loads"]
    assert (found["names"][load[0]], load[1]) == ("run/2", "base/1")


def test_of_very_many_snapshots_fewer_metrics_have_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = new_repo(MemoryStore())
    for number in (1, 2):
        metrics = {f"m{at:02}": at for at in range(30)}
        save_bytes(repo, f"a/{number}", {"x": b"x"}, metadata={"metrics": metrics})
    state = WatchedListing(repo).read()

    assert len(describe_series(state, state.facts)["numbers"]) == 30
    monkeypatch.setattr(snapshots, "_MAX_NUMBERS", 10)
    assert len(describe_series(state, state.facts)["numbers"]) == 24


def test_a_damaged_name_is_not_said_to_be_deleted() -> None:
    repo = new_repo(MemoryStore())
    save_bytes(repo, "a", {"x": b"1"})
    (record,) = repo.store.list("snapshots/")
    data = repo.store.read(record.key, limit_bytes=record.size_bytes)
    repo.store.delete(record.key)
    repo.store.create(record.key, data.replace(b"logical", b"logicat"))

    with pytest.raises(Corrupt, match="snapshots/"):
        find_named(WatchedListing(repo).read(), "a")


def test_a_name_wins_over_a_tag_and_nobody_is_not_found() -> None:
    state = make_state()

    assert find_named(state, "b=1/x").snapshot.name == "b=1/x"
    with pytest.raises(NotFound, match="may have been deleted"):
        find_named(state, "nobody")
    assert describe_children(state, "a/step-1") == []


def test_sizes_count_new_and_reused_bytes() -> None:
    repo = new_repo(MemoryStore())
    data = random.Random(1).randbytes(2 << 20)
    save_bytes(repo, "a", {"x": data})
    save_bytes(repo, "b", {"x": data, "y": b"new" * 5000})
    state = WatchedListing(repo).read()

    first, second = (read_sizes(repo, find_named(state, name).snapshot) for name in "ab")

    assert (first["new_bytes"], first["reused_bytes"]) == (len(data), 0)
    assert (second["new_bytes"], second["reused_bytes"]) == (15_000, len(data))
