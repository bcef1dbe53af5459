"""Processes that write at the same moment: one wins, the others get an error, and nothing is mixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.local.upload import TEMP_PREFIX
from holdfast.repo.format.layout import CONFIG
from holdfast.repo.handle.config import read_config
from holdfast.repo.names.snapshots import read_snapshot, read_tag, set_tag
from tests.faults.crew import Crew, InitTask, SaveTask, TagTask
from tests.faults.scenario import Content, check_store, holds, random_bytes, read_state, save_content

ROUNDS: Final = 4
SHARED: Final = random_bytes("shared", 150_000)


@pytest.fixture(scope="module", params=[2, 8], ids=lambda size: f"{size} processes")
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(request.param)
    yield crew
    crew.close()


def content(number: int) -> Content:
    return {"shared": SHARED, "own": random_bytes(f"own {number}", 5_000), "number": str(number).encode()}


def verify_clean(root: Path) -> None:
    store = LocalStore(root)
    assert [finding for finding in check_store(store) if finding.severity != "note"] == []
    assert store.list("leases/") == []
    assert list(root.rglob(TEMP_PREFIX + "*")) == []


def test_of_many_that_save_different_content_as_one_name_one_wins(crew: Crew, tmp_path: Path) -> None:
    for number in range(ROUNDS):
        name = f"run/{number}"
        ends = crew.run([SaveTask(str(tmp_path), name, content(i)) for i in range(crew.size)])
        assert Counter(ends) == {"saved": 1, "NameInUse": crew.size - 1}
        assert holds(read_state(LocalStore(tmp_path)), name, content(ends.index("saved")))
    verify_clean(tmp_path)


def test_of_many_that_save_the_same_as_one_name_none_is_told_that_it_is_there_when_it_is_not(
    crew: Crew, tmp_path: Path
) -> None:
    for number in range(ROUNDS):
        name = f"run/{number}"
        ends = Counter(crew.run([SaveTask(str(tmp_path), name, content(0))] * crew.size))
        # Who comes to the commit second has not looked at what the first one saved; who finds it before the first
        # one has returned saves it again, for it might still be withdrawn.
        assert ends["saved"] >= 1
        assert ends["saved"] + ends["existed"] + ends["NameInUse"] == crew.size
        assert holds(read_state(LocalStore(tmp_path)), name, content(0))
    verify_clean(tmp_path)


def test_of_many_that_overwrite_one_name_the_last_to_win_shows_and_losers_are_told(crew: Crew, tmp_path: Path) -> None:
    save_content(LocalStore(tmp_path), "run/a", content(-1))
    for _ in range(ROUNDS):
        ends = crew.run([SaveTask(str(tmp_path), "run/a", content(i), overwrite=True) for i in range(crew.size)])
        assert set(ends) <= {"saved", "NameInUse"}
        state = read_state(LocalStore(tmp_path))
        shown = [i for i in range(crew.size) if holds(state, "run/a", content(i))]
        assert len(shown) == 1
        assert ends[shown[0]] == "saved"
    verify_clean(tmp_path)


def test_many_that_save_different_names_all_succeed(crew: Crew, tmp_path: Path) -> None:
    for number in range(ROUNDS):
        tasks = [SaveTask(str(tmp_path), f"run/{number}-{i}", content(i)) for i in range(crew.size)]
        assert crew.run(tasks) == ["saved"] * crew.size
        state = read_state(LocalStore(tmp_path))
        assert all(holds(state, task.name, task.content) for task in tasks)
    verify_clean(tmp_path)


def test_many_first_saves_into_an_empty_place_agree_on_one_store(crew: Crew, tmp_path: Path) -> None:
    for number in range(ROUNDS):
        root = tmp_path / str(number)
        assert crew.run([SaveTask(str(root), f"n{i}", content(i)) for i in range(crew.size)]) == ["saved"] * crew.size
        store = LocalStore(root)
        # The config, and its confirmation.
        assert len(store.list(CONFIG)) == 2
        state = read_state(store)
        assert all(holds(state, f"n{i}", content(i)) for i in range(crew.size))
        verify_clean(root)


def test_of_many_that_make_a_place_a_store_one_does(crew: Crew, tmp_path: Path) -> None:
    for number in range(ROUNDS):
        ends = crew.run([InitTask(str(tmp_path / str(number)))] * crew.size)
        assert Counter(ends) == {"made": 1, "NotAStore": crew.size - 1}
        assert read_config(LocalStore(tmp_path / str(number))) is not None


def test_a_tag_that_many_move_points_to_what_one_of_the_winners_said(crew: Crew, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for i in range(crew.size):
        save_content(store, f"n{i}", content(i))
    set_tag(store, "t", read_snapshot(store, "n0"))
    for _ in range(ROUNDS):
        ends = crew.run([TagTask(str(tmp_path), "t", f"n{i}") for i in range(crew.size)])
        assert set(ends) <= {"tagged", "NameInUse"}
        tag = read_tag(store, "t")
        assert tag is not None
        assert ends[int(tag.snapshot_name[1:])] == "tagged"
        assert tag.digest == read_snapshot(store, tag.snapshot_name).digest
    verify_clean(tmp_path)
