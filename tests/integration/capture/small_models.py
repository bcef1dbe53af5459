"""Small models of well-known architectures and a training loop, each part of which a fault can replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from holdfast.store import Store

STEPS: Final = 3
WORDS: Final = 32
Batch = Mapping[str, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Residual(nn.Module):
    """Two convolutions with batch norms, beside a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm1(self.conv1(self.relu1(x)))
        found: torch.Tensor = x + self.norm2(self.conv2(self.relu2(inner)))
        return found


class ResNet(nn.Module):
    """Residual blocks between a convolution and a linear layer."""

    def __init__(self, width: int = 4, *, depth: int = 2, labels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, labels)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.pool(x).flatten(1))
        return found


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=8))
    return model


def make_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model: nn.Module = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    return model


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    image = {"image_size": 8, "patch_size": 4, "num_labels": 4}
    model: nn.Module = ViTForImageClassification(ViTConfig(**sizes, **image, hidden_dropout_prob=0.1))
    return model


MODELS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "gpt2": make_gpt2,
    "llama": make_llama,
    "t5": make_t5,
    "vit": make_vit,
    "resnet": ResNet,
}


def make_batches(model: str, count: int) -> list[tuple[Batch, torch.Tensor]]:
    """Return inputs and labels, the same for each call. The last word occurs in none of them."""
    data = torch.Generator().manual_seed(1)
    batches: list[tuple[Batch, torch.Tensor]] = []
    for _ in range(count):
        if model in ("vit", "resnet"):
            images = torch.randn(4, 3, 8, 8, generator=data)
            batches.append(({"pixel_values": images}, torch.randint(4, (4,), generator=data)))
            continue
        words = torch.randint(WORDS - 1, (3, 2, 7), generator=data)
        inputs = {"input_ids": words[0, :, :-1]} | ({"decoder_input_ids": words[1, :, :-1]} if model == "t5" else {})
        batches.append((inputs, words[1 if model == "t5" else 0, :, 1:].flatten()))
    return batches


def take_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, -2), labels)


def do_nothing(step: int, training: Training) -> None:
    """Plant no fault."""


@dataclass(slots=True)
class Training:
    """A model and everything that its training does; a fault replaces some of it before the training starts."""

    name: str
    model: nn.Module
    batches: list[tuple[Batch, torch.Tensor]]
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01, "weight_decay": 0.1})
    loss: Loss = take_cross_entropy
    before_step: Callable[[int, Training], object] = do_nothing
    after_backward: Callable[[int, Training], object] = do_nothing
    clears: Callable[[int], bool] = lambda step: True
    backward_passes: int = 1
    passes_frozen: bool = True
    """Whether the optimizer gets parameters that are frozen."""
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None

    def record(self, store: Store, run: str, **choices: Any) -> None:
        """Train and record the run."""
        parameters = [each for each in self.model.parameters() if each.requires_grad or self.passes_frozen]
        optimizer = self.optimizer_class(parameters, **self.settings)
        scheduler = self.schedule(optimizer) if self.schedule else None
        with store.record(run, self.model, optimizer, **choices):
            for step in range(STEPS):
                self.before_step(step, self)
                if self.clears(step):
                    optimizer.zero_grad()
                for inputs, labels in self.batches[step : step + self.backward_passes]:
                    found = self.model(**inputs)
                    logits = found if isinstance(found, torch.Tensor) else found.logits
                    self.loss(logits, labels).backward()  # type: ignore[no-untyped-call]  # torch's
                self.after_backward(step, self)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()


def new_training(model: str) -> Training:
    """Return the training of a model, from the same seed each time."""
    torch.manual_seed(0)
    return Training(model, MODELS[model](), make_batches(model, 2 * STEPS))
