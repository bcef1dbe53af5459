"""A store with a mirror, as users open it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import BadName, NotFound, StoreError
from holdfast.mirror.mirror import Mirror
from holdfast.progress import ProgressUpdate
from tests.kit.s3_server import BUCKET, S3Server, serve_s3

WEIGHTS = torch.arange(1000.0)
STATE = {"w": WEIGHTS, "step": 3}


def mirror_of(store: holdfast.Store) -> Mirror:
    assert store.mirror is not None
    return store.mirror


@pytest.fixture
def there(tmp_path: Path) -> str:
    return str(tmp_path / "there")


@pytest.fixture
def store(tmp_path: Path, there: str) -> holdfast.Store:
    return holdfast.open(tmp_path / "here", mirror=there)


def test_a_save_is_uploaded_behind_and_closing_waits_for_it(store: holdfast.Store, there: str) -> None:
    store.save("run/1", STATE, metadata={"loss": 0.5})
    assert mirror_of(store).state.waiting in (("run/1",), ())
    store.close()
    copy = holdfast.open(there)
    assert torch.equal(copy.load("run/1")["w"], WEIGHTS)
    assert copy["run/1"].digest == store["run/1"].digest
    assert copy["run/1"].metadata == {"loss": 0.5}
    assert copy["run/1"].time == store["run/1"].time


def test_every_way_to_save_is_mirrored(store: holdfast.Store, there: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text", encoding="utf-8")
    store.save_async("async", STATE).wait()
    store.put("files", tmp_path / "notes.txt")
    model = torch.nn.Linear(2, 2)
    with store.record("good", model):
        model(torch.ones(1, 2))
    store.tag("best", "async")
    store.close()
    copy = holdfast.open(there)
    assert set(copy) == {"async", "files"}
    assert [tag.name for tag in copy.tags()] == ["best"]
    assert [run.name for run in copy.runs()] == ["good"]


def test_waiting_and_synchronising_return_the_state(store: holdfast.Store) -> None:
    store.save("a", STATE)
    assert mirror_of(store).wait().present == 1
    assert mirror_of(store).sync().is_complete
    assert mirror_of(store).read_state().present == 1
    assert "0 waiting" in repr(store.mirror)
    store.close()


def test_progress_of_a_synchronisation_is_reported(store: holdfast.Store, tmp_path: Path, there: str) -> None:
    holdfast.open(tmp_path / "here").save("a", STATE)
    seen: list[ProgressUpdate] = []
    mirror_of(store).sync(progress=seen.append)
    assert seen[-1].is_ended
    assert seen[-1].done_bytes == seen[-1].total_bytes >= 4000


def test_waiting_raises_the_error_of_the_upload(tmp_path: Path, server: S3Server) -> None:
    server.fault_of = lambda request: "bad signature"
    store = holdfast.open(tmp_path / "here", mirror=f"s3://{BUCKET}/m", mirror_wait=False)
    store.save("a", STATE)
    with pytest.raises(StoreError, match="credentials"):
        mirror_of(store).wait()
    assert "credentials" in mirror_of(store).state.last_error
    store.close()
    assert torch.equal(store.load("a")["w"], WEIGHTS)


def test_the_next_process_finishes_what_a_killed_one_left(tmp_path: Path, server: S3Server) -> None:
    url = f"s3://{BUCKET}/m"
    # The mirror refuses everything, so that nothing is uploaded when the process kills itself.
    server.fault_of = lambda request: "403"
    program = (
        "import os, signal, sys, holdfast\n"
        "store = holdfast.open(sys.argv[1], mirror=sys.argv[2])\n"
        "store.put('run/1', sys.executable)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "here"), url], check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL

    server.fault_of = lambda request: None
    with holdfast.open(tmp_path / "here", mirror=url) as store:
        store.save("run/2", STATE)
    assert set(holdfast.open(url)) == {"run/1", "run/2"}


def test_a_single_save_can_name_a_mirror(tmp_path: Path, there: str) -> None:
    with holdfast.open(tmp_path / "here", environment=False) as store:
        store.save("kept", STATE)
        store.save("sent", STATE, mirror=there)
        store.save_async("sent/too", STATE, mirror=there).wait()
    assert set(holdfast.open(there)) == {"sent", "sent/too"}


def test_a_store_is_pickled_with_its_mirror(store: holdfast.Store, there: str) -> None:
    again = pickle.loads(pickle.dumps(store))
    assert again.mirror.url == there
    again.save("a", STATE)
    again.close()
    assert set(holdfast.open(there)) == {"a"}


def test_a_mirror_has_options_of_its_own(tmp_path: Path) -> None:
    with serve_s3() as server:
        url, options = f"s3://{BUCKET}/m", server.options | {"secret_access_key": "hidden"}
        with holdfast.open(tmp_path / "here", mirror=url, mirror_options=options) as store:
            store.save("a", STATE)
            assert mirror_of(store).wait().present == 1
        assert set(holdfast.open(url, storage_options=options)) == {"a"}
        assert b"hidden" not in pickle.dumps(store)


def test_a_snapshot_can_be_fetched_from_the_mirror(store: holdfast.Store, there: str, tmp_path: Path) -> None:
    holdfast.open(there).save("old", STATE)
    mirror_of(store).fetch("old")
    assert torch.equal(holdfast.open(tmp_path / "here").load("old")["w"], WEIGHTS)
    with pytest.raises(NotFound):
        mirror_of(store).fetch("none")


def test_a_store_without_a_mirror_has_none(tmp_path: Path) -> None:
    assert holdfast.open(tmp_path).mirror is None


@pytest.mark.parametrize("url", ["here", "memory://", "ftp://x"])
def test_a_mirror_that_cannot_be_one_is_refused_when_the_store_is_opened(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadName):
        holdfast.open("here", mirror=url)
