"""`delta=` on every way to save and to load, and what people see of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.repo.format.chunk import DELTA
from holdfast.repo.handle.compression import DeltaChoice
from holdfast.testing.ranks import run_ranks
from tests.cli.runs import Cli
from tests.kit.saving import read_entries


def make(step: int) -> dict[str, torch.Tensor]:
    """Return a state of which a step changes the lowest bits of some weights."""
    weights = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    flips = (torch.arange(300_000) * 2_654_435_761 % 100 < 3 * step).to(torch.int16).reshape(300, 1000)
    return {"weights": (weights.view(torch.int16) ^ flips).view(torch.bfloat16), "step": torch.tensor(step)}


def count_deltas(store: holdfast.Store, name: str) -> int:
    entries = read_entries(store.repository, name).values()
    return sum(chunk.location.codec == DELTA for entry in entries for chunk in entry.chunks if chunk.location)


@pytest.mark.parametrize(
    ("opened", "saved", "is_delta"), [("auto", None, True), ("off", None, False), ("off", 5, True), (5, "off", False)]
)
def test_a_save_follows_its_own_choice_or_that_of_the_store(
    tmp_path: Path, opened: DeltaChoice, saved: DeltaChoice | None, is_delta: bool
) -> None:
    store = holdfast.open(tmp_path, compression="small", delta=opened)
    store.save("run/0", make(0), delta=saved)
    result = store.save("run/1", make(1), delta=saved)
    store.save_async("run/2", make(2), delta=saved).wait()
    assert (count_deltas(store, "run/1") > 0, count_deltas(store, "run/2") > 0) == (is_delta, is_delta)
    assert (result.stored_bytes < 0.3 * result.new_bytes) == is_delta
    for step in range(3):
        assert torch.equal(store.load(f"run/{step}")["weights"], make(step)["weights"])


def test_a_wrong_choice_is_refused_when_the_store_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="delta must be 'auto', 'off' or a number N"):
        holdfast.open(tmp_path, delta=0)


def test_a_manager_saves_deltas(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path)
    with store.manager("run/", every=1, compression="small", delta=10) as manager:
        for step in (1, 2):
            manager.step(step, make(step))
    assert count_deltas(store, "run/step-2") > 0


def test_slices_maps_and_loads_in_place_read_deltas(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path, compression="small")
    for step in range(2):
        store.save(f"run/{step}", make(step))
    assert count_deltas(store, "run/1") > 0
    tree = make(0)
    store.load_into("run/1", tree, since="run/0")
    assert torch.equal(tree["weights"], make(1)["weights"])
    lazy = store["run/1"]["weights"]
    assert torch.equal(lazy[17:250, 3:900:7], make(1)["weights"][17:250, 3:900:7])
    assert torch.equal(store.load("run/1", mmap=True)["weights"], make(1)["weights"])
    assert store.diff("run/0", "run/1").changed


def test_show_and_doctor_tell_what_deltas_take(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    cli = Cli(tmp_path, capsysbinary)
    store = holdfast.open(cli.store, compression="small")
    for step in range(2):
        store.save(f"run/{step}", make(step))
    shown = cli("show", "run/1").out
    assert "; bases of 1 delta: " in shown
    facts = json.loads(cli("show", "run/1", "--json").out)
    assert facts["delta_chunks"] == 1
    assert facts["base_bytes"] > 5 * facts["packed_bytes"]
    assert [pack["chunks"] for pack in facts["packs"]] == [1, 1]
    chunks = json.loads(cli("show", "run/1", "--chunks", "--json").out)
    before = json.loads(cli("show", "run/0", "--chunks", "--json").out)
    bases = {chunk["base"] for entry in chunks["content"] for chunk in entry["chunks"] if chunk["base"]}
    assert bases < {chunk["digest"] for entry in before["content"] for chunk in entry["chunks"]}
    assert "chunks may be deltas" in cli("doctor").out


def _save_steps(rank: int, path: Path) -> list[int]:
    tree = make(0)
    store = holdfast.open(path, compression="small")
    stored = []
    for step in range(2):
        mine = {**make(step), "own": holdfast.per_rank(make(step + rank)["weights"])}
        stored.append(store.save(f"run/{step}", mine).stored_bytes)
    store.load_into("run/1", tree, strict=False)
    assert torch.equal(tree["weights"], make(1)["weights"])
    return stored


def test_every_rank_stores_deltas(tmp_path: Path) -> None:
    for whole, change in run_ranks(2, _save_steps, tmp_path):
        assert change < 0.3 * whole
