"""Exports in the background: results, errors, progress, low priority."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.formats.background import ExportRunner
from holdfast.formats.export import ExportResult
from holdfast.objects.memory import MemoryStore
from holdfast.progress import Progress
from tests.kit.patience import PATIENCE_S


@pytest.fixture
def store() -> holdfast.Store:
    # In memory: exports of a directory need a process each, which takes seconds to start.
    return holdfast.Store(MemoryStore())


def test_the_handle_returns_the_result(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.arange(5)})

    handle = store.export_async("a", tmp_path / "out")
    done = handle.wait(PATIENCE_S)

    assert load_file(tmp_path / "out")["x"].tolist() == [0, 1, 2, 3, 4]
    assert done.receipt.snapshot == "a"
    assert handle.done()
    assert handle.progress() == (40, 40)


def test_the_snapshot_is_the_one_that_was_named_at_the_start(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.zeros(2)})
    store.tag("best", "a")
    store.save("b", {"x": torch.ones(2)})

    handle = store.export_async("best", tmp_path / "out")
    store.tag("best", "b", move=True)
    handle.wait(PATIENCE_S)

    assert load_file(tmp_path / "out")["x"].tolist() == [0, 0]


def test_wait_raises_the_error_and_close_does_not_repeat_it(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.zeros(2)})
    (tmp_path / "out").write_text("old")

    handle = store.export_async("a", tmp_path / "out")

    with pytest.raises(holdfast.NameInUse, match="exists already"):
        handle.wait(PATIENCE_S)
    store.close()


def test_close_raises_an_error_that_nobody_has_seen(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.zeros(2)})
    (tmp_path / "out").write_text("old")

    store.export_async("a", tmp_path / "out")

    with pytest.raises(holdfast.NameInUse, match="exists already"):
        store.close()


def test_options_are_checked_before_the_call_returns(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.zeros(2)})

    with pytest.raises(ValueError, match="format must be one of"):
        store.export_async("a", tmp_path / "out", format="gguf")


def test_close_waits_for_every_export(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.randn(100_000)})

    handles = [store.export_async("a", tmp_path / str(number)) for number in range(3)]
    store.close()

    assert all(handle.done() for handle in handles)


def test_a_wait_ends_in_time(tmp_path: Path) -> None:
    may_end = threading.Event()

    def run(progress: Progress) -> ExportResult:
        may_end.wait()
        raise ValueError("planted")

    runner = ExportRunner()
    handle = runner.start("a", run)
    try:
        with pytest.raises(TimeoutError, match="the export of 'a' is still under way after 0 s"):
            handle.wait(0)
        assert not handle.done()
    finally:
        may_end.set()
    with pytest.raises(ValueError, match="planted"):
        runner.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority belongs to a process")
def test_only_the_threads_of_the_export_have_a_low_priority() -> None:
    found: list[int] = []

    def run(progress: Progress) -> ExportResult:
        worker = threading.Thread(
            target=lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        )
        worker.start()
        worker.join()
        raise ValueError("planted")

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with pytest.raises(ValueError, match="planted"):
        ExportRunner().start("a", run).wait(PATIENCE_S)

    assert found == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
