"""A Lightning Trainer whose checkpoints are in a store: what ModelCheckpoint keeps, and what can be loaded again."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast

pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'holdfast[lightning]'")

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from holdfast.integrations.lightning import HoldfastModelParallelStrategy, open_checkpoint
from tests.integration.frameworks.lightning_run import STEPS, Model, digest, make_model, make_trainer

# Lightning warns of its own use of torch, and of few workers, of each run.
pytestmark = pytest.mark.filterwarnings("ignore")


class Stopped(Exception):
    """Raised in the middle of an epoch, instead of a crash."""


class StopCallback(Callback):  # type: ignore[misc]  # its types are not known to mypy: pyproject.toml
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == self._step:
            raise Stopped


@pytest.fixture(autouse=True)
def keep_the_generators() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


@pytest.fixture
def end_the_group() -> Iterator[None]:
    """Lightning leaves the process group open, and the variables that describe it, which Accelerate would obey."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fit(tmp_path_factory.mktemp("whole"))


def fit(folder: Path, *, ckpt_path: str | None = None, **options: Any) -> str:
    """Train to the end; return the digest of the result."""
    trainer = make_trainer(folder, **options)
    trainer.fit(make_model(options.get("strategy", "auto")), ckpt_path=ckpt_path)
    assert trainer.global_step == STEPS
    return digest(folder, trainer)


def stop(folder: Path, *, at: int = 7, callbacks: tuple[Any, ...] = (), width: int = 6, **options: Any) -> None:
    """Train until an exception stops the run at a step."""
    trainer = make_trainer(folder, **options)
    trainer.callbacks[:0] = [StopCallback(at), *callbacks]
    with pytest.raises(Stopped):
        trainer.fit(make_model(options.get("strategy", "auto"), width))


def list_names(folder: Path) -> list[str]:
    return [snapshot.name for snapshot in holdfast.open(folder / "store").snapshots()]


def list_files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "out"))


# Lightning itself cannot link what a thread has not written yet.
@pytest.mark.parametrize(("save_last", "background"), [(True, False), ("link", False), (True, True)])
def test_a_run_that_resumes_from_the_last_checkpoint_ends_as_one_that_was_not_stopped(
    tmp_path: Path, expected: str, save_last: Any, background: bool
) -> None:
    stop(tmp_path, save_last=save_last, background=background)

    assert fit(tmp_path, ckpt_path="last", save_last=save_last) == expected


@pytest.mark.parametrize("path", ["{}/out/epoch=0-step=3.ckpt", "holdfast:run/epoch=0-step=3"])
def test_a_run_resumes_from_a_path_and_from_a_name(tmp_path: Path, expected: str, path: str) -> None:
    stop(tmp_path)

    assert fit(tmp_path, ckpt_path=path.format(tmp_path)) == expected


@pytest.mark.parametrize(("save_last", "names"), [(True, ["run/last"]), ("link", []), (False, [])])
def test_the_store_has_the_checkpoints_that_lightning_keeps(tmp_path: Path, save_last: Any, names: list[str]) -> None:
    fit(tmp_path, save_last=save_last)

    assert list_names(tmp_path) == ["run/epoch=1-step=9", "run/epoch=2-step=12", *names]
    files = ["epoch=1-step=9.ckpt", "epoch=2-step=12.ckpt", *(["last.ckpt"] if save_last else [])]
    assert list_files(tmp_path) == files
    assert holdfast.open(tmp_path / "store").check() == []


def test_no_more_than_markers_is_written_beside_the_store(tmp_path: Path) -> None:
    fit(tmp_path)

    assert max(path.stat().st_size for path in (tmp_path / "out").iterdir()) < 2048


def test_the_best_checkpoint_is_the_one_with_the_least_loss(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, monitor="loss", mode="min", save_top_k=1, save_last=False)
    trainer.fit(make_model())
    best = trainer.checkpoint_callback.best_model_path

    assert list_names(tmp_path) == [f"run/{Path(best).stem}"]
    trainer.validate(trainer.lightning_module, ckpt_path="best")
    weight = torch.load(best)["state_dict"]["net.0.weight"]
    assert torch.equal(trainer.lightning_module.net[0].weight, weight)


def test_a_model_is_loaded_from_its_marker_and_by_its_name(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(Model(width=5))

    store = holdfast.open(tmp_path / "store")
    for source in (tmp_path / "out" / "last.ckpt", open_checkpoint(store, "run/last")):
        model = Model.load_from_checkpoint(source)
        assert model.hparams["width"] == 5
        assert torch.equal(model.net[0].weight, trainer.lightning_module.net[0].weight)


def test_an_exception_saves_a_complete_checkpoint(tmp_path: Path, expected: str) -> None:
    stop(tmp_path, callbacks=(OnExceptionCheckpoint(tmp_path / "exception"),), at=5)

    assert fit(tmp_path, ckpt_path=str(tmp_path / "exception" / "on_exception.ckpt")) == expected


def test_a_checkpoint_that_was_deleted_from_the_store_is_named_with_another_one(tmp_path: Path) -> None:
    stop(tmp_path)
    holdfast.open(tmp_path / "store").delete("run/last")

    with pytest.raises(
        holdfast.NotFound,
        match=r"last.ckpt: its snapshot 'run/last' was deleted from .*; use another .*out/epoch=1-step=6.ckpt",
    ):
        fit(tmp_path, ckpt_path="last")


@pytest.mark.usefixtures("end_the_group")
@pytest.mark.parametrize(("strategy", "error"), [("auto", holdfast.Corrupt), ("sharded", holdfast.RankError)])
def test_a_damaged_checkpoint_is_named_with_what_to_do(tmp_path: Path, strategy: str, error: type[Exception]) -> None:
    stop(tmp_path, at=4, width=4096, strategy=strategy)  # smaller tensors are not in packs
    for pack in (tmp_path / "store" / "packs").iterdir():
        pack.chmod(0o600)
        pack.write_bytes(bytes(byte ^ 1 for byte in pack.read_bytes()))

    with pytest.raises(error, match=r"last.ckpt: its snapshot .* is damaged") as raised:
        make_trainer(tmp_path, strategy).fit(make_model(strategy, 4096), ckpt_path="last")

    assert re.search(r"use another checkpoint, such as \S*epoch=0-step=3.ckpt", str(raised.value))
    assert "Run `holdfast check --read`" in str(raised.value)


@pytest.mark.usefixtures("end_the_group")
@pytest.mark.parametrize("ckpt_path", ["last", "holdfast:run/epoch=0-step=3"])
def test_a_sharded_run_resumes_and_ends_as_one_that_was_not_stopped(
    tmp_path: Path, expected: str, ckpt_path: str
) -> None:
    stop(tmp_path, strategy="sharded")

    assert fit(tmp_path, strategy="sharded", ckpt_path=ckpt_path) == expected


@pytest.mark.usefixtures("end_the_group")
def test_a_sharded_run_whose_checkpoints_rank_0_saves_ends_as_one_that_was_not_stopped(
    tmp_path: Path, expected: str
) -> None:
    stop(tmp_path, strategy="gathered")

    assert fit(tmp_path, strategy="gathered", ckpt_path="last") == expected


@pytest.mark.usefixtures("end_the_group")
def test_a_folder_that_the_strategy_of_lightning_wrote_is_continued(
    tmp_path: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(HoldfastModelParallelStrategy, "save_checkpoint", ModelParallelStrategy.save_checkpoint)
        stop(tmp_path, strategy="sharded")
    assert (tmp_path / "out" / "last.ckpt" / "meta.pt").is_file()

    assert fit(tmp_path, strategy="sharded", ckpt_path="last") == expected


@pytest.mark.usefixtures("end_the_group")
def test_the_store_has_the_sharded_checkpoints_that_lightning_keeps(tmp_path: Path) -> None:
    fit(tmp_path, strategy="sharded")

    assert list_names(tmp_path) == ["run/epoch=1-step=9", "run/epoch=2-step=12", "run/last"]
    assert list_files(tmp_path) == ["epoch=1-step=9.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"]


@pytest.mark.usefixtures("end_the_group")
def test_a_plain_run_continues_sharded_and_a_sharded_one_plain(tmp_path: Path, expected: str) -> None:
    stop(tmp_path / "plain")
    stop(tmp_path / "sharded", strategy="sharded")

    assert fit(tmp_path / "plain", strategy="sharded", ckpt_path="last") == expected
    dist.destroy_process_group()
    assert fit(tmp_path / "sharded", ckpt_path="last") == expected


@pytest.mark.usefixtures("end_the_group")
def test_a_model_is_loaded_from_a_sharded_checkpoint(tmp_path: Path) -> None:
    stop(tmp_path, strategy="sharded")

    model = Model.load_from_checkpoint(tmp_path / "out" / "last.ckpt")

    saved = holdfast.open(tmp_path / "store").load("run/last")["state_dict"]
    assert torch.equal(model.net[0].weight, saved["net.0.weight"])


@pytest.mark.usefixtures("end_the_group")
def test_a_sharded_model_is_validated_without_its_optimizers(tmp_path: Path) -> None:
    stop(tmp_path, strategy="sharded")
    trainer = make_trainer(tmp_path, "sharded")
    model = make_model("sharded")

    trainer.validate(model, ckpt_path=str(tmp_path / "out" / "last.ckpt"))

    weight: Any = model.net[0].weight
    assert torch.equal(weight.full_tensor(), torch.load(tmp_path / "out" / "last.ckpt")["state_dict"]["net.0.weight"])


@pytest.mark.usefixtures("end_the_group")
def test_a_sharded_checkpoint_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    stop(tmp_path, strategy="sharded")
    model = make_model("sharded")
    model.more = torch.nn.Linear(1, 1)

    with pytest.raises(holdfast.Mismatch, match=r"no value for more.weight, more.bias; set strict_loading"):
        make_trainer(tmp_path, "sharded").validate(model, ckpt_path=str(tmp_path / "out" / "last.ckpt"))


@pytest.mark.usefixtures("end_the_group")
def test_the_strategy_for_shards_names_the_plugin_that_it_needs(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "sharded")
    trainer.strategy.checkpoint_io = TorchCheckpointIO()

    with pytest.raises(holdfast.Unsupported, match=r"plugins=\[HoldfastCheckpointIO"):
        trainer.fit(make_model("sharded"))
