"""The suite of codecs measures what it claims."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bench.kit.compressed_peers import verify_state
from bench.kit.measure import TINY, WrongResult
from bench.suites import codecs


def test_every_format_returns_what_was_saved_and_states_what_it_stores(tmp_path: Path) -> None:
    state = codecs.make_weights("bf16", 1 << 20)
    rows = {row.workload: row for row in codecs._measure_formats("bf16", state, TINY, tmp_path)}

    stored = rows["bf16, small: stored"].figures
    assert stored.keys() == {"raw", "fast", "small", "torch.save + zstd", "safetensors + zstd", "DCP + zstd"}
    assert stored["small"] < stored["fast"] < stored["safetensors + zstd"] < 0.9 < 1.0 <= stored["raw"]
    assert rows["bf16, fast: first save"].against == "raw"
    assert "CPU s/GiB: raw" in rows["bf16, fast: load"].note
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_state_ends_the_run() -> None:
    state = codecs.make_weights("fp32", 1 << 16)
    with pytest.raises(WrongResult):
        verify_state(state, {name: tensor + 1 for name, tensor in state.items()})
    verify_state(state, {name: tensor.clone() for name, tensor in state.items()})


def test_weights_are_normal_and_as_large_as_asked_for() -> None:
    state = codecs.make_weights("fp32", 1 << 20)
    assert sum(tensor.nbytes for tensor in state.values()) == 1 << 20
    assert abs(torch.cat(list(state.values())).std().item() - 0.02) < 0.001


def test_a_slow_disk_waits_for_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr("time.sleep", sleep)
    files = codecs.SlowFiles(1000.0)
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        assert files.write_at(handle, 0, memoryview(bytes(500))) == 500
        assert files.read_into(handle, 0, memoryview(bytearray(250))) == 250
    finally:
        os.close(handle)
    assert now_s == pytest.approx(100.75)
