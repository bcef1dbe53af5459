"""A model with a PEFT adapter: the base is stored once, and each save costs what the adapter holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.objects.memory import MemoryStore
from holdfast.store import Store

pytest.importorskip("peft", reason="needs PEFT, which `make test` installs")

from peft import LoraConfig, get_peft_model, get_peft_model_state_dict  # after the test for the library

# Warnings of the framework are its own matter.
pytestmark = pytest.mark.filterwarnings("default")

WIDTH = 512
BASE_BYTES = WIDTH * WIDTH * 4
BESIDE_BYTES = 64 * 1024
"""More than the RNG state, the tree and the trainer's own state take together, and far less than the base."""


def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False))
    torch.manual_seed(seed)
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def adapter_bytes(model: Any) -> int:
    return sum(each.nbytes for each in model.parameters() if each.requires_grad)


def test_each_save_costs_the_adapter_and_its_optimizer() -> None:
    store = Store(MemoryStore())
    model, optimizer = make(1)
    results = []
    for number in range(3):
        step(model, optimizer)
        results.append(store.save(f"run/step-{number}", holdfast.training_state(model, optimizer, step=number)))

    # AdamW has two values for each parameter.
    limit = 3 * adapter_bytes(model) + BESIDE_BYTES
    assert results[0].new_bytes > BASE_BYTES
    assert [each.new_bytes < limit for each in results[1:]] == [True, True]
    assert all(each.reused_bytes >= BASE_BYTES for each in results[1:])


def test_the_adapter_alone_is_saved_and_loaded_in_place() -> None:
    store = Store(MemoryStore())
    model, optimizer = make(1)
    step(model, optimizer)
    result = store.save("adapter", {"adapter": get_peft_model_state_dict(model), "optimizer": optimizer})
    resumed, resumed_optimizer = make(2)

    store.load_into("adapter", {"adapter": get_peft_model_state_dict(resumed), "optimizer": resumed_optimizer})

    assert result.new_bytes < 3 * adapter_bytes(model) + BESIDE_BYTES
    for each in ((model, optimizer), (resumed, resumed_optimizer)):
        step(*each)
    pairs = zip(model.state_dict().items(), resumed.state_dict().items(), strict=True)
    assert [name for (name, a), (_, b) in pairs if not torch.equal(a, b)] == []


@pytest.mark.slow
def test_each_checkpoint_of_a_trainer_costs_the_adapter_and_its_optimizer(tmp_path: Path) -> None:
    from holdfast.integrations.transformers import use_store
    from tests.integration.frameworks.trainer_run import make_trainer

    def adapt(model: Any) -> Any:
        return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))

    def train(**options: Any) -> Any:
        trainer = make_trainer(tmp_path, adapt=adapt, width=256, **options)
        use_store(trainer, holdfast.open(tmp_path / "store", environment=False), "run/")
        trainer.train(resume_from_checkpoint="auto")
        return trainer

    train(max_steps=3)
    before = _size(tmp_path / "store")
    trainer = train(max_steps=6)

    base = sum(each.nbytes for each in trainer.model.parameters() if not each.requires_grad)
    assert before > base
    assert _size(tmp_path / "store") - before < 3 * adapter_bytes(trainer.model) + BESIDE_BYTES < base / 4


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
