"""Small Hugging Face models with random weights, and their training from a fixed state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Final

import torch

IS_INSTALLED: Final = find_spec("transformers") is not None
_WORDS: Final = 1024
Inputs = Mapping[str, torch.Tensor]


def _make_vit(*, is_tiny: bool) -> tuple[torch.nn.Module, Inputs]:
    from transformers import ViTConfig, ViTForImageClassification

    width, layers, image, batch = (32, 1, 16, 2) if is_tiny else (192, 8, 64, 4)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        image_size=image,
        patch_size=8,
        num_labels=10,
    )
    inputs = {"pixel_values": torch.randn(batch, 3, image, image), "labels": torch.randint(10, (batch,))}
    return ViTForImageClassification(config), inputs


def _make_t5(*, is_tiny: bool) -> tuple[torch.nn.Module, Inputs]:
    from transformers import T5Config, T5ForConditionalGeneration

    width, layers, tokens, batch = (32, 1, 8, 2) if is_tiny else (192, 3, 64, 4)
    config = T5Config(
        vocab_size=_WORDS,
        d_model=width,
        d_kv=32,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=width // 32,
        decoder_start_token_id=0,
    )
    words = torch.randint(_WORDS, (2, batch, tokens))
    return T5ForConditionalGeneration(config), {"input_ids": words[0], "labels": words[1]}


def _make_gpt2(*, is_tiny: bool) -> tuple[torch.nn.Module, Inputs]:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, layers, tokens, batch = (32, 1, 8, 2) if is_tiny else (256, 4, 64, 4)
    config = GPT2Config(
        vocab_size=_WORDS,
        n_positions=tokens,
        n_embd=width,
        n_layer=layers,
        n_head=width // 32,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    words = torch.randint(_WORDS, (batch, tokens))
    return GPT2LMHeadModel(config), {"input_ids": words, "labels": words}


_MODELS: Final[Mapping[str, Callable[..., tuple[torch.nn.Module, Inputs]]]] = {
    "ViT": _make_vit,
    "T5": _make_t5,
    "GPT-2": _make_gpt2,
}
MODELS: Final = tuple(_MODELS)


class Training:
    """A model and its optimizer, whose training starts from the same state each time."""

    def __init__(self, name: str, *, is_tiny: bool) -> None:
        """Create the model; a step takes about 100 ms on one core unless `is_tiny`."""
        self._name = name
        self._is_tiny = is_tiny
        self.start()

    def start(self) -> None:
        """Reset model, data, optimizer and RNG state."""
        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.manual_seed(0)
        self.model, self._inputs = _MODELS[self._name](is_tiny=self._is_tiny)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        # The first step creates the optimizer's state, which is not measured.
        self.step()

    def step(self) -> torch.Tensor:
        """Train one step, and return the loss."""
        model: Any = self.model
        self.optimizer.zero_grad()
        loss: torch.Tensor = model(**self._inputs).loss
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self.optimizer.step()
        return loss.detach()
