"""What a test file leaves behind is found and removed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.kit.leftovers import read_group_variables, read_handlers, remove_leftovers, restore_handlers


def test_nothing_left_is_nothing_found() -> None:
    assert remove_leftovers(read_group_variables()) == []


def test_a_process_group_is_closed(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)

    assert remove_leftovers(read_group_variables()) == ["a process group"]
    assert not dist.is_initialized()


def test_variables_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    before = read_group_variables()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("MASTER_PORT", "29500")

    assert remove_leftovers(before) == ["the variable MASTER_PORT='29500'", "the variable RANK='2'"]
    assert read_group_variables() == before


def test_handlers_of_signals_are_as_before() -> None:
    before = read_handlers()
    signal.signal(signal.SIGTERM, lambda number, frame: None)

    assert restore_handlers(before) == ["a handler of SIGTERM"]
    assert read_handlers() == before
    assert restore_handlers(before) == []
