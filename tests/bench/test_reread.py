"""The benchmark of repeated loads: processes load what was saved, and a process that loads other bytes ends the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.kit.arena import Arena, open_arena
from bench.kit.loading_processes import digest_state, starting_loaders
from bench.kit.measure import TINY, WrongResult
from bench.kit.peers import HOLDFAST, TORCH
from bench.kit.sections import ANCHORS, explain
from bench.kit.states import Shape, change_state, copy_state
from bench.suites import reread as reread_suite

_SHAPE = Shape("three", (16384, 8192, 4096))


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    opened = open_arena(_SHAPE, tmp_path, rounds=1, seed=1)
    yield opened
    opened.close()


def test_the_digest_of_a_state_depends_on_names_and_bytes(arena: Arena) -> None:
    changed = copy_state(arena.state)
    change_state(changed, 0.01)
    renamed = {name.upper(): tensor for name, tensor in arena.state.items()}
    assert digest_state(copy_state(arena.state)) == digest_state(arena.state)
    assert len({digest_state(state) for state in (arena.state, changed, renamed)}) == 3


@pytest.mark.slow
def test_processes_load_what_was_saved_and_other_bytes_end_the_run(arena: Arena) -> None:
    for peer in (HOLDFAST, TORCH):
        arena.save(peer)
    with starting_loaders(2, arena.state) as loaders:
        for peer in (HOLDFAST, TORCH):
            assert loaders.load(2, peer.name, arena.folder(peer)) >= 0
            loaders.verify(2, digest_state(arena.state))
        loaders.load(1, HOLDFAST.name, arena.folder(HOLDFAST))
        with pytest.raises(WrongResult, match="another state"):
            loaders.verify(1, b"another digest")


@pytest.mark.slow
def test_the_reread_suite_measures_each_workload_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether pages can be dropped depends on the filesystem of the test.
    monkeypatch.setattr(reread_suite, "drop_pages", lambda paths: None)
    try:
        results = reread_suite.run(replace(TINY, rounds=1), tmp_path)
    except OSError:
        pytest.skip("this filesystem takes no direct reads")

    assert [result.unit for result in results] == ["GB/s"] * 8 + ["GB/s", "GB/s", "x"] * 2
    assert {result.why for result in explain("reread", results)} <= ANCHORS
    assert list(tmp_path.iterdir()) == []
