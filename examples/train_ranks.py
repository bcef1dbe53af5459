"""Train a small transformer on many ranks; started again, on any number of ranks, it resumes.

    torchrun --standalone --nproc-per-node 2 examples/train_ranks.py --store STORE --steps 12
    torchrun --standalone --nproc-per-node 3 examples/train_ranks.py --store STORE --steps 24
    python examples/train_ranks.py --store STORE --steps 36

Saving and loading are the same as in a script for one process; only the process group and the sharding are new.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import holdfast

CONTEXT: Final = 32
WIDTH: Final = 128
BATCH: Final = 12
"""Samples per step over all ranks. Every number of ranks that divides it trains on the same samples."""
NAMES: Final = ("the kelp", "a limpet", "the tide", "an otter", "the anchor", "a small boat", "the rock", "a grey wave")
VERBS: Final = ("holds", "follows", "carries", "forgets", "finds", "outlasts")


class Transformer(nn.Module):
    """A decoder with learned positions. It has no dropout: the random masks would depend on the number of ranks."""

    def __init__(self, num_letters: int, num_layers: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(num_letters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(WIDTH, num_letters)

    def forward(self, codes: Tensor, following: Tensor) -> Tensor:
        """Return the mean cross-entropy of predicting each letter from those before it."""
        positions = torch.arange(CONTEXT, device=codes.device)
        x = self.letters(codes) + self.positions(positions)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


def make_data(num_sentences: int) -> tuple[TensorDataset, int]:
    """Return windows of a generated text, each paired with itself shifted by one letter, and the number of letters."""
    rng = random.Random(0)
    text = "".join(f"{rng.choice(NAMES)} {rng.choice(VERBS)} {rng.choice(NAMES)}. " for _ in range(num_sentences))
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    length = (len(codes) - 1) // CONTEXT * CONTEXT
    pieces = [codes[start : start + length].view(-1, CONTEXT) for start in (0, 1)]
    return TensorDataset(*pieces), len(letters)


def distribute(model: nn.Module, how: str) -> nn.Module:
    """Give each rank its part of the model: a shard of every parameter, or a full copy."""
    if not dist.is_initialized():
        return model
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Job:
    """Model, optimizer, schedule and data of this rank."""

    def __init__(self, options: argparse.Namespace, *, rank: int, world_size: int) -> None:
        """Create everything from scratch, with the same values each time and on every rank."""
        torch.manual_seed(0)
        data, num_letters = make_data(500)
        model = Transformer(num_letters, options.layers)
        self.model = distribute(model.double() if options.double else model, options.parallel)
        # After the model is distributed: the optimizer must refer to the parameters that are trained.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)
        self.sampler = holdfast.ResumableSampler(
            len(data), batch_size=BATCH // world_size, drop_last=True, rank=rank, world_size=world_size
        )
        self.loader = DataLoader(data, batch_sampler=self.sampler, generator=torch.Generator())
        self.num_done = 0

    def state(self) -> holdfast.TrainingState:
        """Return everything that a resumed run needs."""
        return holdfast.training_state(self.model, self.optimizer, self.schedule, self.loader, step=self.num_done)

    def step(self, codes: Tensor, following: Tensor) -> float:
        """Train on one batch; return the mean loss over all ranks."""
        loss = self.model(codes, following)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.sampler.advance()
        self.num_done += 1
        total = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return float(total.item())


def train(job: Job, store: holdfast.Store, *, run: str, num_steps: int, save_every: int) -> None:
    """Train up to `num_steps` and save on the way; all ranks call `save_async`, and each writes its shards."""
    while job.num_done < num_steps:
        for codes, following in job.loader:
            loss = job.step(codes, following)
            say(f"step {job.num_done} loss {loss!r}")
            if job.num_done % save_every == 0 or job.num_done == num_steps:
                store.save_async(f"{run}step-{job.num_done}", job.state(), metadata={"loss": loss})
            if job.num_done == num_steps:
                break


def resume(job: Job, store: holdfast.Store, *, run: str, start_from: str | None) -> None:
    """Resume a run that has a checkpoint, on any number of ranks; otherwise start it, from `start_from` if given."""
    latest = store.latest(run)
    found = store.snapshot(start_from) if latest is None and start_from else latest
    if found is None:
        say("started from scratch")
        return
    state = job.state()
    store.load_into(found, state)
    job.num_done = state.step
    say(f"resumed from {found.name}")
    if latest is None:
        # Save the loaded state again under this run's own name, so that it can be compared.
        store.save(f"{run}step-{job.num_done}", job.state())


@contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """Join the ranks that torchrun has started; yield this rank and the world size, or (0, 1) without torchrun."""
    if not dist.is_torchelastic_launched():
        yield 0, 1
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.barrier()  # a rank that leaves early closes connections that the others still use
    finally:
        dist.destroy_process_group()


def say(text: str) -> None:
    """Print a line without buffering, on one rank only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train on many ranks; started again on any number of ranks, resume.")
    parser.add_argument("--store", required=True, help="path or URL of a store that all ranks can reach")
    parser.add_argument("--prefix", default="run/", help="prefix of this run's snapshots")
    parser.add_argument("--steps", type=int, default=12, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=4, help="save every this many steps")
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    parser.add_argument(
        "--parallel", choices=("fsdp", "ddp"), default="fsdp", help="shard the model (fsdp) or copy it (ddp)"
    )
    parser.add_argument("--double", action="store_true", help="train in float64, where rounding errors are small")
    parser.add_argument("--start-from", help="a snapshot to resume from, if this run has saved nothing yet")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or resume training."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    with process_group() as (rank, world_size):
        if BATCH % world_size:
            raise SystemExit(f"{BATCH} samples cannot be divided evenly among {world_size} ranks")
        job = Job(options, rank=rank, world_size=world_size)
        # Leaving the `with` waits for the last save, and raises its error if it failed on any rank.
        with holdfast.open(options.store) as store:
            resume(job, store, run=options.prefix, start_from=options.start_from)
            train(job, store, run=options.prefix, num_steps=options.steps, save_every=options.save_every)
        say("done")


if __name__ == "__main__":
    main()
