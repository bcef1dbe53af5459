"""Compiled graphs and recorded runs through a store: runs are found by name, and compared by name or as they are."""

from __future__ import annotations

import pytest

from holdfast import NotFound, Store
from holdfast.compile_cache.backend import Compiler
from holdfast.objects.memory import MemoryStore
from tests.kit.recordings import Recording, write_recorded


@pytest.fixture
def store() -> Store:
    """A store with two runs: the second has a fault."""
    store = Store(MemoryStore())
    for recording in (Recording("good"), Recording("bad", is_bad=True)):
        write_recorded(store.repository, recording)
    return store


def test_runs_are_listed_and_found_by_name(store: Store) -> None:
    assert sorted(facts.name for facts in store.runs()) == ["bad", "good"]
    assert store.run("good").facts.name == "good"
    with pytest.raises(NotFound, match="worse"):
        store.run("worse")


def test_a_run_that_was_read_is_used_as_it_is(store: Store) -> None:
    run = store.run("good")

    assert store.run(run) is run
    assert store.diff_runs(run, "bad").origins == store.diff_runs("good", "bad").origins != ()


def test_the_noise_and_the_reference_may_be_names_or_runs(store: Store) -> None:
    named = store.diff_runs("good", "good", noise="good", reference="good")
    read = store.diff_runs("good", "good", noise=store.run("good"), reference=store.run("good"))

    assert named.origins == read.origins == ()


def test_a_compiler_caches_in_this_store(store: Store) -> None:
    compiler = store.compiler()

    assert isinstance(compiler, Compiler)
    assert compiler.cache.repo is store.repository
