"""Trains a tiny random model with Accelerate, alone or on several ranks; tests kill it and continue."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed

import holdfast
from holdfast.integrations.accelerate import use_store
from tests.integration.frameworks.sharding import choose_fsdp2, is_sharded

STEPS = 12
EVERY = 3


class Progress:
    """How many batches were trained on, and with which rates: an object of the user's own."""

    def __init__(self) -> None:
        self.batches = 0
        self.rates: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "rates": list(self.rates)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches, self.rates = state_dict["batches"], list(state_dict["rates"])


class Run:
    """A model with dropout, an optimizer, a schedule and shuffled data; 5 batches an epoch on one rank."""

    def __init__(
        self,
        folder: Path,
        *,
        limit: int | None = None,
        automatic: bool = True,
        sharded: bool = False,
        **options: Any,
    ) -> None:
        """Save below `folder`; with `sharded`, by FSDP2. The options are those of `use_store`."""
        set_seed(1)
        self.folder = folder
        self.store = holdfast.open(folder / "store")
        project = ProjectConfiguration(str(folder / "out"), automatic_checkpoint_naming=automatic, total_limit=limit)
        seeded = DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=seeded)
        if sharded:
            choose_fsdp2(self.accelerator)
        self.checkpoints = use_store(self.accelerator, self.store, "run/", **options)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
        data: Any = list(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)))
        # With its own generator, a loader does not draw from the global one when an epoch is resumed.
        loader: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator())
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)

    def train(self, until: int = STEPS, *, save_every: int = EVERY, hang_at: int | None = None) -> None:
        """Train up to a step, and save each `save_every` steps; after `hang_at` steps, wait to be killed."""
        while self.progress.batches < until:
            epoch, done = divmod(self.progress.batches, len(self.loader))
            self.loader.set_epoch(epoch)
            for batch in self.accelerator.skip_first_batches(self.loader, done):
                self.step(batch)
                if self.progress.batches % save_every == 0:
                    self.accelerator.save_state()
                if self.progress.batches == hang_at:
                    (self.folder / "hanging").touch()
                    signal.pause()
                if self.progress.batches == until:
                    break
        self.checkpoints.wait()

    def step(self, batch: torch.Tensor) -> None:
        """Train on one batch."""
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.progress.batches += 1
        self.progress.rates += self.schedule.get_last_lr()

    def digest(self) -> str:
        """Return the digest of everything that training has changed, on all ranks."""
        state = holdfast.training_state(self.model, self.optimizer, self.schedule, progress=self.progress)
        return self.store.save("result", state, overwrite=True).digest.hex()

    def names(self) -> list[str]:
        """Return the names of the checkpoints."""
        return [each.name for each in self.store.snapshots("run/")]


def train_rank(
    rank: int, folder: Path, size: int, *, resume: bool = False, sharded: bool = False, **options: Any
) -> str:
    """Train on one of several ranks, as a launcher starts it; return the digest of the result."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ["OMP_NUM_THREADS"] = "1"
    run = Run(folder, limit=2, async_=True, sharded=sharded)
    assert run.accelerator.num_processes == size
    assert sharded == is_sharded(run.model)
    if resume:
        run.accelerator.load_state()
    run.train(**options)
    return run.digest()
