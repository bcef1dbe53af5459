"""Train a small character-level transformer; killed at any moment and started again, it resumes exactly.

    python examples/train.py STORE --run run/ --steps 40 --save-every 10

After a crash, start it again with the same command. `demo.py` does so, and proves that nothing differs.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import holdfast

CONTEXT: Final = 48
BATCH: Final = 8
WIDTH: Final = 192
SUBJECTS: Final = ("the kelp", "a limpet", "the tide", "an otter", "the anchor", "a small boat")
VERBS: Final = ("holds", "follows", "carries", "forgets", "finds", "outlasts")
OBJECTS: Final = ("the rock", "the storm", "a grey wave", "the harbour", "an old rope", "the morning")


def seed_everything(seed: int) -> None:
    """Seed every global random generator; RngState saves the state of all of them."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_text(num_sentences: int) -> str:
    """Return sentences that are the same for every run."""
    rng = random.Random(0)
    return "".join(f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}. " for _ in range(num_sentences))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text, each paired with the same window shifted by one character."""

    def __init__(self, text: str) -> None:
        """Number the characters of `text`."""
        letters = sorted(set(text))
        self.num_letters = len(letters)
        self._codes = torch.tensor([letters.index(letter) for letter in text])

    def __len__(self) -> int:
        """Return the number of windows."""
        return (len(self._codes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a window and the next character at each of its positions."""
        start = index * CONTEXT
        return self._codes[start : start + CONTEXT], self._codes[start + 1 : start + CONTEXT + 1]


class Transformer(nn.Module):
    """A decoder with learned positions and dropout."""

    def __init__(self, num_letters: int, num_layers: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(num_letters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(WIDTH, num_letters)

    def forward(self, codes: Tensor) -> Tensor:
        """Return a score for each letter at each position."""
        x = self.letters(codes) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        scores: Tensor = self.head(x)
        return scores

    def freeze(self, num_layers: int) -> None:
        """Exclude the embeddings and the lowest layers from training."""
        for module in (self.letters, self.positions, *self.layers[:num_layers]):
            module.requires_grad_(False)


class Progress:
    """The loss of every step so far. Any object with these two methods can be saved."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.losses = list(state["losses"])


class Job:
    """A training job; `state` contains everything that a resumed run needs."""

    def __init__(self, *, num_layers: int, num_frozen: int, num_steps: int) -> None:
        """Create everything from scratch, with the same values each time."""
        seed_everything(0)
        data = Windows(make_text(2000))
        self.model = Transformer(data.num_letters, num_layers)
        if num_frozen:
            self.model.freeze(num_frozen)
        self.optimizer = torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad], lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=2e-3, total_steps=num_steps)
        self.sampler = holdfast.ResumableSampler(len(data), batch_size=BATCH, drop_last=True)
        # A loader draws a random number when it starts; its own generator keeps that from advancing the global RNG.
        self.loader = DataLoader(data, batch_sampler=self.sampler, generator=torch.Generator())
        self.progress = Progress()
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "sampler": self.sampler,
            "rng": holdfast.RngState(),
            "progress": self.progress,
        }

    def step(self, codes: Tensor, following: Tensor) -> float:
        """Train on one batch and return its loss."""
        loss = nn.functional.cross_entropy(self.model(codes).flatten(0, 1), following.flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer.step()
        self.schedule.step()
        self.sampler.advance()
        self.progress.losses.append(float(loss.item()))
        return self.progress.losses[-1]


def begin(job: Job, store: holdfast.Store, *, run: str, start_from: str | None) -> None:
    """Resume a run that has a checkpoint; otherwise start it, from the model of `start_from` if given."""
    latest = store.latest(run)
    if latest is not None:
        store.load_into(latest, job.state)
        say(f"resumed from {latest.name}")
    elif start_from is not None:
        job.model.load_state_dict(store.load(start_from, only="model")["model"])
        say(f"started from the model of {start_from}")
    else:
        say("started from scratch")


def train(job: Job, store: holdfast.Store, *, run: str, num_steps: int, save_every: int) -> None:
    """Train up to `num_steps` and save every `save_every` steps."""
    while len(job.progress.losses) < num_steps:
        for codes, following in job.loader:
            started = time.monotonic()
            loss = job.step(codes, following)
            step = len(job.progress.losses)
            say(f"step {step} loss {loss:.4f} ({time.monotonic() - started:.2f} s)")
            if step % save_every == 0 or step == num_steps:
                # Returns as soon as the state is copied; it is written, verified and committed in the background.
                store.save_async(f"{run}step-{step}", job.state, metadata={"loss": loss})
            if step == num_steps:
                break


def say(text: str) -> None:
    """Print a line without buffering, so that a reader sees the progress at once."""
    print(text, flush=True)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a small transformer; started again, resume.")
    parser.add_argument("store", help="path or URL of the store")
    parser.add_argument("--run", default="run/", help="prefix of this run's snapshots")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=10, help="save every this many steps")
    parser.add_argument("--layers", type=int, default=4, help="number of layers")
    parser.add_argument("--freeze", type=int, default=0, help="do not train the embeddings and this many layers")
    parser.add_argument("--start-from", help="a snapshot whose model to start from")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or resume training."""
    options = parse_arguments(arguments)
    # At this size a second thread costs more than it gains, and results may depend on the number of threads.
    torch.set_num_threads(1)
    job = Job(num_layers=options.layers, num_frozen=options.freeze, num_steps=options.steps)
    # Leaving the `with` waits for the last save, and raises its error if it failed.
    with holdfast.open(options.store) as store:
        begin(job, store, run=options.run, start_from=options.start_from)
        train(job, store, run=options.run, num_steps=options.steps, save_every=options.save_every)
    say("done")


if __name__ == "__main__":
    main()
