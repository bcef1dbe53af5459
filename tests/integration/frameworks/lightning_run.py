"""Trains a tiny random model with Lightning; a script, so that tests can kill it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.integrations.lightning import HoldfastCheckpointIO, HoldfastModelParallelStrategy
from tests.kit.patience import PATIENCE_S

STEPS = 12
EVERY = 3
STRATEGIES = ["auto", "ddp", "sharded"]


class Loader(torch.utils.data.DataLoader[Any]):
    """A loader that saves its position: Lightning asks for it by these methods."""

    def state_dict(self) -> Any:
        sampler: Any = self.batch_sampler
        return sampler.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        sampler: Any = self.batch_sampler
        sampler.load_state_dict(state_dict)


class Advance(Callback):  # type: ignore[misc]  # its types are not known to mypy: pyproject.toml
    """Tells the sampler which batches were used."""

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        trainer.train_dataloader.batch_sampler.advance()


class Model(lightning.LightningModule):  # type: ignore[misc]  # as above
    """Two layers with dropout, whose seed is that of the step; the schedule changes within an epoch."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1))

    def on_train_batch_start(self, batch: torch.Tensor, number: int) -> None:
        torch.manual_seed(1000 * self.global_step + self.global_rank)

    def training_step(self, batch: torch.Tensor, number: int) -> Any:
        loss = self.net(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("loss of all", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 4))  # type: ignore[arg-type]  # a tensor is a dataset

    def train_dataloader(self) -> Loader:
        data: Any = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
        size, rank = self.trainer.world_size, self.trainer.global_rank
        sampler: Any = holdfast.ResumableSampler(20, batch_size=4 // size, rank=rank, world_size=size)
        return Loader(data, batch_sampler=sampler)


class ShardedModel(Model):
    """The same model, of which each rank has a part."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net[0], mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class SignalCallback(Callback):  # type: ignore[misc]  # as above
    """Sends some ranks a signal when a batch begins, once there is a checkpoint to resume from."""

    def __init__(self, number: signal.Signals, step: int, ranks: list[int], checkpoint: Path) -> None:
        self._number, self._step, self._ranks, self._checkpoint = number, step, ranks, checkpoint

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == self._step and trainer.global_rank in self._ranks:
            wait_for(self._checkpoint)
            os.kill(os.getpid(), self._number)


def wait_for(path: Path) -> None:
    """Wait until a file exists, which a thread is about to write."""
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not written"
        time.sleep(0.01)


def make_trainer(
    folder: Path, strategy: str = "auto", *, ranks: int = 1, background: bool = False, **options: Any
) -> Any:
    """Return a trainer of 5 steps an epoch with a checkpoint each 3; `options` are those of ModelCheckpoint."""
    plugin: Any = HoldfastCheckpointIO(folder / "store", prefix="run/")
    keep = {"every_n_train_steps": EVERY, "save_top_k": 2, "monitor": "step", "mode": "max", "save_last": True}
    callbacks = [Advance(), ModelCheckpoint(folder / "out", **(keep | options))]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    parallel: Any = HoldfastModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=strategy == "sharded"
    )
    return lightning.Trainer(
        max_steps=STEPS,
        callbacks=callbacks,
        plugins=[AsyncCheckpointIO(plugin) if background else plugin],
        accelerator="cpu",
        strategy=strategy if strategy in ("auto", "ddp") else parallel,
        devices=ranks,
        use_distributed_sampler=False,
        **quiet,
    )


def make_model(strategy: str = "auto", width: int = 6) -> Model:
    """Return the model for a strategy, with the same weights for each."""
    return Model(width) if strategy in ("auto", "ddp") else ShardedModel(width)


def digest(folder: Path, trainer: Any) -> str:
    """Return the digest of everything that training has changed; all ranks must call it."""
    schedule = trainer.lr_scheduler_configs[0].scheduler
    state = holdfast.training_state(trainer.lightning_module, trainer.optimizers[0], schedule, rng=False)
    return holdfast.open(folder / "result").save("result", state, overwrite=True).digest.hex()


def main() -> None:
    """Train, resume or be killed, as the command line says; print first step, last step and digest of the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strategy", choices=STRATEGIES, default="auto")
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--resume")
    parser.add_argument("--signal", choices=["SIGKILL", "SIGTERM"])
    parser.add_argument("--ranks", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--at", type=int, default=7)
    options = parser.parse_args()
    told = options.signal == "SIGTERM"
    ranks = 1 if options.strategy == "auto" else 2
    trainer = make_trainer(
        options.folder, options.strategy, ranks=ranks, background=options.background, save_on_exception=told
    )
    if options.signal:
        number = signal.Signals[options.signal]
        last = options.folder / "out" / "last.ckpt"
        trainer.callbacks.insert(0, SignalCallback(number, options.at, options.ranks, last))
    started: list[int] = []
    note_start = LambdaCallback(on_train_start=lambda trainer, module: started.append(trainer.global_step))
    trainer.callbacks.insert(0, note_start)
    trainer.fit(make_model(options.strategy), ckpt_path=options.resume)
    words = [str(started[0]), str(trainer.global_step), digest(options.folder, trainer)]
    if trainer.global_rank == 0:
        sys.stdout.write(" ".join(words) + "\n")


if __name__ == "__main__":
    main()
