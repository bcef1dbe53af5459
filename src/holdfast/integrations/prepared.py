"""The state of everything that an Accelerator has prepared or registered, as one tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.distributed.checkpoint.training import RankRng, TrainingState, find_names, name_optimizer, training_state
from holdfast.errors import Mismatch
from holdfast.integrations.missing import RequiredLibrary
from holdfast.snapshot.optimizers import unwrap
from holdfast.snapshot.stateful import is_stateful, read_state

with RequiredLibrary("Accelerate", "accelerate"):
    from accelerate.data_loader import SeedableRandomSampler


def make_state(accelerator: Any, models: Sequence[torch.nn.Module]) -> TrainingState:
    """Return the state of an accelerator for `save` and `load_into`, with the weights of `models` only.

    Parts are called as Accelerate calls its files: "model", "model_1", "optimizer", "optimizer_1" ...
    """
    parts: dict[str, Any] = {}
    names: dict[torch.Tensor, str] = {}
    for number, model in enumerate(accelerator._models):
        part = _number("model", number)
        if any(model is each for each in models):
            parts[part] = training_state(model, rng=False)["model"]
        is_only = len(accelerator._models) == 1
        names |= {tensor: name if is_only else f"{part}.{name}" for tensor, name in find_names(model).items()}
    for number, optimizer in enumerate(accelerator._optimizers):
        parts[_number("optimizer", number)] = _name(optimizer, names)
    for number, schedule in enumerate(accelerator._schedulers):
        parts[_number("scheduler", number)] = schedule
    for number, loader in enumerate(accelerator._dataloaders):
        parts[_number("dataloader", number)] = LoaderState(loader)
    if accelerator.scaler is not None:
        parts["scaler"] = accelerator.scaler
    parts["custom"] = list(accelerator._custom_objects)
    # The RNG state last: loading other parts may draw random numbers.
    return TrainingState({**parts, "step": accelerator.step, "rng": RankRng()})


def _number(part: str, number: int) -> str:
    return f"{part}_{number}" if number else part


def _name(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Any:
    """Return an optimizer whose state is saved by parameter name; as it is, if it has parameters of its own."""
    groups = unwrap(optimizer).param_groups
    has_names = all(parameter in names for group in groups for parameter in group["params"])
    return name_optimizer(optimizer, names) if has_names else optimizer


class LoaderState:
    """The position of a data loader that Accelerate has prepared.

    A loader always has its epoch, the seed of its order, and the state of its generator. Whether it has a position in
    the epoch depends on the loader: torchdata's has one, and so has a batch sampler with `state_dict`.
    """

    def __init__(self, loader: Any) -> None:
        """Read and restore the position of `loader`."""
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return the position; what the loader does not have is None."""
        position, order, generator = self._find_position(), self._find_order(), self._find_generator()
        return {
            "epoch": self._loader.iteration,
            "position": None if position is None else read_state(position),
            "order": None if order is None else {"seed": order.initial_seed, "epoch": order.epoch},
            "generator": None if generator is None else generator.get_state().numpy().tobytes(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Restore the position; raise Mismatch, and change nothing, if the loader is of another kind."""
        position, order, generator = self._find_position(), self._find_order(), self._find_generator()
        found = {"position": position, "order": order, "generator": generator}
        differing = [part for part, value in found.items() if (state_dict[part] is None) != (value is None)]
        if differing:
            raise Mismatch(
                f"the saved data loader and this one are of different kinds: only one has: {', '.join(differing)};"
                " create this one as the saved one was created"
            )
        self._loader.iteration = state_dict["epoch"]
        if position is not None:
            position.load_state_dict(state_dict["position"])
        if order is not None:
            order.initial_seed, order.epoch = state_dict["order"]["seed"], state_dict["order"]["epoch"]
        if generator is not None:
            generator.set_state(torch.frombuffer(bytearray(state_dict["generator"]), dtype=torch.uint8))

    def _find_position(self) -> Any:
        """Return the object that stores the position in the epoch: the loader or one of its samplers."""
        if self._loader.use_stateful_dataloader:
            return self._loader
        outer = self._loader.batch_sampler
        # Accelerate wraps a batch sampler to give each rank its share.
        samplers = (outer, getattr(outer, "batch_sampler", None), self._loader.sampler)
        return next((each for each in samplers if is_stateful(each)), None)

    def _find_order(self) -> Any:
        sampler = self._loader.get_sampler()
        return sampler if isinstance(sampler, SeedableRandomSampler) else None

    def _find_generator(self) -> torch.Generator | None:
        """Return the generator that the order is drawn from; None if each epoch sets its seed."""
        if self._find_order() is not None:
            return None
        found = getattr(self._loader.get_sampler(), "generator", None)
        return found if isinstance(found, torch.Generator) else None
