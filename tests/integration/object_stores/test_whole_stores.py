"""A store in a bucket through the public interface: every feature, other processes, and where secrets must not go."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast import dcp
from holdfast.compile_cache.artifacts.artifact import read_artifact
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.errors import BadName, StoreError, Untrusted
from tests.kit.compile_artifacts import SECRET, make_artifact, store_artifact
from tests.kit.dcp_calls import ALONE
from tests.kit.s3_server import S3Server
from tests.unit.objects.cloud.servers import QUICK

URL = "s3://bucket/ckpts"


def open_bucket(server: S3Server, **more: Any) -> holdfast.Store:
    options = {**server.options, "secret_access_key": "hidden", "retry_config": QUICK, **more}
    return holdfast.open(URL, storage_options=options)


def make_state() -> dict[str, Any]:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 1}


def test_a_training_run_is_saved_resumed_and_pruned(server: S3Server) -> None:
    store, state = open_bucket(server), make_state()
    store.save("run/step-1", state)
    store.save_async("run/step-2", state | {"step": 2}).wait()
    target = make_state()

    latest = store.latest("run/")
    assert latest is not None
    open_bucket(server).load_into(latest, target)

    assert target["step"] == 2
    assert torch.equal(target["model"].weight, state["model"].weight)
    with store.manager("run/", every=1, keep_last=1) as manager:
        manager.step(3, state)
    assert [*open_bucket(server)] == ["run/step-3"]
    assert [finding for finding in store.check(read=True) if finding.severity == "error"] == []


def test_files_of_other_libraries_go_in_and_out(server: S3Server, tmp_path: Path) -> None:
    store, tensors = open_bucket(server), {"a": torch.arange(5.0)}
    torch.save(tensors, tmp_path / "in.pt")

    store.import_(tmp_path / "in.pt", "imported")
    store.export("imported", tmp_path / "out.pt", format="torch")

    assert torch.equal(torch.load(tmp_path / "out.pt")["a"], tensors["a"])


def test_an_export_in_the_background_needs_no_credentials_of_another_process(server: S3Server, tmp_path: Path) -> None:
    """Options that were given in code are not sent to another process, so a thread of this one exports."""
    store = open_bucket(server)
    store.save("one", {"a": torch.arange(5.0)})

    store.export_async("one", tmp_path / "out.pt", format="torch").wait()

    assert torch.equal(torch.load(tmp_path / "out.pt")["a"], torch.arange(5.0))


def test_runs_are_recorded_and_compared(server: S3Server) -> None:
    store, model = open_bucket(server), torch.nn.Linear(4, 4)
    for name, value in (("good", 1.0), ("bad", 2.0)):
        with store.record(name, model):
            model(torch.full((2, 4), value))

    diff = store.diff_runs("good", "bad")

    assert diff.origins


def test_compiled_graphs_of_a_bucket_must_be_signed(server: S3Server) -> None:
    repo = open_bucket(server).repository
    plain = store_artifact(repo, make_artifact("a"))
    signed = store_artifact(repo, make_artifact("b"), secret=SECRET)

    with pytest.raises(Untrusted, match="the store is not a local directory"):
        read_artifact(repo, plain, trust=Trust(SECRET))

    assert read_artifact(repo, signed, trust=Trust(SECRET)).graph == b"graph"


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_dcp_saves_to_a_bucket(server: S3Server) -> None:
    store, loaded = open_bucket(server), {"w": torch.zeros(4)}
    save({"w": torch.ones(4)}, storage_writer=dcp.StorageWriter(store, "dcp/1"), **ALONE)
    load(loaded, storage_reader=dcp.StorageReader(store, "dcp/1"), **ALONE)

    assert torch.equal(loaded["w"], torch.ones(4))


class Weights(Dataset[Any]):
    """Reads snapshots in the process of a worker."""

    def __init__(self, store: holdfast.Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.store.load(f"run/{index}")["x"]


def test_workers_that_are_spawned_read_with_the_credentials_of_their_environment(environment: S3Server) -> None:
    store = open_bucket(environment)
    for index in range(2):
        store.save(f"run/{index}", {"x": torch.full((3,), float(index))})

    loader = DataLoader(Weights(store), num_workers=1, multiprocessing_context="spawn", batch_size=None)

    assert [float(tensor[0]) for tensor in loader] == [0.0, 1.0]


def test_a_forked_child_is_told_to_be_spawned(server: S3Server) -> None:
    store = open_bucket(server)
    store.save("one", 1)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.load("one")
        except StoreError as error:
            os.write(write_end, str(error).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)

    assert "start it with the method 'spawn' or 'forkserver'" in text
    assert store.load("one") == 1


def test_a_pickled_store_has_its_endpoint_and_no_secret(environment: S3Server) -> None:
    store = open_bucket(environment)
    store.save("one", 1)

    data = pickle.dumps(store)

    assert b"hidden" not in data
    assert environment.endpoint.encode() in data
    assert pickle.loads(data).load("one") == 1


def test_a_copy_within_the_process_keeps_its_credentials(server: S3Server) -> None:
    store = open_bucket(server)
    store.save("one", 1)

    assert deepcopy(store).load("one") == 1


def test_no_record_and_no_log_has_a_secret(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = open_bucket(server)

    store.save("one", make_state())
    store.gc()

    assert "hidden" not in caplog.text + repr(store) + repr(vars(store)) + repr(store.repository.store)
    assert not any(b"hidden" in stored.data or "hidden" in key for key, stored in server.objects.items())


@pytest.mark.parametrize("place", ["ckpts", "memory://"])
def test_storage_options_are_for_buckets_only(place: str) -> None:
    with pytest.raises(BadName, match="storage_options are for s3://"):
        holdfast.open(place, storage_options={"endpoint": "x"})


def test_a_store_opened_without_obstore_says_what_to_install() -> None:
    program = "import sys; sys.modules['obstore'] = None; import holdfast; holdfast.open('s3://bucket/x')"

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "s3://bucket/x needs the package obstore: install it with `pip install obstore`" in ran.stderr


def test_local_stores_do_not_import_obstore(tmp_path: Path) -> None:
    program = f"import sys, holdfast; holdfast.open({str(tmp_path)!r}).save('x', 1); sys.exit('obstore' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
