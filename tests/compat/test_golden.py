"""Stores of format 1, checked in and never made again: every later version loads them, on any world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.capture.compare.compare import diff_runs
from holdfast.dcp import StorageReader
from holdfast.digest import hash_bytes
from holdfast.repo.format.chunk import BLOSC2, DELTA, RAW
from holdfast.repo.handle.compression import Compression
from tests.compat.archive import HERE, read_frozen, unpack
from tests.compat.make_golden import (
    CASES,
    GOLDEN,
    RANKS,
    RECORDED_STEPS,
    SHAPES,
    STEPS,
    dcp,
    make_for_dcp,
    make_full,
    make_placed,
    make_state,
    make_trained,
    make_weights,
    record_training,
)
from tests.distributed.conftest import World, world
from tests.kit.saving import read_entries

__all__ = ["world"]

BLAKE3 = ("both", "full", "device")
DIGESTS = {
    "run": {
        "run/step-1": "71886b58c70d4446e1ccd63fec134df1010dde5085c45b8059169a93e9c1d4cb",
        "run/step-2": "7a288c85b350dc394868122e7c47b0ed7606196d8501a4cd64acf3160389af99",
        "run/step-4": "688bda8aeedb183f2d92a5a1d39732a05e70a875a374cbce5d6dd333d574f1f5",
        "run/step-5": "03e4eefc60852cd717937918efac074bdf7cf75044c706a0ad13fbfffdf624e6",
        "run/step-6": "19ccc25fd6f9c7b2c103b6e9759157b35153c5f263249f63839f273e0e71e595",
    },
    "ranks": {
        "all": "0e9559ad740ff10179ab7533b94f8ce5992f55b261a23c0323a1402a7c6aab3e",
        "own": "a870ec08b78d75820c4a259ec065016f0bf30b05b1a8537a80f37ae369a87c1a",
    },
    "dcp": {
        "run/a": "f6102cf1fc01ffec423cefb66fe71a761e1b10d2c743b220ae48aadf5b9ed569",
    },
    "codecs": {
        "all": "5ca9cf97068cb189cfbcb13fcbc84e851b0093e0b28bf5c03d936b204185c278",
        "fast": "c71dffba70b010abf5b206d30cccb7a53aec7af481fab431d51d45ebcccc8416",
        "mixed": "aa032f3d8c575fcc0cc142a3dce654701a12a8d4c1aa220758029d731a06932e",
        "raw": "14aeb797478678d4a27e99511a27acde11be9770a37209a992ff202097033a9d",
        "small": "f1784347943b11849931f7fdebd33408138abd26a85318cae55c5b1e8fde8c98",
    },
    "deltas": {
        "raw/0": "71003ccd44920e9703489c072e5c3b33891d7b5502fd09814652cfcbd86aa4a0",
        "raw/1": "05fc3f19205d958b0bc6bebfa2e2a2f5e8ee59424092600f62bab9f6ecb87266",
        "run/1": "7a75011a05a2a764bbae4fa1d9926953774d5957cee1f245966504c55dccd419",
        "run/2": "67917b9bcc07b312cce17ba03ac9c4bf9e1469298ff0a3a847185e453a80b423",
        "run/3": "dfd96b10f4b48ff68bc9bc73449e6997044523ef515ea9699ffb71c83a1509df",
        "whole": "2509e2c0da13b3dbe49e97b727b6900a92b856136d9099c08a1025e9a57b35d0",
    },
}


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> holdfast.Store:
    return holdfast.open(unpack(GOLDEN / f"{request.param}.tar.gz", tmp_path), read_only=True)


def find_differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(_bytes(found[name]), _bytes(wanted[name]))]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    return local.contiguous().flatten().view(torch.uint8)


def load_ranks(rank: int, path: Path, shift: int) -> list[str]:
    tree = make_placed(shift=shift, zero=True)
    with holdfast.open(path, read_only=True) as store:
        store.load_into("all", tree)
    return find_differences(tree, make_placed(shift=shift))


def load_own(rank: int, path: Path) -> tuple[list[int], list[float]]:
    tree: dict[str, Any] = {"mine": holdfast.per_rank(torch.zeros(5, dtype=torch.int64)), "drifted": torch.zeros(3)}
    with holdfast.open(path, read_only=True) as store:
        store.load_into("own", tree)
    return tree["mine"].value.tolist(), tree["drifted"].tolist()


def load_by_torch(rank: int, path: Path, shift: int) -> list[str]:
    state: dict[str, Any] = {"model": make_for_dcp(shift=shift, zero=True), "step": 0, "note": {"text": ""}}
    dcp.load(state, storage_reader=StorageReader(str(path), "run/a"))
    assert (state["step"], state["note"]) == (7, {"text": "saved by torch"})
    return find_differences(state["model"], make_for_dcp(shift=shift))


@pytest.mark.parametrize("name", sorted(read_frozen()))
def test_no_archive_was_made_again(name: str) -> None:
    assert hash_bytes((HERE / name).read_bytes()).hex() == read_frozen()[name]


def test_every_archive_is_frozen() -> None:
    archives = {path.relative_to(HERE).as_posix() for path in HERE.rglob("*.tar.gz")}
    assert archives == read_frozen().keys()
    assert {f"golden/{case}.tar.gz" for case in CASES} <= archives


@pytest.mark.parametrize("store", sorted(CASES), indirect=True)
def test_a_golden_store_checks_clean(store: holdfast.Store) -> None:
    assert [finding for finding in store.check(read=True) if finding.severity != "note"] == []


@pytest.mark.parametrize(("store", "wanted"), DIGESTS.items(), indirect=["store"], ids=list(DIGESTS))
def test_contents_have_the_digests_they_had(store: holdfast.Store, wanted: dict[str, str]) -> None:
    assert {snapshot.name: snapshot.digest.hex() for snapshot in store.snapshots()} == wanted


@pytest.mark.parametrize("store", ["run"], indirect=True)
@pytest.mark.parametrize("step", [step for step in range(1, STEPS + 1) if step != 3])
def test_every_step_of_a_run_loads(store: holdfast.Store, step: int) -> None:
    found, wanted = store.load(f"run/step-{step}"), make_state(200 if step == 2 else step)
    assert find_differences(found.pop("model"), wanted.pop("model")) == []
    assert found == wanted
    assert store.snapshot("best").name == "run/step-4"


@pytest.mark.parametrize("store", ["run"], indirect=True)
def test_saving_the_same_again_gives_the_same_digest(store: holdfast.Store) -> None:
    today = holdfast.open("memory://")
    assert today.save("x", make_state(5)).digest == store.snapshot("run/step-5").digest


@pytest.mark.parametrize("store", ["codecs"], indirect=True)
@pytest.mark.parametrize(("name", "step"), [("raw", 0), ("fast", 1), ("small", 2)])
def test_every_codec_is_decoded(store: holdfast.Store, name: str, step: int) -> None:
    assert find_differences(store.load(name), make_weights(step)) == []
    assert find_differences(store.load("all")[step], make_weights(step)) == []


@pytest.mark.parametrize("store", ["codecs"], indirect=True)
def test_compressed_chunks_are_reused_by_every_later_choice(store: holdfast.Store, tmp_path: Path) -> None:
    choices: tuple[Compression, ...] = (None, "fast", "small", "auto")
    small_bytes = sum(tensor.nbytes for tensor in make_weights(1).values() if tensor.nbytes <= 512)
    for number, choice in enumerate(choices):
        with holdfast.open(tmp_path) as writer:
            saved = writer.save(f"again/{number}", make_weights(1), compression=choice)
        assert (saved.new_bytes, saved.digest) == (small_bytes, store.snapshot("fast").digest)


@pytest.mark.parametrize("store", ["codecs"], indirect=True)
def test_the_golden_codecs_are_all_there_are(store: holdfast.Store) -> None:
    found = {
        (chunk.location.codec, chunk.location.stored_bytes < chunk.size_bytes)
        for name in ("raw", "fast", "small", "mixed")
        for entry in read_entries(store.repository, name).values()
        for chunk in entry.chunks
        if chunk.location
    }
    assert found == {(RAW, False), (BLOSC2, True)}


@pytest.mark.parametrize("store", ["deltas"], indirect=True)
@pytest.mark.parametrize(
    ("name", "step"), [("run/1", 1), ("run/2", 2), ("run/3", 3), ("whole", 4), ("raw/0", 5), ("raw/1", 6)]
)
def test_every_delta_gives_its_chunk(store: holdfast.Store, name: str, step: int) -> None:
    assert find_differences(store.load(name), make_trained(step)) == []


@pytest.mark.parametrize("store", ["deltas"], indirect=True)
def test_the_golden_deltas_are_on_every_kind_of_base(store: holdfast.Store) -> None:
    found = {
        (name.partition("/")[0], chunk.location.base.location.codec)
        for name in ("run/1", "run/2", "run/3", "raw/1")
        for entry in read_entries(store.repository, name).values()
        for chunk in entry.chunks
        if chunk.location and chunk.location.base and chunk.location.codec == DELTA
    }
    assert found == {("run", BLOSC2), ("raw", RAW)}


@pytest.mark.parametrize("store", ["recorded"], indirect=True)
def test_recorded_runs_are_read_and_compared(store: holdfast.Store) -> None:
    run, result = store.run("good"), store.diff_runs("good", "bad")

    assert (len(run.steps), run.facts.status) == (RECORDED_STEPS, "complete")
    weight = next(event for event in run.events(0) if event.site.fqn == "0.weight")
    assert run.read_tensor(weight).tolist() == [[-1.0, 0.0], [1.0, 2.0]]
    assert result.headline == "step 1, optimizer, param_groups.0: param_groups.0['lr'] differs by itself"


@pytest.mark.parametrize("store", ["blake3"], indirect=True)
def test_recorded_runs_with_digests_of_other_kinds_are_compared_by_those_that_both_have(store: holdfast.Store) -> None:
    kinds = {name: {(bool(each.digest), bool(each.blake3)) for each in store.run(name).events(0)} for name in BLAKE3}

    assert kinds == {"both": {(True, True)}, "full": {(True, True)}, "device": {(False, True)}}
    assert all(diff_runs(store.run(a), store.run(b)).is_equal for a in BLAKE3 for b in BLAKE3)


@pytest.mark.parametrize("store", ["blake3"], indirect=True)
def test_recorded_runs_without_a_digest_in_common_are_never_said_to_differ(store: holdfast.Store) -> None:
    today = holdfast.open("memory://")
    record_training(today, "new")

    assert diff_runs(store.run("both"), today.run("new")).is_equal
    apart = diff_runs(store.run("device"), today.run("new"))
    assert apart.origin is None
    assert (apart.is_match, apart.counts["equal"]) == (False, 0)


@pytest.mark.parametrize("store", ["recorded"], indirect=True)
def test_recorded_runs_are_compared_with_new_ones(store: holdfast.Store) -> None:
    today = holdfast.open("memory://")
    record_training(today, "good")
    record_training(today, "bad", slow_from=1)

    assert diff_runs(store.run("good"), today.run("good")).is_equal
    assert diff_runs(today.run("good"), store.run("good")).is_equal
    for a, b in ((store, today), (today, store)):
        origin = diff_runs(a.run("good"), b.run("bad")).origin
        assert origin is not None
        assert (origin.step, origin.phase, origin.fqn) == (1, "optimizer", "param_groups.0")


@pytest.mark.parametrize("store", ["ranks", "dcp"], indirect=True)
def test_one_process_loads_what_many_have_saved(store: holdfast.Store) -> None:
    names = [snapshot.name for snapshot in store.snapshots()]
    tree = store.load("run/a")["model"] if "run/a" in names else store.load("all")
    assert {name.partition(",")[0] for name in tree} == SHAPES.keys()
    wanted = {name: make_full(name.partition(",")[0]) for name in tree}
    assert find_differences(tree, wanted) == []


@pytest.mark.parametrize(("size", "shift"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_other_worlds_load_what_many_have_saved(world: World, tmp_path: Path, size: int, shift: int) -> None:
    path = unpack(GOLDEN / "ranks.tar.gz", tmp_path)
    assert world(size)(load_ranks, path, shift) == [[]] * size


@pytest.mark.slow
def test_each_rank_of_the_same_world_gets_its_own_back(world: World, tmp_path: Path) -> None:
    path = unpack(GOLDEN / "ranks.tar.gz", tmp_path)
    found = world(RANKS)(load_own, path)
    assert found == [([*range(rank, rank + 5)], [float(rank)] * 3) for rank in range(RANKS)]


@pytest.mark.parametrize(("size", "shift"), [(2, 1), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_torch_loads_a_checkpoint_of_its_own_on_another_world(
    world: World, tmp_path: Path, size: int, shift: int
) -> None:
    path = unpack(GOLDEN / "dcp.tar.gz", tmp_path)
    assert world(size)(load_by_torch, path, shift) == [[]] * size
