"""Measures the cost of recording a training step at each level, against the bare step and DebugMode."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import nn
from torch.utils._debug_mode import DebugMode

from bench.kit.measure import Contestant, Goal, Result, Sizes, Timings, WrongResult, count_bytes, race
from holdfast.capture.record.options import LevelName, make_options
from holdfast.capture.record.recorder import record
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import open_repository

_BARE: Final = "bare step"
DEBUG_MODE: Final = "DebugMode with hashes"
_LEVELS: Final[dict[str, LevelName]] = {"digest": "digest", "stats": "stats", "full": "full"}
_MOST: Final = {"digest": 1.15, "full": 2.0}
_MOST_AGAIN: Final = 0.01
_STEPS: Final = 6


@dataclass(frozen=True, slots=True)
class _Shape:
    """The size of the transformer."""

    width: int
    layers: int
    tokens: int
    batch: int


def _find_shape(sizes: Sizes) -> _Shape:
    if sizes.save_bytes >= 1 << 30:
        return _Shape(512, 2, 256, 4)
    return _Shape(256, 2, 128, 4) if sizes.save_bytes >= 64 << 20 else _Shape(16, 1, 8, 2)


class _Block(nn.Module):
    """A transformer layer made of modules, so that hooks can observe its parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.activation, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.heads = max(1, width // 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.query_key_value(self.norm_attention(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, tokens, width))
        grown: torch.Tensor = x + self.down(self.activation(self.up(self.norm_mlp(x))))
        return grown


class Trainable(Protocol):
    """A training that can start again from the same state."""

    def start(self) -> None:
        """Reset everything to the state before the first step."""

    def step(self) -> torch.Tensor:
        """Train one step, and return the loss."""


class _Training:
    """A transformer whose training starts from the same state each time."""

    def __init__(self, shape: _Shape) -> None:
        self._shape = shape
        self.start()

    def start(self) -> None:
        """Reset the model and the optimizer to their initial state."""
        shape = self._shape
        torch.manual_seed(0)
        self.model = nn.Sequential(*(_Block(shape.width) for _ in range(shape.layers)), nn.LayerNorm(shape.width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._batch = torch.randn(shape.batch, shape.tokens, shape.width)
        # The first step creates the optimizer's state, which is not measured.
        self.step()

    def step(self) -> torch.Tensor:
        """Train one step."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = (self.model(self._batch) - self._batch.roll(1, 1)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self.optimizer.step()
        return loss.detach()


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure training steps with each recording level against the bare step, and the bytes that a second run adds."""
    threads = torch.get_num_threads()
    # One compute thread: with several, waiting for each other would measure other load on the machine.
    torch.set_num_threads(1)
    try:
        return _measure(sizes, work)
    finally:
        torch.set_num_threads(threads)


def _measure(sizes: Sizes, work: Path) -> list[Result]:
    training = _Training(_find_shape(sizes))
    numbers = count()
    root = work / "store"

    def recording(level: LevelName) -> AbstractContextManager[object]:
        repo = open_repository(LocalStore(root / str(next(numbers))), create=True)
        return record(repo, "run", training.model, training.optimizer, options=make_options(level=level))

    expected: list[torch.Tensor] = []
    contestants = {_BARE: stepping(training, nullcontext, expected, root)}
    for name, level in _LEVELS.items():
        contestants[name] = stepping(training, partial(recording, level), expected, root)
    contestants[DEBUG_MODE] = stepping(training, debug_mode, expected, root)
    timings = race(contestants, rounds=sizes.rounds)
    return [*(_make_row(name, timings) for name in (*_LEVELS, DEBUG_MODE)), _measure_again(training, work)]


def debug_mode() -> AbstractContextManager[object]:
    """Return torch's DebugMode with a hash of each tensor."""
    stack = ExitStack()
    stack.enter_context(DebugMode())
    stack.enter_context(DebugMode.log_tensor_hashes(hash_fn="hash_tensor", hash_inputs=True))
    return stack


def stepping(
    training: Trainable,
    recording: Callable[[], AbstractContextManager[object]],
    expected: list[torch.Tensor],
    root: Path,
    *,
    steps: int = _STEPS,
) -> Contestant:
    """Return some recorded steps. The end of the recording is timed too: it waits until everything is stored."""

    def train() -> torch.Tensor:
        with recording():
            losses = [training.step() for _ in range(steps)]
        return torch.stack(losses)

    def verify(losses: object) -> None:
        assert isinstance(losses, torch.Tensor)
        expected.append(losses)
        if not torch.equal(losses, expected[0]):
            raise WrongResult(f"losses {losses.tolist()} are not those of the first: {expected[0].tolist()}")

    def release() -> None:
        shutil.rmtree(root, ignore_errors=True)

    return Contestant(train, training.start, verify, release)


def _make_row(name: str, timings: dict[str, Timings]) -> Result:
    own, bare = timings[name], timings[_BARE]
    goal = Goal("ratio", "<=", _MOST[name]) if name in _MOST else None
    per_step = {each: 1e3 * timings[each].best / _STEPS for each in timings}
    by_cpu = min(own.cpu_seconds) / min(bare.cpu_seconds)
    note = f"medians {1e3 * own.median / _STEPS:.0f} and {1e3 * bare.median / _STEPS:.0f}, by CPU time {by_cpu:.2f}"
    workload = f"a training step, {name}" if name in _LEVELS else f"a training step, {DEBUG_MODE}"
    samples = {each: timings[each].seconds for each in (name, _BARE)}
    return Result(workload, per_step[name], "ms", _BARE, per_step[_BARE], goal, note, samples, per_step)


def _measure_again(training: _Training, work: Path) -> Result:
    """Measure the bytes that a full recording adds to a store which already has the same run under another name."""
    root = work / "again"
    repo = open_repository(LocalStore(root), create=True)
    weights = []
    for name in ("first", "second"):
        training.start()
        with record(repo, name, training.model, training.optimizer, options=make_options(level="full")):
            for _ in range(_STEPS):
                training.step()
        weights.append(count_bytes(root))
    shutil.rmtree(root)
    first, added = weights[0], weights[1] - weights[0]
    goal = Goal("ratio", "<=", _MOST_AGAIN)
    return Result("stored by the same run again, full", added, "bytes", "the first run", first, goal)
