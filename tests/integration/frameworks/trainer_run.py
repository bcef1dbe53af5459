"""Trains a tiny random model with the Hugging Face Trainer; a script, so that tests can kill it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import holdfast
from holdfast.integrations.transformers import use_store
from tests.integration.frameworks.sharding import choose_fsdp2, is_sharded

STEPS = 12


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in each process."""

    def __init__(self, count: int) -> None:
        self._tokens = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class BestAtThree(Trainer):  # type: ignore[misc]  # its types are not known to mypy: pyproject.toml
    """Its score is the best, the lowest, after three steps."""

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        metrics: dict[str, float] = super().evaluate(*args, **options)
        metrics["eval_score"] = 1.0 if self.state.global_step == 3 else 2.0
        return metrics


BEST: dict[str, Any] = {
    "metric_for_best_model": "score",
    "greater_is_better": False,
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "eval_steps": 3,
}
"""Arguments of a trainer that keeps its best checkpoint."""


class HangCallback(TrainerCallback):  # type: ignore[misc]  # its types are not known to mypy: pyproject.toml
    """Creates a file when a step begins, and waits to be killed."""

    def __init__(self, file: Path, step: int) -> None:
        self._file, self._step = file, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self._step:
            self._file.touch()
            signal.pause()


class SignalCallback(TrainerCallback):  # type: ignore[misc]  # its types are not known to mypy: pyproject.toml
    """Sends this process a signal when a step begins."""

    def __init__(self, number: signal.Signals, step: int) -> None:
        self._number, self._step = number, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), self._number)


def make_trainer(
    folder: Path,
    kind: type[Any] = Trainer,
    *,
    width: int = 8,
    adapt: Callable[[Any], Any] = lambda model: model,
    **options: Any,
) -> Any:
    """Return a trainer of a model with dropout, whose data is shuffled: 5 steps an epoch, a checkpoint each 3.

    The model is what `adapt` returns for it. The other options are arguments of the training.
    """
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=width, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    )
    arguments = {"max_steps": STEPS, "save_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.01}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    args = TrainingArguments(output_dir=str(folder / "out"), **(arguments | quiet | options))
    return kind(model=adapt(model), args=args, train_dataset=Tokens(20), eval_dataset=Tokens(4))


def digest(store: holdfast.Store, trainer: Any) -> str:
    """Return the digest of everything that training has changed."""
    state = holdfast.training_state(trainer.model, trainer.optimizer, trainer.lr_scheduler)
    return store.save("result", state, overwrite=True).digest.hex()


def train_rank(
    rank: int,
    folder: Path,
    size: int,
    *,
    resume: bool = False,
    hang_at: int | None = None,
    signalled: int | None = None,
    best: bool = False,
    sharded: bool = False,
) -> list[str]:
    """Train on one of several ranks, as a launcher starts it; return the last step, the stop reason and the digest.

    With `hang_at`, wait after so many steps to be killed. The rank `signalled` sends itself SIGTERM in the eighth step.
    With `best`, keep the best checkpoint and load it at the end. With `sharded`, train by FSDP2.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ["OMP_NUM_THREADS"] = "1"
    store = holdfast.open(folder / "store")
    options = {"save_total_limit": 1, **BEST} if best else {}
    trainer = make_trainer(folder, BestAtThree if best else Trainer, **options)
    assert trainer.args.world_size == size
    if sharded:
        choose_fsdp2(trainer.accelerator)
        trainer.is_fsdp_enabled = True
    checkpoints = use_store(trainer, store, "run/")
    if hang_at is not None:
        trainer.add_callback(HangCallback(folder / "hanging", hang_at))
    if signalled == rank:
        trainer.add_callback(SignalCallback(signal.SIGTERM, 7))
    trainer.train(resume_from_checkpoint=resume)
    assert sharded == is_sharded(trainer.model_wrapped)
    return [str(trainer.state.global_step), checkpoints.stop_reason or "-", digest(store, trainer)]


def main() -> None:
    """Train, resume or be killed, as the command line says; print the digest of the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--signal", choices=["SIGKILL", "SIGTERM"])
    parser.add_argument("--at", type=int, default=7)
    options = parser.parse_args()
    store = holdfast.open(options.folder / "store")
    trainer = make_trainer(options.folder)
    checkpoints = use_store(trainer, store, "run/")
    if options.signal:
        trainer.add_callback(SignalCallback(signal.Signals[options.signal], options.at))
    trainer.train(resume_from_checkpoint=options.resume)
    words = [str(trainer.state.global_step), checkpoints.stop_reason or "-", digest(store, trainer)]
    sys.stdout.write(" ".join(words) + "\n")


if __name__ == "__main__":
    main()
