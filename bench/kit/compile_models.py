"""The models that are compiled and one training step, shared by the compile benchmark and its tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

Run = Callable[[Tensor], Any]


class _Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.query_key_value(self.norm_attention(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, tokens, width))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return y


class _Transformer(nn.Module):
    """A language model: embedding, layers, a head that shares the embedding's weight."""

    def __init__(self, width: int, heads: int, layers: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.norm(x) @ self.embedding.weight.T
        return logits


def _make_cnn() -> nn.Module:
    def convolve(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]

    return nn.Sequential(
        *convolve(3, 16), *convolve(16, 32), nn.MaxPool2d(2), *convolve(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


def _make_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def _make_gpt2() -> nn.Module:
    # Imported here: only the processes that start this model have it installed and wait for it.
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=512, n_positions=64, use_cache=False, **dropout)
    model: nn.Module = GPT2LMHeadModel(config)
    return model


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its training input."""

    make: Callable[[], nn.Module]
    make_input: Callable[[], Tensor]
    package: str = "torch"
    """What has to be installed."""


GPT2: Final = "4-layer GPT-2"
MODELS: Final = {
    "MLP": Model(lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), lambda: torch.randn(32, 64)),
    "6-layer encoder": Model(_make_encoder, lambda: torch.randn(4, 16, 64)),
    "12-layer transformer": Model(lambda: _Transformer(128, 4, 12, 512), lambda: torch.randint(512, (2, 32))),
    GPT2: Model(_make_gpt2, lambda: torch.randint(512, (2, 32)), "transformers"),
    "CNN with BatchNorm": Model(_make_cnn, lambda: torch.randn(4, 3, 32, 32)),
}


def is_installed(name: str) -> bool:
    """Return whether this environment can create a model."""
    return find_spec(MODELS[name].package) is not None


def make_model(name: str) -> tuple[nn.Module, Tensor]:
    """Create a model and its input, the same in each process."""
    torch.manual_seed(0)
    model = MODELS[name].make()
    return model, MODELS[name].make_input()


def train_step(run: Run, x: Tensor) -> Tensor:
    """Run forward and backward once, and return the model's output."""
    found = run(x)
    y: Tensor = found if isinstance(found, Tensor) else found.logits
    y.square().mean().backward()  # type: ignore[no-untyped-call]  # torch's
    return y


def digest_step(model: nn.Module, y: Tensor) -> str:
    """Return a digest of all results of a step: outputs, gradients, buffers."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    hasher = hashlib.sha256()
    for tensor in (y, *gradients, *model.buffers()):
        hasher.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        hasher.update(tensor.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()
