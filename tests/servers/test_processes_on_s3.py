"""Processes that save and collect at the same moment in one bucket, and processes that are killed there."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.objects.url import open_store
from tests.faults.crew import Crew, SaveTask
from tests.faults.scenario import Content, check_store, holds, random_bytes, read_state
from tests.faults.test_kill import Supervisor, kill_often
from tests.servers.collecting import CollectTask
from tests.servers.conftest import PlaceOf
from tests.servers.places import make_prefix

WRITERS = 3
ROUNDS = 3
SHARED = random_bytes("shared", 150_000)


@pytest.fixture(scope="module", params=["small S3", pytest.param("SeaweedFS", marks=pytest.mark.slow)])
def server_url(request: pytest.FixtureRequest, place_of: PlaceOf) -> Iterator[str]:
    """The URL of a bucket; the environment of this process and of those that it starts has its options."""
    place = place_of(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.environment.items():
            patch.setenv(name, value)
        yield place.url("processes")


@pytest.fixture(scope="module")
def crew(server_url: str) -> Iterator[Crew]:
    with closing(Crew(WRITERS + 1)) as crew:
        yield crew


@pytest.fixture
def root(server_url: str, tmp_path: Path) -> str:
    return f"{server_url}/{make_prefix(tmp_path)}"


def content(number: int) -> Content:
    return {"shared": SHARED, "own": random_bytes(f"own {number}", 5_000), "number": str(number).encode()}


def find_problems(root: str) -> list[str]:
    return [str(finding) for finding in check_store(open_store(root)) if finding.severity != "note"]


def test_of_many_that_save_different_content_as_one_name_one_wins(crew: Crew, root: str) -> None:
    for number in range(ROUNDS):
        ends = crew.run([SaveTask(root, f"run/{number}", content(i)) for i in range(crew.size)])

        assert Counter(ends) == {"saved": 1, "NameInUse": crew.size - 1}
        assert holds(read_state(open_store(root)), f"run/{number}", content(ends.index("saved")))
    assert find_problems(root) == []
    assert open_store(root).list("leases/") == []


def test_many_first_saves_into_an_empty_place_agree_on_one_store(crew: Crew, root: str) -> None:
    ends = crew.run([SaveTask(root, f"n{i}", content(i)) for i in range(crew.size)])

    assert ends == ["saved"] * crew.size
    state = read_state(open_store(root))
    assert all(holds(state, f"n{i}", content(i)) for i in range(crew.size))
    assert find_problems(root) == []


def test_a_collector_beside_writers_takes_nothing_that_is_needed(crew: Crew, root: str) -> None:
    """Each round replaces what the round before has saved, and saves again what the collector is about to delete."""
    SaveTask(root, "n0", content(-1)).run()
    deleted = 0
    for number in range(2 * ROUNDS):
        saves = [SaveTask(root, f"n{i}", content(10 * (number % 2) + i), overwrite=True) for i in range(WRITERS)]

        *ends, collected = crew.run([*saves, CollectTask(root)])

        assert ends == ["saved"] * WRITERS
        deleted += int(collected.removeprefix("deleted "))
        state = read_state(open_store(root))
        assert all(holds(state, task.name, task.content) for task in saves)
    deleted += int(CollectTask(root).run().removeprefix("deleted "))

    assert deleted > 0
    assert find_problems(root) == []


@pytest.mark.parametrize("kills", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_whatever_a_killed_process_said_was_saved_is_there(root: str, kills: int) -> None:
    with closing(Supervisor()) as supervisor:
        num_saved, num_cut_short = kill_often(supervisor, root, kills=kills, chance=random.Random(20))

    assert num_saved > 0
    assert num_cut_short > 0
