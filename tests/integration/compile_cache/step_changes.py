"""Changes of a whole training step in one compiled function: loss, clipping, optimizer, schedule, hooks, user code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.integration.compile_cache.changes import Change, Compile

Loss = Callable[[Tensor, Tensor], Tensor]


def _make_sgd(parameters: Iterable[nn.Parameter]) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _make_adamw(parameters: Iterable[nn.Parameter]) -> Any:
    return torch.optim.AdamW(parameters, lr=0.1)


def _make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@dataclass(frozen=True, slots=True)
class Training:
    """A program that trains for three steps, each of them one call of a compiled function."""

    loss: Loss = functional.mse_loss
    clip: Callable[[Iterable[nn.Parameter]], Any] = lambda parameters: None
    make_optimizer: Callable[[Iterable[nn.Parameter]], Any] = _make_sgd
    make_scheduler: Callable[[Any], Any] | None = None
    schedules_inside: bool = False
    make_model: Callable[[], nn.Module] = _make_mlp
    prepare: Callable[[nn.Module], None] = lambda model: None
    accumulated: int = 1
    """Number of batches for each step of the optimizer."""
    factor: float = 1.0
    sets_to_none: bool = True
    autocast: torch.dtype | None = None
    decay: float | None = None
    """Of an exponential moving average of the parameters."""

    def __call__(self, compile_: Compile) -> list[Tensor]:
        """Train, and return losses, parameters, buffers and averages."""
        model = self.make_model()
        self.prepare(model)
        optimizer = self.make_optimizer([each for each in model.parameters() if each.requires_grad])
        scheduler = None if self.make_scheduler is None else self.make_scheduler(optimizer)
        parameters = list(model.parameters())
        averages = [parameter.detach().clone() for parameter in parameters]

        def train(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=self.sets_to_none)
            loss = x.new_zeros(())
            for _ in range(self.accumulated):
                loss = self._compute_loss(model, x, y)
                loss.backward()  # type: ignore[no-untyped-call]  # torch's
            self.clip(parameters)
            optimizer.step()
            if scheduler is not None and self.schedules_inside:
                scheduler.step()
            if self.decay is not None:
                with torch.no_grad():
                    for average, parameter in zip(averages, parameters, strict=True):
                        average.lerp_(parameter, 1 - self.decay)
            return loss

        run, losses = compile_(train), []
        for number in range(3):
            losses.append(run(torch.linspace(-1, 1, 8).reshape(2, 4) + number, torch.linspace(0, 1, 6).reshape(2, 3)))
            if scheduler is not None and not self.schedules_inside:
                scheduler.step()
        return [*losses, *model.parameters(), *model.buffers(), *averages]

    def _compute_loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if self.autocast is None:
            return self.loss(model(x), y) * self.factor
        with torch.autocast("cpu", dtype=self.autocast):
            return self.loss(model(x).float(), y) * self.factor


def _clip_norm(limit: float, norm_type: float = 2.0) -> Callable[[Iterable[nn.Parameter]], Any]:
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, limit, norm_type=norm_type)


def _clip_value(limit: float) -> Callable[[Iterable[nn.Parameter]], Any]:
    return lambda parameters: nn.utils.clip_grad_value_(parameters, limit)


def _huber(delta: float) -> Loss:
    return lambda found, right: functional.huber_loss(found, right, delta=delta)


def _penalise(weight: float) -> Loss:
    return lambda found, right: functional.mse_loss(found, right) + weight * found.abs().sum()


def _lose_by_class(smoothing: float) -> Loss:
    return lambda found, right: functional.cross_entropy(found, right.argmax(1), label_smoothing=smoothing)


def _weigh(weights: tuple[float, ...]) -> Loss:
    held = torch.tensor(weights)
    return lambda found, right: ((found - right).square() * held).mean()


def _reduce(reduction: str) -> Loss:
    return lambda found, right: functional.mse_loss(found, right, reduction=reduction)


def _freeze(model: nn.Module) -> None:
    next(model.parameters()).requires_grad = False


def _hook_gradients(factor: float) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]  # torch's

    return prepare


def _hook_accumulated(factor: float) -> Callable[[nn.Module], None]:
    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(factor)

    def prepare(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(scale)  # type: ignore[no-untyped-call]  # torch's

    return prepare


def _hook_forward(factor: float) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        model.register_forward_hook(lambda module, inputs, output: output * factor)

    return prepare


def _hook_module_gradients(factor: float) -> Callable[[nn.Module], None]:
    def scale(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(None if each is None else each * factor for each in inputs)

    def prepare(model: nn.Module) -> None:
        list(model.children())[2].register_full_backward_hook(scale)

    return prepare


class _Plain(torch.optim.Optimizer):
    """An optimizer of the user, with a method that changes the direction, and a helper."""

    def __init__(self, parameters: Any, *, lr: float, power: float = 1.0, factor: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr})
        self.power = power
        self.factor = factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self._choose(parameter.grad), alpha=-group["lr"])

    def _choose(self, gradient: Tensor) -> Tensor:
        return gradient.sign() * gradient.abs().pow(self.power) * self.factor


def _make_plain(**settings: float) -> Callable[[Iterable[nn.Parameter]], Any]:
    return lambda parameters: _Plain(parameters, **{"lr": 0.1, **settings})


class _Other(_Plain):
    def _choose(self, gradient: Tensor) -> Tensor:
        return gradient * 0.3


def _make_other(parameters: Iterable[nn.Parameter]) -> Any:
    return _Other(parameters, lr=0.1)


def _decay_by(gamma: float) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)


def _step_down(size: int) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, size, gamma=0.1)


def _warm_up(count: int) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / count))


def _make_sgd_by_tensor(parameters: Iterable[nn.Parameter]) -> Any:
    return torch.optim.SGD(parameters, lr=torch.tensor(0.1))


def _normalise(momentum: float) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 3))


def _activate(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 8), kind(), nn.Linear(8, 3))


_PLAIN: Final = Training()


def _change(name: str, before: dict[str, Any], after: dict[str, Any], **how: Any) -> Change:
    return Change(name, replace(_PLAIN, **before), replace(_PLAIN, **after), **how)


STEP_CHANGES: Final = (
    _change("loss: another function", {}, {"loss": functional.l1_loss}),
    _change("loss: another reduction", {"loss": _reduce("mean")}, {"loss": _reduce("sum")}),
    _change("loss: a parameter of it", {"loss": _huber(0.1)}, {"loss": _huber(1.0)}),
    _change("loss: a weight in a closure", {"loss": _penalise(0.1)}, {"loss": _penalise(0.5)}),
    _change("loss: label smoothing", {"loss": _lose_by_class(0.0)}, {"loss": _lose_by_class(0.2)}),
    _change("loss: a tensor of weights", {"loss": _weigh((1, 1, 1))}, {"loss": _weigh((1, 2, 3))}),
    _change("loss: a factor", {}, {"factor": 3.0}),
    _change("clip: a norm", {}, {"clip": _clip_norm(0.1)}),
    _change("clip: another norm", {"clip": _clip_norm(0.2)}, {"clip": _clip_norm(0.1)}),
    _change("clip: another kind of norm", {"clip": _clip_norm(0.1)}, {"clip": _clip_norm(0.1, norm_type=1.0)}),
    _change("clip: the largest norm", {"clip": _clip_norm(0.1)}, {"clip": _clip_norm(0.1, norm_type=float("inf"))}),
    _change("clip: another value", {"clip": _clip_value(0.05)}, {"clip": _clip_value(0.01)}),
    _change("optimizer: another class", {}, {"make_optimizer": _make_adamw}),
    _change("optimizer: one of the user", {}, {"make_optimizer": _make_plain()}),
    _change("optimizer: an attribute", {"make_optimizer": _make_plain()}, {"make_optimizer": _make_plain(power=2.0)}),
    _change(
        "optimizer: another attribute", {"make_optimizer": _make_plain()}, {"make_optimizer": _make_plain(factor=0.3)}
    ),
    _change(
        "optimizer: the lr of a user's", {"make_optimizer": _make_plain()}, {"make_optimizer": _make_plain(lr=0.3)}
    ),
    _change("optimizer: a method", {"make_optimizer": _make_plain()}, {"make_optimizer": _make_other}),
    _change("schedule: another factor", {"make_scheduler": _decay_by(0.9)}, {"make_scheduler": _decay_by(0.1)}),
    _change("schedule: other steps", {"make_scheduler": _step_down(1)}, {"make_scheduler": _step_down(2)}),
    _change("schedule: a function", {"make_scheduler": _warm_up(2)}, {"make_scheduler": _warm_up(10)}),
    _change(
        "schedule: of a tensor",
        {"make_scheduler": _decay_by(0.9), "make_optimizer": _make_sgd_by_tensor},
        {"make_scheduler": _decay_by(0.1), "make_optimizer": _make_sgd_by_tensor},
    ),
    _change(
        "schedule: inside",
        {"make_scheduler": _decay_by(0.9), "schedules_inside": True},
        {"make_scheduler": _decay_by(0.1), "schedules_inside": True},
    ),
    _change("step: accumulated gradients", {}, {"accumulated": 3}),
    _change("step: gradients set to zero", {}, {"sets_to_none": False}, is_visible=False),
    _change("step: autocast", {}, {"autocast": torch.bfloat16}),
    _change("step: an average's decay", {"decay": 0.9}, {"decay": 0.5}),
    _change("model: frozen", {}, {"prepare": _freeze}),
    _change("model: in evaluation", {"make_model": _normalise(0.1)}, {"make_model": lambda: _normalise(0.1)().eval()}),
    _change("model: momentum of its buffers", {"make_model": _normalise(0.1)}, {"make_model": _normalise(0.5)}),
    _change("model: another activation", {}, {"make_model": _activate(nn.ReLU)}),
    _change(
        "model: a parameter of an activation",
        {"make_model": _activate(lambda: nn.LeakyReLU(0.1))},
        {"make_model": _activate(lambda: nn.LeakyReLU(0.3))},
    ),
    _change(
        "model: dropout",
        {"make_model": _activate(lambda: nn.Dropout(0.0))},
        {"make_model": _activate(nn.Identity)},
        is_visible=False,
    ),
    _change("hook: of parameters", {"prepare": _hook_gradients(0.5)}, {"prepare": _hook_gradients(3.0)}),
    _change("hook: after accumulation", {"prepare": _hook_accumulated(0.5)}, {"prepare": _hook_accumulated(3.0)}),
    _change("hook: of the output", {"prepare": _hook_forward(0.5)}, {"prepare": _hook_forward(3.0)}),
    _change(
        "hook: of a module's gradients",
        {"prepare": _hook_module_gradients(0.5)},
        {"prepare": _hook_module_gradients(3.0)},
    ),
)
