"""The benchmarks of state run with every format, and a format that returns other bytes ends the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from bench.kit import bare_work
from bench.kit.arena import Arena, at_least, compare, compare_ms, names_like, open_arena
from bench.kit.measure import FULL, TINY, Timings, WrongResult, race, random_bytes
from bench.kit.peers import HOLDFAST, HOLDFAST_FAST, SAFETENSORS, TORCH, Peer, find_peers
from bench.kit.repeated_saves import RepeatedSaves
from bench.kit.resident import measure_rise
from bench.kit.sections import ANCHORS, explain
from bench.kit.states import (
    Shape,
    change_state,
    clear_state,
    copy_state,
    make_empty,
    make_state,
    pick_name,
    plan_large,
    plan_mixed,
    plan_small,
    verify_state,
    verify_tensor,
)
from bench.suites import load as load_suite
from bench.suites import peak as peak_suite
from bench.suites import scale as scale_suite
from bench.suites import state as state_suite
from tests.kit.hooking import Hook

_SHAPE = Shape("two dtypes", (16384, 8192, 4096, 4, 3 * 8192), (torch.float32, torch.bfloat16))
_EVERY = [HOLDFAST, HOLDFAST_FAST, *find_peers()]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    opened = open_arena(_SHAPE, tmp_path, rounds=1, seed=1)
    yield opened
    opened.close()


def _spoil(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Flip one bit of the last tensor."""
    spoiled = copy_state(state)
    next(reversed(spoiled.values())).view(-1).view(torch.uint8)[0].bitwise_xor_(1)
    return spoiled


@pytest.mark.parametrize("peer", _EVERY, ids=lambda peer: peer.name)
def test_every_format_loads_what_it_saved(peer: Peer, arena: Arena) -> None:
    arena.save(peer)
    folder, state, name = arena.folder(peer), arena.state, pick_name(arena.state)
    target = make_empty(state)
    clear_state(target)
    peer.fill(folder, target)

    arena.verify_saved(peer)
    verify_state(target, state, who=peer.name)
    verify_tensor(peer.read_one(folder, name, state[name]), state[name], what=name)
    assert sorted(peer.list_names(folder)) == sorted(state)
    if peer.read_rows:
        verify_tensor(peer.read_rows(folder, name, slice(1, 2)), state[name][1:2], what=name)
    if peer.open_mapped:
        verify_state(peer.open_mapped(folder), state, who=peer.name)


@pytest.mark.parametrize("peer", [HOLDFAST, TORCH], ids=lambda peer: peer.name)
def test_a_format_that_saves_other_bytes_ends_the_run(peer: Peer, arena: Arena) -> None:
    wrong = replace(peer, save=lambda folder, state: peer.save(folder, _spoil(dict(state))))

    race({peer.name: arena.saving(peer)}, rounds=1)
    with pytest.raises(WrongResult, match=rf"the bytes of {peer.name}: layers\.4\.weight are not those"):
        race({peer.name: arena.saving(wrong)}, rounds=1)


def test_a_format_that_loads_other_bytes_ends_the_run(arena: Arena) -> None:
    wrong = replace(TORCH, load=lambda folder, like: _spoil(TORCH.load(folder, like)))  # type: ignore[arg-type]  # torch.load gives a dict
    arena.save(TORCH)

    race({TORCH.name: arena.loading(TORCH, lambda: None)}, rounds=1)
    with pytest.raises(WrongResult, match=r"layers\.4\.weight"):
        race({TORCH.name: arena.loading(wrong, lambda: None)}, rounds=1)


@pytest.mark.parametrize("peer", [HOLDFAST, TORCH], ids=lambda peer: peer.name)
def test_a_load_in_place_that_keeps_old_values_ends_the_run(
    peer: Peer, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = replace(peer, fill=lambda folder, state: None)
    monkeypatch.setattr(load_suite, "drop_pages", lambda paths: None)
    monkeypatch.setattr(load_suite, "read_limits", lambda paths, then_hash=False: {})
    monkeypatch.setattr(load_suite, "HOLDFAST", lazy if peer is HOLDFAST else HOLDFAST)
    for saving in (HOLDFAST, TORCH):
        arena.save(saving)

    with pytest.raises(WrongResult, match=rf"the bytes of {peer.name}: layers"):
        load_suite._measure_cold(arena, [TORCH if peer is HOLDFAST else lazy], is_large=True, is_small=False)


def _flip(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with one bit flipped."""
    flipped = tensor.clone()
    flipped.view(-1).view(torch.uint8)[-1].bitwise_xor_(1)
    return flipped


def _misread(peer: Peer) -> dict[str, Peer]:
    """Return a peer that reads one part wrong, for each part that it can read."""
    wrong = {
        "one tensor": replace(peer, read_one=lambda *given: _flip(peer.read_one(*given))),
        "names": replace(peer, list_names=lambda folder: peer.list_names(folder)[1:]),
    }
    if rows := peer.read_rows:
        wrong["a slice"] = replace(peer, read_rows=lambda *given: _flip(rows(*given)))
    if mapped := peer.open_mapped:
        wrong["a map"] = replace(
            peer, open_mapped=lambda folder: {name: _flip(tensor) for name, tensor in mapped(folder).items()}
        )
    return wrong


@pytest.mark.parametrize(
    ("peer", "part"),
    [pytest.param(peer, part, id=f"{peer.name}: {part}") for peer in _EVERY for part in _misread(peer)],
)
def test_a_format_that_reads_a_part_wrong_ends_the_run(
    peer: Peer, part: str, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = _misread(peer)[part]
    monkeypatch.setattr(load_suite, "drop_pages", lambda paths: None)
    monkeypatch.setattr(load_suite, "HOLDFAST", wrong if peer is HOLDFAST else HOLDFAST)
    for saving in (HOLDFAST, TORCH, peer):
        arena.save(saving)

    with pytest.raises(WrongResult, match="are not those that were saved"):
        load_suite._measure_parts(arena, [TORCH if peer is HOLDFAST else wrong])


def test_a_large_state_that_is_loaded_wrongly_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_suite, "drop_pages", lambda paths: None)
    monkeypatch.setattr(scale_suite._Sample, "load", lambda sample: sample.state)

    with pytest.raises(WrongResult, match="differs after loading"):
        scale_suite.run(TINY, tmp_path)


def test_a_save_with_hints_is_left_out_if_the_store_has_none(
    arena: Arena, hook: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(root: Path, **options: bool) -> None:
        if options:
            raise TypeError("open() got an unexpected keyword argument 'change_hints'")

    hook(resolve_name("bench.kit.repeated_saves.holdfast"), "open", refuse)

    assert state_suite._find_hinted(arena) == {}
    assert "left out" in capsys.readouterr().err


def test_a_save_of_an_unchanged_state_that_writes_ends_the_run(arena: Arena) -> None:
    again = RepeatedSaves(arena)
    again.change(0.0)
    result = again.save()

    again.verify(result, fraction=0.0)
    with pytest.raises(WrongResult, match="unchanged state wrote 9999999 new bytes"):
        again.verify(replace(result, new_bytes=9999999), fraction=0.0)


def test_other_names_dtypes_or_shapes_are_not_the_same_state() -> None:
    state = make_state(_SHAPE, seed=1)
    first = state["layers.0.weight"]

    for other in (first.view(torch.int32), first.view(-1)):
        with pytest.raises(WrongResult, match=r"peer: layers\.0\.weight is torch"):
            verify_state({**state, "layers.0.weight": other}, state, who="peer")
    with pytest.raises(WrongResult, match="peer: the names"):
        verify_state({"layers.0.weight": first}, state, who="peer")
    with pytest.raises(WrongResult, match=r"layers\.0\.weight is no tensor"):
        verify_state({**state, "layers.0.weight": None}, state, who="peer")


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1, 1.0])
def test_a_change_affects_the_given_fraction_of_bytes(fraction: float) -> None:
    state = make_state(_SHAPE, seed=1)
    before = copy_state(state)

    change_state(state, fraction)

    changed = sum(
        int((state[name].view(-1).view(torch.uint8) != before[name].view(-1).view(torch.uint8)).sum()) for name in state
    )
    assert changed == round(fraction * _SHAPE.size_bytes)


def test_the_full_size_is_the_one_that_the_goals_name() -> None:
    large, mixed, small = plan_large(FULL), plan_mixed(FULL), plan_small(FULL)

    assert large.sizes == (16 << 20,) * 128
    assert (len(mixed.sizes), min(mixed.sizes), len(mixed.dtypes)) == (2000, 4096, 3)
    assert max(mixed.sizes) <= 32 << 20
    assert 0.98 <= mixed.size_bytes / (1 << 30) <= 1.0
    assert (len(small.sizes), max(small.sizes)) == (20_000, 4096)


def test_a_row_compares_best_rounds_with_the_fastest_rival() -> None:
    timings = {"own": Timings((2.0, 1.0)), "slow": Timings((4.0, 9.0)), "quick": Timings((2.0, 2.5))}

    row = compare("work", timings, "own", ["slow", "quick"], size_bytes=10**9, goal=at_least(1.9))
    in_ms = compare_ms("work", timings, "own")

    assert (row.figure, row.against, row.limit, row.ratio, row.verdict) == (1.0, "quick", 0.5, 2.0, "pass")
    assert row.note == "medians 0.67 and 0.44; slow 0.25"
    assert row.samples["own"] == (2.0, 1.0)
    assert (in_ms.figure, in_ms.against, in_ms.limit) == (1000.0, "quick", 2000.0)
    assert names_like(timings, "ow", "sl") == ["own", "slow"]


@pytest.mark.parametrize("direct", [False, True])
def test_a_raw_write_by_several_threads_writes_every_byte(direct: bool, tmp_path: Path) -> None:
    data = bare_work.aligned_memory(3 * bare_work.UNIT_BYTES // 2)
    data[:] = random_bytes(len(data), seed=1)

    try:
        bare_work.write_file(tmp_path / "raw", data, direct=direct, threads=2)
    except OSError:
        pytest.skip("this filesystem takes no direct writes")

    assert (tmp_path / "raw").read_bytes() == data


def test_a_write_that_also_hashes_writes_the_same_bytes(tmp_path: Path) -> None:
    data = bare_work.aligned_memory(3 * bare_work.UNIT_BYTES // 2)
    data[:] = random_bytes(len(data), seed=1)

    bare_work.write_file(tmp_path / "raw", data, direct=False, threads=2, repeats=2, hashed=True)

    assert (tmp_path / "raw").read_bytes() == bytes(data) * 2


def test_a_copy_by_several_threads_copies_every_byte() -> None:
    data = random_bytes(5 * bare_work.CHUNK_BYTES // 2, seed=1)
    target = bare_work.aligned_memory(len(data))

    bare_work.copy_shared(data, target, threads=2, then_hash=True)

    assert target == data


def test_the_peak_includes_memory_that_was_freed_again() -> None:
    def take_and_drop() -> None:
        torch.zeros(64 << 20, dtype=torch.uint8)

    rise = measure_rise(take_and_drop)

    assert 60 << 20 <= rise <= 80 << 20


def test_safetensors_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kit.peers.util.find_spec", lambda name: None)

    assert SAFETENSORS not in find_peers()


@pytest.mark.slow
def test_the_state_suite_measures_each_workload_and_leaves_nothing(tmp_path: Path) -> None:
    results = state_suite.run(TINY, tmp_path)

    assert {result.unit for result in results} == {"GB/s", "bytes", "ms"}
    assert {result.why for result in explain("state", results)} <= ANCHORS
    assert all(result.figure > 0 and result.limit for result in results)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_load_suite_measures_each_workload_and_leaves_nothing(tmp_path: Path) -> None:
    results = load_suite.run(TINY, tmp_path)

    assert {result.unit for result in results} == {"GB/s", "ms"}
    assert {result.why for result in explain("load", results)} <= ANCHORS
    assert all(result.figure > 0 and result.limit for result in results)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_peak_suite_measures_each_workload_and_leaves_nothing(tmp_path: Path) -> None:
    results = peak_suite.run(TINY, tmp_path)

    assert [result.unit for result in results] == ["MB"] * 4 + ["B"] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_scale_suite_measures_each_workload_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_suite, "drop_pages", lambda paths: None)
    try:
        results = scale_suite.run(TINY, tmp_path)
    except OSError:
        pytest.skip("this filesystem takes no direct writes")

    assert [result.unit for result in results] == ["s/GB"] * 4 + ["us"] * 3
    assert [len(result.figures) for result in results] == [3] * 7
    assert list(tmp_path.iterdir()) == []
