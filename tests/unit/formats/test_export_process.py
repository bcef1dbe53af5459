"""Exports in another process: the same files and receipts as in this one, its errors, its death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast import low_priority
from holdfast.errors import NotFound, StoreError
from holdfast.formats import background
from holdfast.formats.background import can_export_apart, export_apart, serve
from holdfast.formats.export import ExportOptions, ExportResult
from holdfast.objects.memory import MemoryStore
from tests.kit.hooking import Hook


class Seen:
    """Collects progress."""

    def __init__(self) -> None:
        self.total_bytes = self.done_bytes = 0

    def begin(self, task: str, total_bytes: int) -> None:
        self.total_bytes = total_bytes

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes

    def end(self) -> None:
        pass


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    opened = holdfast.open(tmp_path / "store")
    opened.save("a", {"model": {"x": torch.arange(5.0), "skipped": torch.ones(2)}, "step": 3})
    return opened


def run_apart(store: holdfast.Store, path: Path, options: ExportOptions, progress: Seen | None = None) -> ExportResult:
    record = store.snapshot("a").record
    return export_apart(store.repository, record, str(path), options, progress=progress)


def test_every_option_reaches_the_other_process(store: holdfast.Store, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    seen = Seen()

    options = ExportOptions(
        select="model",
        exclude=["*skipped"],
        dtype=torch.bfloat16,
        replace=True,
        receipt=tmp_path / "receipt.json",
    )

    done = run_apart(store, tmp_path / "out", options, seen)

    assert {name: tensor.dtype for name, tensor in load_file(tmp_path / "out").items()} == {"x": torch.bfloat16}
    assert done.receipt_path == str(tmp_path / "receipt.json")
    assert done.receipt.root == store.snapshot("a").digest
    assert (seen.done_bytes, seen.total_bytes, done.num_bytes) == (20, 20, 10)


@pytest.mark.slow
def test_an_error_is_raised_here_as_it_was_raised_there(store: holdfast.Store, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")

    with pytest.raises(holdfast.NameInUse, match="exists already"):
        run_apart(store, tmp_path / "out", ExportOptions())


@pytest.mark.slow
def test_a_snapshot_that_was_overwritten_is_refused(store: holdfast.Store, tmp_path: Path) -> None:
    record = store.snapshot("a").record
    store.save("a", {"x": torch.zeros(3)}, overwrite=True)

    with pytest.raises(NotFound, match="overwritten or deleted"):
        export_apart(store.repository, record, str(tmp_path / "out"), ExportOptions())

    assert not (tmp_path / "out").exists()


def test_a_process_that_dies_is_named(store: holdfast.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_priority, "_PROGRAM", "import os, sys; sys.stdin.read(); os._exit(7)")

    with pytest.raises(StoreError, match="ended with code 7 and without a result"):
        run_apart(store, tmp_path / "out", ExportOptions())


@pytest.mark.slow
def test_a_process_whose_parent_has_died_leaves_nothing(store: holdfast.Store, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "format": "safetensors",
        "select": "",
        "exclude": [],
        "dtype": None,
        "max_shard_bytes": 1 << 30,
    }
    job = {
        "module": background.__name__,
        "modules": sys.path,
        "url": store.url,
        "budget_bytes": 64 << 20,
        "name": "a",
        "digest": store.snapshot("a").digest.hex(),
        "destination": str(tmp_path / "out"),
        "options": {**options, "replace": False, "receipt_path": None},
    }
    read_end, write_end = os.pipe()
    os.close(read_end)

    subprocess.run(
        [sys.executable, "-c", low_priority._PROGRAM],
        input=json.dumps(job).encode(),
        stdout=write_end,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write_end)

    assert sorted(os.listdir(tmp_path)) == ["store"]


def test_an_unknown_error_is_a_store_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    class Strange(Exception):
        pass

    def fail(job: object) -> None:
        raise Strange("odd")

    hook(background, "_export", fail)
    monkeypatch.setattr(os, "nice", lambda by: by)
    serve({})
    last = json.loads(capfd.readouterr().out)

    error = background._decode_error(last["type"], last["error"])

    assert isinstance(error, StoreError)
    assert "Strange: odd" in str(error)


def test_a_store_that_exists_in_this_process_alone_is_exported_here(tmp_path: Path) -> None:
    store = holdfast.Store(MemoryStore())
    store.save("a", {"x": torch.ones(2)})

    store.export_async("a", tmp_path / "out").wait()

    assert not can_export_apart(store.repository)
    assert load_file(tmp_path / "out")["x"].tolist() == [1, 1]
