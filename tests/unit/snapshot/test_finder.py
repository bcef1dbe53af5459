"""Reading from a store and its mirror: the store first, and the mirror for what it lacks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import NotFound, StoreError
from holdfast.progress import ProgressUpdate
from tests.kit.s3_server import BUCKET, S3Server, serve_s3


@pytest.fixture
def there(tmp_path: Path) -> str:
    """A mirror with three snapshots, of which the local store has the first."""
    url = str(tmp_path / "there")
    mirror = holdfast.open(url)
    for step in (1, 2, 3):
        mirror.save(f"run/{step}", {"w": torch.full((4,), float(step))}, metadata={"loss": 1 / step, "step": step})
    mirror.tag("best", "run/3")
    mirror.copy("run/1", tmp_path / "here")
    return url


@pytest.fixture
def store(tmp_path: Path, there: str) -> holdfast.Store:
    return holdfast.open(tmp_path / "here", mirror=there)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


def values_of(snapshot: holdfast.Snapshot | None) -> list[float]:
    assert snapshot is not None
    values: list[float] = snapshot["w"].read().tolist()
    return values


def test_a_new_machine_resumes_from_the_mirror(tmp_path: Path, there: str) -> None:
    state = {"w": torch.zeros(4)}
    store = holdfast.open(tmp_path / "new", mirror=there)
    latest = store.latest("run/")
    assert values_of(latest) == [3.0] * 4
    assert latest is not None
    store.load_into(latest, state)
    assert state["w"].tolist() == [3.0] * 4
    assert store.load("run/2")["w"].tolist() == [2.0] * 4
    store.load_into("run/2", state)
    assert state["w"].tolist() == [2.0] * 4
    assert not (tmp_path / "new").exists()


def test_a_manager_resumes_from_the_mirror_and_goes_on_here(tmp_path: Path) -> None:
    state = {"w": torch.ones(4)}
    with holdfast.open(tmp_path / "old", mirror=tmp_path / "m") as store, store.manager("run/", every=1) as manager:
        manager.step(7, state)
    fresh = {"w": torch.zeros(4)}
    with holdfast.open(tmp_path / "new", mirror=tmp_path / "m") as store, store.manager("run/", every=1) as manager:
        assert manager.resume(fresh) == 7
        manager.step(8, fresh)
    assert fresh["w"].tolist() == [1.0] * 4
    assert set(holdfast.open(tmp_path / "m")) == {"run/step-7", "run/step-8"}
    assert set(holdfast.open(tmp_path / "new")) == {"run/step-8"}


def test_lists_have_both(store: holdfast.Store) -> None:
    assert list(store) == ["run/1", "run/2", "run/3"]
    assert [each.name for each in store.snapshots(where="loss < 0.9", sort="-step")] == ["run/3", "run/2"]
    assert store.best("run/", "loss").name == "run/3"
    assert "run/3" in store
    assert "best" in store
    assert "run/4" not in store
    assert values_of(store["best"]) == [3.0] * 4
    assert store.bisect("run/", lambda each: each.metadata["step"] < 3).first_bad.name == "run/3"


def test_a_name_that_both_have_is_read_here(store: holdfast.Store, there: str) -> None:
    holdfast.open(there).save("run/1", {"w": torch.zeros(4)}, overwrite=True)
    assert values_of(store["run/1"]) == [1.0] * 4
    assert values_of(store.latest("run/")) == [3.0] * 4


def test_what_is_newest_here_is_the_latest(store: holdfast.Store) -> None:
    store.save("run/4", {"w": torch.full((4,), 4.0)})
    assert values_of(store.latest("run/")) == [4.0] * 4
    store.close()


def test_files_and_exports_are_read_from_the_mirror(store: holdfast.Store, tmp_path: Path) -> None:
    store.export("run/2", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").exists()
    assert store.verify_export(tmp_path / "out.safetensors", "run/2") == []


def test_what_changes_the_store_needs_a_snapshot_of_it(store: holdfast.Store) -> None:
    with pytest.raises(NotFound):
        store.tag("mine", "run/3")
    with pytest.raises(NotFound):
        store.diff("run/1", store["run/3"])


def test_a_name_that_neither_has_is_not_found(store: holdfast.Store) -> None:
    with pytest.raises(NotFound, match="run/9"):
        store.load("run/9")
    with pytest.raises(NotFound, match="run/9"):
        store.load_into("run/9", {})


def test_without_the_mirror_the_store_answers_alone(
    tmp_path: Path, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.fault_of = lambda request: "403"
    mirror = f"s3://{BUCKET}/m"
    store = holdfast.open(tmp_path / "here", mirror=mirror, mirror_wait=False, mirror_options=server.options)
    with pytest.raises(StoreError):
        store.latest("run/")
    store.save("run/1", {"w": torch.ones(4)})
    with caplog.at_level(logging.WARNING, logger="holdfast.snapshot.finder"):
        assert values_of(store.latest("run/")) == [1.0] * 4
    assert "only the store itself was searched" in caplog.text
    store.close()


def test_a_copy_reports_its_progress(store: holdfast.Store, tmp_path: Path) -> None:
    seen: list[ProgressUpdate] = []
    target = holdfast.open(tmp_path / "third")
    result = store.copy("run/3", target, progress=seen.append)
    assert (result.name, seen[-1].is_ended) == ("run/3", True)
    assert store.copy("run/3", target).existed
