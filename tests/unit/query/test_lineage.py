"""Lineage: what a handle has loaded and saved, as it is stored, and as it is read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import Mismatch
from holdfast.json_text import Json
from holdfast.query.lineage import LINEAGE, Lineage, LineageLog, LoadedSnapshot, parse_lineage
from tests.kit.committed import make_committed

TREE = {"w": torch.ones(2)}


def loaded(*names: str) -> tuple[LoadedSnapshot, ...]:
    return tuple(LoadedSnapshot(name, make_committed(name).digest.hex()) for name in names)


def read(log: LineageLog, name: str) -> Lineage:
    return parse_lineage(log.describe(name))


def test_a_first_save_comes_from_nothing() -> None:
    assert LineageLog().describe("run/1") == {}


def test_a_save_follows_the_save_before_with_the_same_prefix() -> None:
    log = LineageLog()
    for name in ("run/1", "other/1", "run/2"):
        log.note_saved(name)

    assert read(log, "run/3") == Lineage(previous="run/2")
    assert read(log, "other/2") == Lineage(previous="other/1")
    assert log.describe("new/1") == {}
    assert log.describe("run/2") == {}, "a snapshot that is overwritten does not follow itself"


def test_what_was_loaded_counts_until_the_next_save_of_that_prefix() -> None:
    log = LineageLog()
    log.note_loaded(make_committed("base"))
    log.note_loaded(make_committed("lora"))
    log.note_loaded(make_committed("base"))

    assert read(log, "run/1") == Lineage(loaded("lora", "base"))
    log.note_saved("run/1")
    assert read(log, "run/2") == Lineage(previous="run/1", began=loaded("lora", "base"))
    assert read(log, "ema/1") == Lineage(loaded("lora", "base"))


def test_what_a_run_began_from_is_repeated_until_something_else_is_loaded() -> None:
    log = LineageLog()
    log.note_loaded(make_committed("base"))
    for name in ("run/1", "run/2"):
        log.note_saved(name)
    assert read(log, "run/3").began == loaded("base")

    log.note_loaded(make_committed("run/1"))
    assert read(log, "run/3") == Lineage(loaded("run/1"), previous="run/2")
    log.note_saved("run/3")
    assert read(log, "run/4").began == loaded("run/1")


def test_the_log_of_a_long_process_is_bounded() -> None:
    log = LineageLog()
    for number in range(1000):
        log.note_loaded(make_committed(f"base/{number}"))
    assert [each.name for each in read(log, "x").loaded] == [f"base/{number}" for number in range(984, 1000)]
    for number in range(1000):
        log.note_saved(f"run-{number}/1")
    assert log.describe("run-999/2")[LINEAGE]["previous"] == "run-999/1"
    assert "previous" not in log.describe("run-0/2")[LINEAGE]


@pytest.mark.parametrize(
    "value",
    [None, 3, [], "x", {"loaded": 3}, {"loaded": [3, {"name": 4}]}, {"previous": 5}, {"loaded": {}, "previous": None}],
)
def test_a_malformed_lineage_is_none(value: Json) -> None:
    assert parse_lineage({LINEAGE: value}) == Lineage()


def test_saves_and_loads_of_a_store_are_recorded(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "s") as store:
        store.save("run/1", TREE)
        store.save_async("run/2", {"w": torch.zeros(2)}).wait()
    with holdfast.open(tmp_path / "s") as store:
        store.load_into("run/1", {"w": torch.zeros(2)})
        with pytest.raises(Mismatch):
            store.load_into("run/2", {"w": torch.zeros(3)})
        store.save("run/3", {"w": torch.ones(2) * 3})
        store.save_async("run/4", {"w": torch.ones(2) * 4}).wait()
        store.load("run/2")
        store.save("soup", {"w": torch.ones(2) * 5})
        found = {each.name: parse_lineage(each.environment) for each in store.snapshots()}
        digests = {each.name: each.digest.hex() for each in store.snapshots()}

    assert found == {
        "run/1": Lineage(),
        "run/2": Lineage(previous="run/1"),
        "run/3": Lineage((LoadedSnapshot("run/1", digests["run/1"]),)),
        "run/4": Lineage(previous="run/3", began=(LoadedSnapshot("run/1", digests["run/1"]),)),
        "soup": Lineage(tuple(LoadedSnapshot(name, digests[name]) for name in ("run/1", "run/2"))),
    }


def test_a_manager_that_resumes_is_recorded(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    for last in (2, 4):
        with holdfast.open(tmp_path / "s") as store, store.manager("run/", every=1) as manager:
            first = (manager.resume(state) or 0) + 1
            for step in range(first, last + 1):
                state["w"] += 1
                manager.step(step, state)

    found = {each.name: parse_lineage(each.environment) for each in holdfast.open(tmp_path / "s").snapshots()}

    assert [each.name for each in found["run/step-3"].loaded] == ["run/step-2"]
    assert found["run/step-4"] == Lineage(previous="run/step-3", began=found["run/step-3"].loaded)


def test_without_an_environment_nothing_is_recorded(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "s", environment=False)
    store.save("run/1", TREE)
    store.save("run/2", {"w": torch.zeros(2)})

    assert store.snapshot("run/2").environment == {}


def test_a_save_that_is_repeated_is_no_other_content(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "s")
    store.save("run/1", TREE, metadata={"step": 1})
    store.save("run/2", {"w": torch.zeros(2)})

    again = store.save("run/1", TREE, metadata={"step": 1})

    assert again.existed
