"""A small transformer and its training, recorded as a user would; in a module of its own, for ranks import it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.store import Store

Plant = Callable[[int, "Transformer", torch.optim.Optimizer], None]
"""What is done to a model and its optimizer before a step."""
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Attention(nn.Module):
    """Causal attention, with an operation of its own that a fault can be put into."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).to(self.dtype)
        query, key, value = parts.unbind(2)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        found: torch.Tensor = self.proj(mixed.transpose(1, 2).flatten(2).float())
        return found


class Layer(nn.Module):
    """Attention and two linear layers, both with a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act: nn.Module = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        found: torch.Tensor = x + self.down(self.drop(self.act(self.up(self.norm2(x)))))
        return found


class Transformer(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, *, width: int = 16, depth: int = 4, words: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, words)
        self.order = list(range(depth))

    def drop_out(self, *, on: bool) -> None:
        for layer in self.layers:
            layer.get_submodule("drop").train(on)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number in self.order:
            x = self.layers[number](x)
        found: torch.Tensor = self.head(x)
        return found


def plant_nothing(step: int, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
    """Leave everything as it is."""


def use_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class Training:
    """A model, its optimizer and all batches: the same for each seed."""

    def __init__(
        self, *, seed: int = 0, drops: bool = False, make_optimizer: MakeOptimizer = use_adamw, **sizes: int
    ) -> None:
        torch.manual_seed(seed)
        self.model = Transformer(**sizes)
        self.model.drop_out(on=drops)
        self.called: nn.Module = self.model
        self.optimizer = make_optimizer(self.model.parameters())
        data = torch.Generator().manual_seed(seed + 1)
        self.batches = torch.randint(self.model.head.out_features, (16, 2, 9), generator=data)

    def step(self, number: int) -> torch.Tensor:
        batch = self.batches[number]
        logits = self.called(batch[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self.optimizer.step()
        return loss.detach()

    def record(
        self, store: Store, name: str, *, steps: range = range(4), plant: Plant = plant_nothing, **choices: Any
    ) -> list[torch.Tensor]:
        """Record steps of the training, each with what `plant` does before it; return the losses."""
        losses = []
        with store.record(name, self.called, self.optimizer, **choices):
            for number in steps:
                plant(number, self.model, self.optimizer)
                losses.append(self.step(number))
        return losses


def train_on_rank(rank: int, root: str, name: str, odd: bool) -> None:
    """Record data-parallel training with dropout; if it is `odd`, rank 1 goes on from another seed in step 1."""
    training = Training(drops=True)
    training.called = DistributedDataParallel(training.model)
    training.batches = training.batches.roll(rank, 0)
    torch.manual_seed(100 + rank)

    def plant(step: int, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
        if odd and rank == 1 and step == 1:
            torch.manual_seed(7)

    training.record(holdfast.open(root), name, steps=range(3), plant=plant)


def train_until_death(root: str, steps: int) -> None:
    """Record a run and end the process in the middle of it, as if by a power cut."""
    training = Training()
    with holdfast.open(root).record("run", training.model, training.optimizer, segment_steps=2) as rec:
        for number in range(steps):
            training.step(number)
        rec._spool.wait()
        os._exit(9)
