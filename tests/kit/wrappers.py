"""Stand-ins for what training frameworks put around optimizers, schedules and loaders, with the same peculiarities."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader


class InheritingOptimizer(torch.optim.Optimizer):
    """Is a torch optimizer by class, but has none of its tables, as in Accelerate."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.loads = 0

    @property
    def state(self) -> Any:  # type: ignore[override]  # a property instead of an attribute, as in Accelerate
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # a property instead of an attribute, as in Accelerate
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loads += 1
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class ForwardingOptimizer:
    """Is no torch optimizer by class; forwards every attribute."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


class ImitatingOptimizer:
    """Is of the class of the optimizer inside, whose methods it inherits without its own tables, as in Lightning."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Imitating", (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


class OptimizerWithMore(ForwardingOptimizer):
    """Has a state of another form than torch's optimizers."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.skipped = 0

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self._optimizer.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict["inner"])
        self.skipped = state_dict["skipped"]


class WrappedScheduler:
    """Passes on the state of a schedule, as in Accelerate."""

    def __init__(self, scheduler: Any, optimizer: Any) -> None:
        self.scheduler = scheduler
        self.optimizer = optimizer

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.scheduler.load_state_dict(state_dict)


class WrappedLoader(DataLoader[Any]):
    """Has the methods of a loader with a state, but the loader inside may have none, as in Accelerate."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def state_dict(self) -> Any:
        return self.dl_state_dict

    def load_state_dict(self, state_dict: Any) -> None:
        self.base_dataloader.load_state_dict(state_dict)
