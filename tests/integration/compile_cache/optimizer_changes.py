"""Changes of compiled optimizers: settings, parameter groups, state, gradients, hooks, classes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.integration.compile_cache.changes import Change, Compile, Program

Settings = Mapping[str, Any]
Prepare = Callable[[Any, list[nn.Parameter]], None]
"""Changes an optimizer or its parameters before the first step."""
_SHAPES: Final = ((4,), (2, 3))
_NEITHER: Final[Settings] = {}


def step_by(
    kind: Callable[..., Any],
    settings: Settings = _NEITHER,
    *,
    shapes: Sequence[tuple[int, ...]] = _SHAPES,
    dtype: torch.dtype = torch.float32,
    prepare: Prepare = lambda optimizer, parameters: None,
    between: Prepare = lambda optimizer, parameters: None,
    group: Callable[[list[nn.Parameter]], Any] = lambda parameters: parameters,
    steps: int = 2,
) -> Program:
    """Return a program that compiles the step of an optimizer and runs it.

    Args:
        kind: makes the optimizer from parameter groups and settings.
        settings: its settings.
        shapes: shapes of the parameters.
        dtype: dtype of the parameters.
        prepare: called before the first step, with gradients.
        between: called after each step.
        group: makes parameter groups.
        steps: number of steps.
    """

    def run(compile_: Compile) -> list[Tensor]:
        parameters = [nn.Parameter(_make_values(shape, dtype)) for shape in shapes]
        optimizer = kind(group(parameters), **settings)
        _set_gradients(parameters)
        prepare(optimizer, parameters)
        step = compile_(optimizer.step)
        for _ in range(steps):
            step()
            between(optimizer, parameters)
        state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
        return [*parameters, *state]

    return run


def _make_values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = int(torch.Size(shape).numel())
    return torch.linspace(-1.0, 2.0, count).reshape(shape).to(dtype)


def _set_gradients(parameters: list[nn.Parameter]) -> None:
    for number, parameter in enumerate(parameters):
        parameter.grad = (_make_values(tuple(parameter.shape), torch.float32) * 0.3 + number + 0.1).to(parameter.dtype)


# Class of optimizer -> settings of all its programs, and for each setting another value.
_OPTIMIZERS: Final[dict[Callable[..., Any], tuple[Settings, Settings]]] = {
    torch.optim.SGD: (
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.2, "momentum": 0.5, "dampening": 0.5, "weight_decay": 0.1, "nesterov": True, "maximize": True},
    ),
    torch.optim.Adam: (
        {"lr": 0.1, "weight_decay": 0.1},
        {
            "lr": 0.2, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.5, "amsgrad": True, "maximize": True,
            "decoupled_weight_decay": True,
        },
    ),
    torch.optim.AdamW: (
        {"lr": 0.1},
        {"lr": 0.2, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.5, "amsgrad": True, "maximize": True},
    ),
    torch.optim.RMSprop: (
        {"lr": 0.1},
        {"lr": 0.2, "alpha": 0.5, "eps": 0.1, "weight_decay": 0.5, "momentum": 0.5, "centered": True, "maximize": True},
    ),
    torch.optim.Adagrad: (
        {"lr": 0.1},
        {
            "lr": 0.2, "lr_decay": 0.5, "weight_decay": 0.5, "initial_accumulator_value": 0.5, "eps": 0.1,
            "maximize": True,
        },
    ),
    torch.optim.Adadelta: (
        {"lr": 1.0, "eps": 0.01},
        {"lr": 2.0, "rho": 0.5, "eps": 0.1, "weight_decay": 0.5, "maximize": True},
    ),
    torch.optim.Adamax: (
        {"lr": 0.1},
        {"lr": 0.2, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.5, "maximize": True},
    ),
    torch.optim.NAdam: (
        {"lr": 0.1, "weight_decay": 0.1},
        {
            "lr": 0.2, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.5, "momentum_decay": 0.5, "maximize": True,
            "decoupled_weight_decay": True,
        },
    ),
    torch.optim.RAdam: (
        {"lr": 0.1, "weight_decay": 0.1},
        {
            "lr": 0.2, "betas": (0.5, 0.9), "weight_decay": 0.5, "maximize": True,
            "decoupled_weight_decay": True,
        },
    ),
    torch.optim.ASGD: (
        {"lr": 0.1, "lambd": 0.3, "t0": 0.0},
        {"lr": 0.2, "lambd": 0.5, "alpha": 0.5, "t0": 3.0, "weight_decay": 0.5, "maximize": True},
    ),
    torch.optim.Rprop: (
        {"lr": 0.1},
        {"lr": 0.2, "etas": (0.25, 1.5), "step_sizes": (0.15, 0.16), "maximize": True},
    ),
    torch.optim.Muon: (
        {"lr": 0.1, "weight_decay": 0.1},
        {
            "lr": 0.2, "weight_decay": 0.5, "momentum": 0.5, "nesterov": False, "ns_steps": 2,
            "ns_coefficients": (3.0, -4.0, 2.0), "adjust_lr_fn": "match_rms_adamw",
        },
    ),
}  # fmt: skip
# Keyword arguments of `step_by`, where the usual ones show no change.
_HOW: Final[dict[Callable[..., Any], dict[str, Any]]] = {
    torch.optim.Muon: {"shapes": ((2, 3), (4, 4))},
}
# Settings that choose the code and not the result.
_WAYS: Final[dict[Callable[..., Any], tuple[str, ...]]] = {
    torch.optim.SGD: ("foreach", "fused"),
    torch.optim.Adam: ("foreach", "fused"),
    torch.optim.AdamW: ("foreach", "fused"),
    torch.optim.Adagrad: ("foreach", "fused"),
    torch.optim.RMSprop: ("foreach",),
}


def _list_settings() -> list[Change]:
    found = []
    for kind, (common, others) in _OPTIMIZERS.items():
        how = _HOW.get(kind, {})
        for name, value in others.items():
            before, after = step_by(kind, common, **how), step_by(kind, {**common, name: value}, **how)
            found.append(Change(f"{kind.__name__}: {name}", before, after))
    return found


def _list_ways() -> list[Change]:
    return [
        Change(
            f"{kind.__name__}: {name}",
            step_by(kind, {**_OPTIMIZERS[kind][0], name: False}),
            step_by(kind, {**_OPTIMIZERS[kind][0], name: True}),
            is_visible=False,
        )
        for kind, names in _WAYS.items()
        for name in names
    ]


def _list_tensors() -> list[Change]:
    """Return changes of settings that are tensors: their values are inputs, so an entry is valid for all of them."""
    adam: Callable[..., Program] = functools.partial(step_by, torch.optim.Adam)
    sgd: Callable[..., Program] = functools.partial(step_by, torch.optim.SGD)

    def betas(first: float, second: float) -> Settings:
        return {"betas": (torch.tensor(first), torch.tensor(second)), "lr": torch.tensor(0.1), "foreach": False}

    return [
        Change("tensor: lr", adam({"lr": torch.tensor(0.1)}), adam({"lr": torch.tensor(0.2)})),
        Change("tensor: lr for a float", adam({"lr": 0.1}), adam({"lr": torch.tensor(0.2)})),
        Change("tensor: float for an lr", adam({"lr": torch.tensor(0.1)}), adam({"lr": 0.2})),
        Change("tensor: lr of SGD", sgd({"lr": torch.tensor(0.1)}), sgd({"lr": torch.tensor(0.2)})),
        Change(
            "tensor: lr by float64",
            adam({"lr": torch.tensor(0.1)}),
            adam({"lr": torch.tensor(0.2, dtype=torch.float64)}),
        ),
        Change("tensor: betas", adam(betas(0.9, 0.999)), adam(betas(0.5, 0.9))),
        Change(
            "tensor: lr with foreach off",
            adam({"lr": torch.tensor(0.1), "foreach": False}),
            adam({"lr": torch.tensor(0.2), "foreach": False}),
        ),
        Change(
            "tensor: lr with fused",
            adam({"lr": torch.tensor(0.1), "fused": True}),
            adam({"lr": torch.tensor(0.2), "fused": True}),
            unstored="no graph",
        ),
    ]


def _split(**second: Any) -> Callable[[list[nn.Parameter]], Any]:
    return lambda parameters: [{"params": parameters[:1]}, {"params": parameters[1:], **second}]


def _reverse(parameters: list[nn.Parameter]) -> Any:
    return [{"params": parameters[1:], "lr": 0.3}, {"params": parameters[:1]}]


def _list_groups() -> list[Change]:
    sgd: Callable[..., Program] = functools.partial(step_by, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    adamw: Callable[..., Program] = functools.partial(step_by, torch.optim.AdamW, {"lr": 0.1})
    other = _split(lr=0.3)
    return [
        Change("group: lr of the second", sgd(group=_split(lr=0.2)), sgd(group=other)),
        Change("group: lr of one of two", sgd(group=_split()), sgd(group=other)),
        Change("group: weight_decay of the second", adamw(group=_split()), adamw(group=_split(weight_decay=0.5))),
        Change("group: maximize of the second", adamw(group=_split()), adamw(group=_split(maximize=True))),
        Change("group: betas of the second", adamw(group=_split()), adamw(group=_split(betas=(0.5, 0.9)))),
        Change("group: one for two", sgd(), sgd(group=other)),
        Change("group: the other order", sgd(group=other), sgd(group=_reverse)),
        Change(
            "group: the other parameter",
            sgd(group=lambda each: [{"params": each[:1]}, {"params": each[1:], "lr": 0.3}], shapes=((4,), (4,))),
            sgd(group=lambda each: [{"params": each[1:]}, {"params": each[:1], "lr": 0.3}], shapes=((4,), (4,))),
        ),
        Change("group: fewer parameters", sgd(), sgd(group=lambda parameters: parameters[:1])),
        Change("group: added later", sgd(group=lambda each: each[:1]), sgd(group=lambda each: each[:1], prepare=_add)),
    ]


def _add(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    optimizer.add_param_group({"params": parameters[1:], "lr": 0.3})


def _set(**settings: Any) -> Prepare:
    return lambda optimizer, parameters: optimizer.param_groups[0].update(settings)


def _drop_gradient(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    parameters[1].grad = None


def _scale_gradients(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(-3)


def _stride_gradient(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    parameters[1].grad = _make_values((3, 2), torch.float32).t()


def _run_eagerly(count: int) -> Prepare:
    def run(optimizer: Any, parameters: list[nn.Parameter]) -> None:
        for _ in range(count):
            optimizer.step()

    return run


def _load(**changes: Any) -> Prepare:
    """Load a state from a first step, with other settings in its group."""

    def run(optimizer: Any, parameters: list[nn.Parameter]) -> None:
        optimizer.step()
        state = optimizer.state_dict()
        state["param_groups"][0].update(changes)
        optimizer.load_state_dict(state)

    return run


def _share_gradients(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    parameters[1].grad = parameters[0].grad


def _halve(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _tenth(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["lr"] *= 0.1


def _make_sgd_by_tensor(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=torch.tensor(0.1))


def _fill_lr(factor: float) -> Prepare:
    return lambda optimizer, parameters: optimizer.param_groups[0]["lr"].mul_(factor)


def _hook_before(factor: float) -> Prepare:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(factor)

    return lambda optimizer, parameters: optimizer.register_step_pre_hook(hook) and None


def _hook_after(factor: float) -> Prepare:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(factor)

    return lambda optimizer, parameters: optimizer.register_step_post_hook(hook) and None


def _list_states() -> list[Change]:
    adam: Callable[..., Program] = functools.partial(step_by, torch.optim.Adam, {"lr": 0.1})
    sgd: Callable[..., Program] = functools.partial(step_by, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    by_tensor: Callable[..., Program] = functools.partial(step_by, _make_sgd_by_tensor)
    return [
        Change("state: other shapes", adam(), adam(shapes=((5,), (2, 3)))),
        Change("state: transposed shapes", adam(), adam(shapes=((4,), (3, 2)))),
        Change("state: scalars", adam(), adam(shapes=((), (1,)))),
        Change("state: float64", adam(), adam(dtype=torch.float64)),
        Change("state: bfloat16", sgd(), sgd(dtype=torch.bfloat16)),
        Change("state: one more parameter", adam(), adam(shapes=((4,), (2, 3), (2,)))),
        Change("state: after steps", adam(), adam(prepare=_run_eagerly(3))),
        Change("state: momentum after a step", sgd(), sgd(prepare=_run_eagerly(1))),
        Change("state: loaded with another lr", adam(prepare=_load()), adam(prepare=_load(lr=0.3))),
        Change("state: loaded with other betas", adam(prepare=_load()), adam(prepare=_load(betas=(0.5, 0.9)))),
        Change("state: loaded with amsgrad", adam(prepare=_load()), adam(prepare=_load(maximize=True))),
        Change("gradient: none", adam(), adam(prepare=_drop_gradient)),
        Change("gradient: other values", adam(), adam(prepare=_scale_gradients, steps=3)),
        Change("gradient: transposed", sgd(), sgd(prepare=_stride_gradient)),
        Change(
            "gradient: shared",
            sgd(shapes=((4,), (4,))),
            sgd(shapes=((4,), (4,)), prepare=_share_gradients),
        ),
        Change("setting: assigned before", sgd(), sgd(prepare=_set(lr=0.3))),
        Change("setting: nesterov assigned", sgd(), sgd(prepare=_set(nesterov=True))),
        Change("setting: lr assigned between", sgd(between=_halve, steps=4), sgd(between=_tenth, steps=4)),
        Change(
            "setting: lr filled between",
            by_tensor(between=_fill_lr(0.5), steps=4),
            by_tensor(between=_fill_lr(0.1), steps=4),
        ),
        Change("hook: before a step", sgd(prepare=_hook_before(0.5)), sgd(prepare=_hook_before(3.0))),
        Change("hook: after a step", sgd(prepare=_hook_after(0.5)), sgd(prepare=_hook_after(3.0))),
        Change("class: AdamW for Adam", adam(), step_by(torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3})),
        Change("class: NAdam for Adam", adam(), step_by(torch.optim.NAdam, {"lr": 0.1})),
        Change(
            "class: one that dynamo does not trace",
            step_by(torch.optim.Adafactor, {"lr": 0.1}),
            step_by(torch.optim.Adafactor, {"lr": 0.2}),
            unstored="no graph",
        ),
        Change("class: Adamax for Adam", adam(), step_by(torch.optim.Adamax, {"lr": 0.1})),
    ]


OPTIMIZER_CHANGES: Final = (*_list_settings(), *_list_ways(), *_list_tensors(), *_list_groups(), *_list_states())
