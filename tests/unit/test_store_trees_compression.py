"""`compression=` on every way to save, and what people see of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.repo.format.chunk import BLOSC2, RAW
from holdfast.repo.handle.compression import Compression
from tests.cli.runs import Cli
from tests.kit.saving import read_entries

STATE = {
    "bf16": (torch.arange(40_000) % 1000).to(torch.bfloat16),
    "complex": torch.complex(torch.arange(3000.0), torch.ones(3000)),
    "bool": torch.arange(9000) % 3 == 0,
}


def find_codecs(store: holdfast.Store, name: str) -> set[int]:
    entries = read_entries(store.repository, name).values()
    return {chunk.location.codec for entry in entries for chunk in entry.chunks if chunk.location}


def assert_loads(store: holdfast.Store, name: str) -> None:
    loaded = store.load(name)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in STATE.items())


@pytest.mark.parametrize(
    ("opened", "saved", "codec"),
    [("fast", "default", BLOSC2), ("default", "small", BLOSC2), ("small", None, RAW), ("default", "default", RAW)],
)
def test_a_save_follows_its_own_choice_or_that_of_the_store(
    tmp_path: Path, opened: Compression, saved: Compression, codec: int
) -> None:
    store = holdfast.open(tmp_path, compression=opened)
    result = store.save("a", STATE, compression=saved)
    store.save_async("b", {key: tensor[1:].clone() for key, tensor in STATE.items()}, compression=saved).wait()
    assert find_codecs(store, "a") == find_codecs(store, "b") == {codec}
    assert (result.stored_bytes < result.new_bytes) == (codec == BLOSC2)
    assert_loads(store, "a")


def test_a_manager_saves_with_its_own_choice(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path)
    with store.manager("run/", every=1, compression="small") as manager:
        manager.step(1, STATE)
    assert find_codecs(store, "run/step-1") == {BLOSC2}


def test_views_slices_maps_and_loads_in_place_read_compressed_tensors(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path, compression="fast")
    store.save("a", STATE)
    assert torch.equal(store["a"]["bf16"][100:200], STATE["bf16"][100:200])
    target = {key: torch.zeros_like(tensor) for key, tensor in STATE.items()}
    store.load_into("a", target)
    mapped = store.load("a", mmap=True)
    for key, tensor in STATE.items():
        assert torch.equal(target[key], tensor)
        assert torch.equal(mapped[key], tensor)
    assert store.statistics().stages["decode"].size_bytes > 0
    assert [finding for finding in store.check(read=True) if finding.severity != "note"] == []


def test_exports_and_copies_of_compressed_tensors_are_the_same_as_of_raw_ones(tmp_path: Path) -> None:
    for choice in (None, "small"):
        store = holdfast.open(tmp_path / f"store-{choice}", compression=choice)
        tensors = {key: tensor for key, tensor in STATE.items() if key != "complex"}
        store.save("a", tensors)
        store.export("a", tmp_path / f"{choice}.safetensors", format="safetensors")
    assert (tmp_path / "None.safetensors").read_bytes() == (tmp_path / "small.safetensors").read_bytes()


def test_a_wrong_choice_is_refused_at_once(tmp_path: Path) -> None:
    wrong: Any = "zip"
    with pytest.raises(ValueError, match="compression must be None, 'auto', 'fast', 'small' or 'default', not 'zip'"):
        holdfast.open(tmp_path, compression=wrong)
    with pytest.raises(ValueError, match="compression must be"):
        holdfast.open(tmp_path).save("a", STATE, compression=wrong)


@pytest.mark.parametrize("verb", ["put", "import"])
def test_the_command_line_compresses_and_says_what_it_gains(
    tmp_path: Path, verb: str, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": (torch.arange(400_000) % 1000).to(torch.bfloat16)}, path)
    words = ("put", "m", str(path)) if verb == "put" else ("import", str(path), "m")
    cli = Cli(tmp_path, capsysbinary)
    cli("init")

    assert "new, stored in" in cli(*words, "--compression", "small").out
    assert "(raw 781 KiB)" in cli("show", "m").out
    assert "less by compression" in cli("du").out
    assert "chunks may be compressed, which the first versions refuse" in cli("doctor").out
    described = json.loads(cli("du", "--json").out)
    (snapshot,) = described["snapshots"]
    assert described["compression_saved_bytes"] == snapshot["raw_bytes"] - snapshot["stored_bytes"] > 100_000
    shown = json.loads(cli("show", "m", "--chunks", "--json").out)
    assert {chunk["codec"] for entry in shown["content"] for chunk in entry["chunks"] if chunk["pack"]} >= {BLOSC2}
    assert cli("check", "--read").code == 0
