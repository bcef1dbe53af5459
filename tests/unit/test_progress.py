"""Progress of library calls: what a callback receives, in which order, and that nothing is printed without it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.progress import CallbackProgress, LockedProgress, Progress, ProgressUpdate, Silent

SIZE = 4 << 20


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    """A store with one snapshot of 16 MiB."""
    store = holdfast.open(tmp_path / "ckpts")
    store.save("run/1", make_state())
    return store


def make_state() -> dict[str, torch.Tensor]:
    return {name: torch.arange(SIZE // 8) + number for number, name in enumerate("abcd")}


def verify_complete(seen: list[ProgressUpdate], task: str, total: int) -> None:
    """Check the calls of one task: from nothing to everything, and one last call."""
    assert {update.task for update in seen} == {task}
    assert {update.total_bytes for update in seen} == {total}
    done = [update.done_bytes for update in seen]
    assert done[0] == 0
    assert done == sorted(done)
    assert done[-1] == total
    assert [update.is_ended for update in seen] == [False] * (len(seen) - 1) + [True]
    assert len(seen) > 3


def test_a_save_reports_every_byte(tmp_path: Path) -> None:
    seen: list[ProgressUpdate] = []

    holdfast.open(tmp_path / "ckpts").save("run/1", make_state(), progress=seen.append)

    verify_complete(seen, "save run/1", 4 * SIZE)


def test_a_save_in_the_background_reports_every_byte(tmp_path: Path) -> None:
    seen: list[ProgressUpdate] = []

    handle = holdfast.open(tmp_path / "ckpts").save_async("run/1", make_state(), progress=seen.append)
    handle.wait()

    verify_complete(seen, "save run/1", 4 * SIZE)
    assert handle.progress() == (4 * SIZE, 4 * SIZE)


def test_a_load_reports_every_byte(store: holdfast.Store) -> None:
    seen: list[ProgressUpdate] = []

    loaded = store.load("run/1", progress=seen.append)

    assert torch.equal(loaded["d"], make_state()["d"])
    verify_complete(seen, "load run/1", 4 * SIZE)


def test_a_load_of_a_part_reports_the_bytes_of_the_part(store: holdfast.Store) -> None:
    seen: list[ProgressUpdate] = []

    store.load("run/1", only="a", progress=seen.append)

    assert seen[-1] == ProgressUpdate("load run/1", SIZE, SIZE, is_ended=True)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_load_in_place_reports_every_byte(store: holdfast.Store, atomic: bool) -> None:
    target = {name: torch.zeros_like(tensor) for name, tensor in make_state().items()}
    seen: list[ProgressUpdate] = []

    store.load_into("run/1", target, atomic=atomic, progress=seen.append)

    assert torch.equal(target["d"], make_state()["d"])
    verify_complete(seen, "load run/1", 4 * SIZE)


def test_an_export_and_an_import_report_every_byte(store: holdfast.Store, tmp_path: Path) -> None:
    exported: list[ProgressUpdate] = []
    imported: list[ProgressUpdate] = []

    store.export("run/1", tmp_path / "model.safetensors", progress=exported.append)
    store.import_(tmp_path / "model.safetensors", "imported", progress=imported.append)

    for seen in (exported, imported):
        assert seen[-1].is_ended
        assert seen[-1].done_bytes == seen[-1].total_bytes >= 4 * SIZE


def test_a_check_reports_its_progress(store: holdfast.Store) -> None:
    seen: list[ProgressUpdate] = []

    store.check(read=True, progress=seen.append)

    assert seen[-1].is_ended
    assert seen[-1].total_bytes >= seen[-1].done_bytes > 4 * SIZE  # the footers of packs are not counted


def test_without_it_nothing_is_printed(store: holdfast.Store, capfd: pytest.CaptureFixture[str]) -> None:
    store.load("run/1")
    store.load("run/1", progress=False)
    store.save("run/2", make_state(), progress=None)

    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_callback_ends_the_save_and_commits_nothing(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "ckpts")

    def stop(update: ProgressUpdate) -> None:
        if update.done_bytes:
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        store.save("run/1", make_state(), progress=stop)

    assert "run/1" not in store
    assert [finding for finding in store.check() if finding.severity != "note"] == []


def test_a_new_task_ends_the_one_before() -> None:
    seen: list[ProgressUpdate] = []
    progress = CallbackProgress(seen.append)

    progress.begin("one", 10)
    progress.begin("two", 10)
    progress.end()
    progress.end()

    ended = [update.is_ended for update in seen]
    assert [(update.task, is_ended) for update, is_ended in zip(seen, ended, strict=True)] == [
        ("one", False),
        ("one", True),
        ("two", False),
        ("two", True),
    ]


def test_more_bytes_than_expected_are_not_reported() -> None:
    seen: list[ProgressUpdate] = []
    progress = CallbackProgress(seen.append)

    progress.advance(5)
    progress.begin("one", 10)
    progress.advance(25)

    assert [update.done_bytes for update in seen] == [0, 10]


def test_a_locked_progress_passes_on_one_call_at_a_time() -> None:
    inside = threading.Semaphore(1)

    class Strict(Silent):
        total = 0

        def advance(self, num_bytes: int) -> None:
            assert inside.acquire(blocking=False), "two calls at a time"
            self.total += num_bytes
            inside.release()

    strict = Strict()
    locked = LockedProgress(strict)

    def count() -> None:
        for _ in range(500):
            locked.advance(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert strict.total == 2000
    assert isinstance(locked, Progress)
