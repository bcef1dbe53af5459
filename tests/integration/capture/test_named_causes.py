"""One fault at a time in the training of well-known architectures: the comparison names its cause, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR

from holdfast.capture.compare.result import RunDiff
from holdfast.objects.memory import MemoryStore
from holdfast.store import Store
from tests.integration.capture.small_models import (
    MODELS,
    WORDS,
    Training,
    new_training,
    take_cross_entropy,
)

Plant = Callable[[Training], None]
QUICK: Final = "resnet"
"""The model that needs no other library; faults in it are planted by every run of the tests."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, the model it is planted in, and how the comparison has to name it."""

    title: str
    model: str
    bad: Plant
    step: int
    phase: str
    fqn: str
    cause: str
    says: str
    good: Plant = lambda training: None
    """What the run without the fault does differently from the plain training."""
    rows: int = 1
    """Number of tensors that are an origin."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute in one thread: what is this small only waits for the others, and they may add up in another order."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def set_optimizer(**settings: Any) -> Plant:
    """Change settings of the optimizer."""

    def plant(training: Training) -> None:
        training.settings = training.settings | settings

    return plant


def use_sgd(**settings: Any) -> Plant:
    def plant(training: Training) -> None:
        training.optimizer_class = torch.optim.SGD
        training.settings = {"lr": 0.01, "momentum": 0.9} | settings

    return plant


def use_adamw(training: Training) -> None:
    training.optimizer_class = torch.optim.AdamW


def use_amsgrad(is_on: bool) -> Plant:
    """Shrink the gradients from step to step, so that their largest square is not the last one."""

    def plant(training: Training) -> None:
        scales = iter([1.0, 0.1, 0.01])
        training.settings = {"lr": 0.01, "betas": (0.9, 0.5), "amsgrad": is_on}
        training.loss = lambda logits, labels: take_cross_entropy(logits, labels) * next(scales)

    return plant


def set_module(fqn: str, **values: Any) -> Plant:
    """Set attributes of a module."""

    def plant(training: Training) -> None:
        for name, value in values.items():
            setattr(training.model.get_submodule(fqn), name, value)

    return plant


def clip(limit: float) -> Plant:
    def plant(training: Training) -> None:
        training.after_backward = lambda step, each: clip_grad_norm_(each.model.parameters(), limit)

    return plant


def miss_zero_grad(training: Training) -> None:
    training.clears = lambda step: step != 1


def accumulate(training: Training) -> None:
    training.backward_passes = 2


def freeze(fqn: str) -> Plant:
    def plant(training: Training) -> None:
        training.model.get_submodule(fqn).requires_grad_(requires_grad=False)

    return plant


def leave_out(fqn: str) -> Plant:
    """Freeze a module, and do not pass its parameters to the optimizer."""

    def plant(training: Training) -> None:
        freeze(fqn)(training)
        training.passes_frozen = False

    return plant


def at_step(number: int, act: Callable[[nn.Module], object]) -> Plant:
    """Do something to the model before a step."""

    def plant(training: Training) -> None:
        training.before_step = lambda step, each: act(each.model) if step == number else None

    return plant


def untie(training: Training) -> None:
    head = training.model.get_submodule("lm_head")
    head.weight = nn.Parameter(head.get_parameter("weight").detach().clone())


def disturb(fqn: str, row: int) -> Callable[[nn.Module], None]:
    """Change one element of a parameter."""

    def act(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(fqn)[row, 3] += 1e-3

    return act


def change_pixel(training: Training) -> None:
    training.batches[1][0]["pixel_values"][0, 0, 0, 0] += 1e-3


def swap_batches(training: Training) -> None:
    batches = training.batches
    batches[1], batches[2] = batches[2], batches[1]


def scale_loss(training: Training) -> None:
    training.loss = lambda logits, labels: take_cross_entropy(logits, labels) * 2


def smooth_labels(training: Training) -> None:
    training.loss = lambda logits, labels: cross_entropy(logits.flatten(0, -2), labels, label_smoothing=0.1)


def take_exact_gelu(training: Training) -> None:
    training.model.get_submodule("transformer.h.1.mlp").act = nn.GELU()


def compute_in_bfloat16(fqn: str) -> Plant:
    def plant(training: Training) -> None:
        module: Any = training.model.get_submodule(fqn)
        module.forward = lambda x: nn.functional.linear(x.bfloat16(), module.weight.bfloat16()).float()

    return plant


class _NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(grads[0].shape[-1]) == 0, torch.nan, grads[0])


def put_nan_into_backward(fqn: str) -> Plant:
    def plant(training: Training) -> None:
        module = training.model.get_submodule(fqn)
        forward = module.forward
        module.forward = lambda x: forward(_NanBackward.apply(x))  # type: ignore[no-untyped-call]  # torch's

    return plant


def decay(*, early: bool) -> Plant:
    """Lower the learning rate after each step; `early`, once more before the first of them."""

    def schedule(optimizer: torch.optim.Optimizer) -> ExponentialLR:
        found = ExponentialLR(optimizer, 0.5)
        if early:
            optimizer.step()
            found.step()
        return found

    def plant(training: Training) -> None:
        training.schedule = schedule

    return plant


FAULTS: Final = (
    Fault("AdamW for Adam", "gpt2", use_adamw, 0, "optimizer", "optimizer", "optimizer class",
          "its class is Adam in good and AdamW in bad"),
    Fault("learning rate", "llama", set_optimizer(lr=0.011), 0, "optimizer", "param_groups.0", "optimizer setting",
          "lr is 0.01 in good and 0.011 in bad"),
    Fault("betas", "t5", set_optimizer(betas=(0.9, 0.99)), 0, "optimizer", "param_groups.0", "optimizer setting",
          "betas is [0.9, 0.999] in good and [0.9, 0.99] in bad"),
    Fault("eps", "vit", set_optimizer(eps=1e-6), 0, "optimizer", "param_groups.0", "optimizer setting",
          "eps is 1e-08 in good and 1e-06 in bad"),
    Fault("weight decay", "resnet", set_optimizer(weight_decay=0.2), 0, "optimizer", "param_groups.0",
          "optimizer setting", "weight_decay is 0.1 in good and 0.2 in bad"),
    Fault("nesterov", "resnet", use_sgd(nesterov=True), 0, "optimizer", "param_groups.0", "optimizer setting",
          "nesterov is false in good and true in bad", use_sgd()),
    Fault("maximize", "gpt2", set_optimizer(maximize=True), 0, "optimizer", "param_groups.0", "optimizer setting",
          "maximize is false in good and true in bad"),
    Fault("amsgrad", "llama", use_amsgrad(True), 1, "optimizer", "param_groups.0", "optimizer setting",
          "amsgrad is false in good and true in bad", use_amsgrad(False)),
    Fault("momentum", "resnet", use_sgd(momentum=0.8), 0, "optimizer", "param_groups.0", "optimizer setting",
          "momentum is 0.9 in good and 0.8 in bad", use_sgd()),
    Fault("dampening", "vit", use_sgd(dampening=0.1), 0, "optimizer", "param_groups.0", "optimizer setting",
          "dampening is 0 in good and 0.1 in bad", use_sgd()),
    Fault("missed zero_grad", "gpt2", miss_zero_grad, 1, "backward", "", "zero_grad",
          "gradients of an earlier backward pass were not cleared in bad"),
    Fault("missed zero_grad of batch norms", "resnet", miss_zero_grad, 1, "backward", "", "zero_grad",
          "gradients of an earlier backward pass were not cleared in bad"),
    Fault("clipping added", "t5", clip(0.1), 0, "backward", "", "gradient change",
          "changed after the backward pass in bad and not in good"),
    Fault("clipping to another norm", "llama", clip(0.05), 0, "backward", "", "gradient change",
          "changed after the backward pass in both", clip(0.1)),
    Fault("accumulation", "vit", accumulate, 0, "backward", "", "accumulation",
          "the sum of 1 backward pass in good and of 2 in bad"),
    Fault("a frozen layer is trained", "gpt2", lambda training: None, 0, "optimizer", "transformer.h.0", "trained",
          "frozen in good and trained in bad", freeze("transformer.h.0")),
    Fault("a trained layer is frozen", "llama", freeze("model.layers.1.mlp"), 0, "optimizer", "model.layers.1.mlp",
          "frozen", "trained in good and frozen in bad"),
    Fault("a layer is frozen and left out", "resnet", leave_out("blocks.1"), 0, "optimizer", "blocks.1", "frozen",
          "trained in good and frozen in bad"),
    Fault("a layer that was left out is trained", "t5", lambda training: None, 0, "optimizer", "decoder.block.0",
          "trained", "frozen in good and trained in bad", leave_out("decoder.block.0")),
    Fault("accumulation with batch norms", "resnet", accumulate, 0, "backward", "", "accumulation",
          "the sum of 1 backward pass in good and of 2 in bad"),
    Fault("momentum of a batch norm", "resnet", set_module("blocks.1.norm1", momentum=0.2), 0, "forward",
          "blocks.1.norm1", "module setting", "momentum is 0.1 in good and 0.2 in bad"),
    Fault("eps of a batch norm", "resnet", set_module("blocks.0.norm2", eps=1e-3), 0, "forward", "blocks.0.norm2",
          "module setting", "eps is 1e-05 in good and 0.001 in bad"),
    Fault("dropout", "gpt2", set_module("transformer.drop", p=0.2), 0, "forward", "transformer.drop",
          "module setting", "p is 0.1 in good and 0.2 in bad"),
    Fault("dropout of attention", "gpt2", set_module("transformer.h.0.attn.attn_dropout", p=0.2), 0, "forward",
          "transformer.h.0.attn.attn_dropout", "module setting", "p is 0.1 in good and 0.2 in bad"),
    Fault("evaluation mode", "vit", at_step(1, nn.Module.eval), 1, "forward", "", "mode",
          "training mode in good and evaluation mode in bad"),
    Fault("untied parameters", "gpt2", untie, 0, "backward", "lm_head.weight", "tied parameters",
          "tied to transformer.wte.weight in good and not in bad"),
    Fault("an element of a weight", "llama", at_step(0, disturb("model.layers.1.mlp.up_proj.weight", 2)), 0, "forward",
          "model.layers.1.mlp.up_proj.weight", "", "parameter differs by itself"),
    Fault("an element of a tied weight", "gpt2", at_step(0, disturb("transformer.wte.weight", WORDS - 1)), 0,
          "forward", "transformer.wte.weight", "", "parameter differs by itself"),
    Fault("a batch", "vit", change_pixel, 1, "forward", "", "data", "input differs by itself"),
    Fault("scale of the loss", "t5", scale_loss, 0, "backward", "", "loss",
          "gradient that comes from outside differs"),
    Fault("label smoothing", "gpt2", smooth_labels, 0, "backward", "", "loss",
          "gradient that comes from outside differs"),
    Fault("in-place change of a residual", "resnet", set_module("blocks.1.relu1", inplace=True), 0, "forward",
          "blocks.1.relu1", "in-place change", "changes its input[0] in place in bad and not in good"),
    Fault("exact GELU", "gpt2", take_exact_gelu, 0, "forward", "transformer.h.1.mlp.act", "module class",
          "its class is NewGELUActivation in good and GELU in bad"),
    Fault("eps of a layer norm", "vit", set_module("vit.layers.1.layernorm_after", eps=1e-3), 0, "forward",
          "vit.layers.1.layernorm_after", "module setting", "eps is 1e-12 in good and 0.001 in bad"),
    Fault("scale of attention", "llama", set_module("model.layers.0.self_attn", scaling=0.3), 0, "forward",
          "model.layers.0.self_attn", "module setting", "scaling is 0.35355"),
    Fault("bfloat16 in one module", "t5", compute_in_bfloat16("encoder.block.0.layer.1.DenseReluDense.wo"), 0,
          "forward", "encoder.block.0.layer.1.DenseReluDense.wo", "",
          "output differs though inputs and parameters are equal"),
    Fault("NaN in the backward pass", "gpt2", put_nan_into_backward("transformer.h.1.mlp.c_fc"), 0, "backward",
          "transformer.h.1.mlp.c_fc", "", "gradient that it gives to transformer.h.1.ln_2 differs"),
    Fault("scheduler off by one", "vit", decay(early=True), 0, "optimizer", "param_groups.0", "optimizer setting",
          "lr is 0.01 in good and 0.005 in bad", decay(early=False)),
    Fault("a weight between steps", "t5", at_step(2, disturb("decoder.block.0.layer.2.DenseReluDense.wi.weight", 1)),
          2, "forward", "decoder.block.0.layer.2.DenseReluDense.wi.weight", "", "parameter differs by itself"),
    Fault("order of batches", "resnet", swap_batches, 1, "forward", "", "data order",
          "bad has the input that good has in step 2", rows=2),
)  # fmt: skip
QUICK_FAULTS: Final = [fault for fault in FAULTS if fault.model == QUICK]
SLOW_FAULTS: Final = [fault for fault in FAULTS if fault.model != QUICK]


def compare(model: str, good: Plant, bad: Plant, **choices: Any) -> RunDiff:
    """Record a run of each and compare them."""
    store = Store(MemoryStore())
    for run, plant in (("good", good), ("bad", bad)):
        training = new_training(model)
        plant(training)
        training.record(store, run, **choices)
    return store.diff_runs("good", "bad")


def verify_named(fault: Fault, level: str) -> None:
    """Verify that the cause of a fault is named, and that it is the only origin."""
    result = compare(fault.model, fault.good, fault.bad, level=level)

    assert result.origin is not None
    named = [(origin.step, origin.phase, origin.fqn, origin.cause) for origin in result.origins]
    assert named == [(fault.step, fault.phase, fault.fqn, fault.cause)], result.headline
    assert fault.says in result.origin.why
    assert result.counts["origin"] == fault.rows


@pytest.mark.parametrize("level", ["digest", "full"])
@pytest.mark.parametrize("fault", QUICK_FAULTS, ids=lambda fault: fault.title)
def test_the_cause_of_a_fault_in_a_residual_network_is_named(fault: Fault, level: str) -> None:
    verify_named(fault, level)


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("level", ["digest", "stats", "full"])
@pytest.mark.parametrize("fault", SLOW_FAULTS, ids=lambda fault: fault.title)
def test_the_cause_of_a_fault_is_named(fault: Fault, level: str) -> None:
    pytest.importorskip("transformers")
    verify_named(fault, level)


@pytest.mark.slow  # as well
@pytest.mark.parametrize("level", ["digest", "stats", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_two_runs_without_a_fault_are_equal(model: str, level: str) -> None:
    pytest.importorskip("transformers")

    result = compare(model, clip(0.1), clip(0.1), level=level)

    assert result.is_equal, result.headline
