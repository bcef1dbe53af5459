"""Trains a small language model on synthetic text, and keeps its weights and AdamW's moments at some steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

State = dict[str, torch.Tensor]

_VOCABULARY: Final = 256
_LENGTH: Final = 16
_BATCH: Final = 8
_PREDICTABLE: Final = 0.8
"""The share of tokens that follow from the two before."""
_RATE: Final = 3e-4
LATE_RATE: Final = 3e-5
"""The learning rate of the steps whose states are kept."""


@dataclass(frozen=True, slots=True)
class Training:
    """How large a model is, and how many steps it is trained before the first state is kept."""

    width: int
    layers: int
    warm_steps: int


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training step leaves: float32 weights, and both moments of AdamW, by the names of the parameters."""

    weights: State
    first_moments: State
    second_moments: State


class _Model(torch.nn.Module):
    """A decoder of transformer layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(_VOCABULARY, width)
        self.places = torch.nn.Embedding(_LENGTH, width)
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = torch.nn.Linear(width, _VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        inner = self.tokens(text) + self.places(torch.arange(text.shape[1]))
        found: torch.Tensor = self.out(self.layers(inner, mask=mask, is_causal=True))
        return found


def _iter_texts() -> Iterator[torch.Tensor]:
    """Yield batches in which most tokens follow from the two before."""
    generator = torch.Generator().manual_seed(1)
    while True:
        text = torch.randint(0, _VOCABULARY, (_BATCH, _LENGTH + 1), generator=generator)
        for at in range(2, _LENGTH + 1):
            follows = torch.rand(_BATCH, generator=generator) < _PREDICTABLE
            text[follows, at] = (text[follows, at - 1] * 7 + text[follows, at - 2] * 3) % _VOCABULARY
        yield text


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: results then are the same in every run, and CPU time is that of one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def iter_trained(training: Training, steps: int) -> Iterator[Trained]:
    """Train at 3e-4, then at 3e-5; yield the state before the first late step, and after each of `steps`.

    What is yielded is the memory of the model, which the next step overwrites.
    """
    torch.manual_seed(0)
    with one_thread():
        model = _Model(training.width, training.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
        texts = _iter_texts()
        for _ in range(training.warm_steps):
            _step(model, optimizer, next(texts))
        for group in optimizer.param_groups:
            group["lr"] = LATE_RATE
        yield _read_state(model, optimizer)
        for _ in range(steps):
            _step(model, optimizer, next(texts))
            yield _read_state(model, optimizer)


def _step(model: _Model, optimizer: torch.optim.AdamW, text: torch.Tensor) -> None:
    optimizer.zero_grad()
    guessed = model(text[:, :-1])
    functional.cross_entropy(guessed.flatten(0, 1), text[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call] # torch has no types here
    optimizer.step()


def _read_state(model: _Model, optimizer: torch.optim.AdamW) -> Trained:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moments = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return Trained(
        parameters,
        {name: state["exp_avg"] for name, state in moments.items()},
        {name: state["exp_avg_sq"] for name, state in moments.items()},
    )
