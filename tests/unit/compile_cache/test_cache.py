"""A cache finds, loads and saves graphs, remembers which it used, and explains what it missed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.compile_cache import inductor
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.compile_cache.cache import CompileCache
from holdfast.compile_cache.inductor import CompiledGraph
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import open_repository
from tests.kit.compile_artifacts import make_key


def _run() -> str:
    return "compiled"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> CompileCache:
    """Return a cache on an empty store. A loaded graph returns its bytes, and guards name the one valid input."""

    def evaluate(guards: str, inputs: Sequence[Any], *, install: bool = False) -> bool:
        return not guards or guards == str(inputs[0])

    monkeypatch.setattr(inductor, "evaluate_guards", evaluate)
    monkeypatch.setattr(inductor, "load_graph", lambda graph, kernels, options: lambda: graph)
    return CompileCache(open_repository(MemoryStore(), create=True), trust=Trust())


def test_a_saved_graph_is_found_and_counted_as_used(cache: CompileCache) -> None:
    assert cache.save(make_key(), CompiledGraph(_run, b"graph", seconds=3.0)) == ""

    found = cache.find(make_key(), [], {})

    assert found.run is not None
    assert found.run() == b"graph"
    assert cache.used == (make_key().digest,)
    assert (cache.statistics.hit, cache.statistics.seconds_saved) == (1, 3.0)


def test_a_graph_that_cannot_be_saved_gives_the_reason(cache: CompileCache) -> None:
    assert cache.save(make_key(), CompiledGraph(_run, None, why_not_saved="it has a socket")) == "it has a socket"
    assert cache.find(make_key(), [], {}).run is None
    assert cache.used == ()


def test_a_graph_for_other_sizes_is_not_loaded_and_its_guards_are_returned(cache: CompileCache) -> None:
    cache.save(make_key(), CompiledGraph(_run, b"small", guards="1"))
    cache.save(make_key(), CompiledGraph(_run, b"large", guards="8"))

    large, none = cache.find(make_key(), [8], {}), cache.find(make_key(), [5], {})

    assert large.run is not None
    assert large.run() == b"large"
    assert (none.run, none.guards) == (None, ("1", "8"))


def test_a_miss_is_explained_by_what_was_stored_before(cache: CompileCache) -> None:
    cache.save(make_key(flags={"grad": False}), CompiledGraph(_run, b"graph"))
    cache.remember_miss(make_key(flags={"grad": True}), ())

    (explained,) = cache.explain()

    assert explained.headline == "missed: flags changed (grad False -> True)"
