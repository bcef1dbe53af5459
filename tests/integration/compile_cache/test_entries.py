"""Entries that are for other sizes, damaged, forged, missing, or needed by many processes at once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from holdfast.compile_cache.artifacts.artifact import read_artifact
from holdfast.compile_cache.artifacts.catalog import iter_artifacts, iter_variants
from holdfast.compile_cache.artifacts.storing import write_artifact
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import delete_snapshot
from tests.integration.compile_cache.processes import Outcome, Place, finish_all

CASE: Final = "infer_mlp"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Make a store with one artifact."""
    place = Place(tmp_path_factory.mktemp("made"))
    store = place.folder / "store"
    return store, place.run([CASE], store)


@pytest.fixture
def store(made: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """Copy the store, so that a test can change it."""
    return Place(tmp_path).copy(made[0], "store")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "processes")


def _open(store: Path) -> Repository:
    return open_repository(open_store(str(store)))


def _forge(store: Path, **changes: Any) -> None:
    """Replace the artifact by another one."""
    repo = _open(store)
    (found,) = iter_artifacts(repo.store)
    artifact = read_artifact(repo, found, trust=Trust(everything=True))
    delete_snapshot(repo.store, found.name)
    write_artifact(repo, replace(artifact, **changes), secret=None)


def _make_pickle(touched: Path) -> bytes:
    """Return a pickle that creates a file when it is unpickled."""
    return b"cos\nopen\n(V" + os.fsencode(touched) + b"\nI65\ntR."


def test_a_damaged_entry_is_a_counted_miss_with_a_warning_and_is_mended(
    made: tuple[Path, Outcome], store: Path, place: Place
) -> None:
    for pack in (store / "packs").rglob("*"):
        if pack.is_file():
            data = bytearray(pack.read_bytes())
            data[len(data) // 3 : len(data) // 3 + 64] = bytes(64)
            pack.write_bytes(data)

    hurt, mended = place.run([CASE], store), place.run([CASE], store, has_compiler=False)

    told = hurt.cases[CASE]
    assert (told["corrupt"], told["miss"], told["hit"], told["saved"]) == (1, 1, 0, 1)
    assert "cannot be used, so the graph is compiled" in hurt.stderr
    assert told["digest"] == made[1].cases[CASE]["digest"]
    assert mended.cases[CASE]["hit"] == 1


def test_a_graph_that_cannot_be_loaded_is_a_counted_miss(made: tuple[Path, Outcome], store: Path, place: Place) -> None:
    _forge(store, graph=b"not a pickle")

    told = place.run([CASE], store).cases[CASE]

    assert (told["corrupt"], told["miss"], told["hit"]) == (1, 1, 0)
    assert told["digest"] == made[1].cases[CASE]["digest"]


def test_a_forged_entry_of_a_shared_store_is_never_unpickled(
    made: tuple[Path, Outcome], store: Path, place: Place
) -> None:
    touched = store.parent / "touched"
    _forge(store, graph=_make_pickle(touched))
    (store / "packs").chmod(0o777)

    told = place.run([CASE], store).cases[CASE]

    assert not touched.exists()
    assert (told["refused"], told["miss"], told["hit"]) == (1, 1, 0)
    assert told["digest"] == made[1].cases[CASE]["digest"]


def test_the_forged_entry_would_run_if_the_user_trusted_it(store: Path, place: Place) -> None:
    touched = store.parent / "touched"
    _forge(store, graph=_make_pickle(touched))
    (store / "packs").chmod(0o777)

    place.run([CASE], store, options={"trust": True})

    assert touched.exists()


def test_guards_that_are_code_are_never_evaluated(made: tuple[Path, Outcome], store: Path, place: Place) -> None:
    touched = store.parent / "touched"
    _forge(store, guards=f"__import__('os').open({str(touched)!r}, 65) >= 0")

    told = place.run([CASE], store, options={"trust": True}).cases[CASE]

    assert not touched.exists()
    assert (told["hit"], told["guard_miss"], told["miss"]) == (0, 1, 1)
    assert told["digest"] == made[1].cases[CASE]["digest"]


def test_four_processes_on_an_empty_store_compile_once(place: Place) -> None:
    store = place.folder / "store"

    outcomes = finish_all([place.start([CASE], store) for _ in range(4)])

    told = [outcome.cases[CASE] for outcome in outcomes]
    assert sum(each["miss"] for each in told) == 1
    assert sum(each["hit"] for each in told) == 3
    assert len({each["digest"] for each in told}) == 1
    assert sum(outcome.compiler_runs > 0 for outcome in outcomes) == 1


def test_each_range_of_sizes_has_its_variant_in_either_order(place: Place) -> None:
    store = place.folder / "store"
    few, many = "train_few_rows", "train_many_rows"

    plain, cold = finish_all([place.start([few, many], None), place.start([few, many], store)])
    warm = place.run([many, few], store, has_compiler=False)

    assert cold.cases[many]["guard_miss"] == 1
    assert [warm.cases[case]["hit"] for case in (few, many)] == [1, 1]
    for case in (few, many):
        assert cold.cases[case]["digest"] == plain.cases[case]["digest"]
        assert warm.cases[case]["digest"] == plain.cases[case]["digest"]
    variants = list(iter_variants(_open(store).store, warm.cases[few]["used"][0]))
    assert len({variant.guards for variant in variants}) == 2


def test_strict_raises_for_what_cannot_be_kept_and_strict_hit_for_what_is_not_there(place: Place) -> None:
    store = place.folder / "store"

    bypassed, strict, missed = finish_all(
        [
            place.start(["hooked"], store),
            place.start(["hooked"], store, options={"strict": True}),
            place.start([CASE], store, options={"strict": "hit"}),
        ]
    )

    assert sum(bypassed.cases["hooked"]["bypass"].values()) == 1
    assert "strict: a graph cannot be cached" in strict.cases["hooked"]["error"]
    assert "does not have graph" in missed.cases[CASE]["error"]
    assert missed.compiler_runs == 0


def test_strict_raises_for_a_damaged_entry(store: Path, place: Place) -> None:
    _forge(store, graph=b"not a pickle")

    outcome = place.run([CASE], store, options={"strict": True})

    assert "an entry of the compile cache cannot be used" in outcome.cases[CASE]["error"]


def test_a_miss_is_explained_by_the_nearest_entry(store: Path, place: Place) -> None:
    outcome = place.run(["train_mlp"], store, explain=True)

    (explained,) = outcome.cases["train_mlp"]["explained"]
    assert "flags changed" in explained


def test_a_store_that_cannot_be_written_to_serves_and_keeps_nothing(
    made: tuple[Path, Outcome], store: Path, place: Place
) -> None:
    # Root may write anywhere, so the store is opened as read-only.
    outcome = place.run([CASE, "train_mlp"], store, read_only=True)

    assert outcome.cases[CASE]["hit"] == 1
    assert (outcome.cases["train_mlp"]["miss"], outcome.cases["train_mlp"]["saved"]) == (1, 0)
    assert sum(outcome.cases["train_mlp"]["not_saved"].values()) == 1
