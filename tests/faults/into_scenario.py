"""A target for loads that fail: what it holds leaf by leaf, and whether an error says the truth about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.objects.memory import MemoryStore
from holdfast.store import OpenOptions, Store
from tests.kit.tensors import raw_bytes

Facts = dict[str, object]
"""The content of each leaf, and of each object as a whole, by name."""


class Tally:
    """An object that takes its state over in two moves, and has a tensor that is filled in place."""

    def __init__(self, seed: int) -> None:
        self.first, self.second = seed, [seed]
        self.memory = _noise(300, seed)

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second, "memory": self.memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["first"]
        self.second[:] = state["second"]
        self.memory = state["memory"]


class Hooked(nn.Linear):
    """A module with a state of its own beside its tensors, which is given back by its own method."""

    def __init__(self, seed: int) -> None:
        super().__init__(20, 30)
        self.extra = {"seed": seed}

    def get_extra_state(self) -> dict[str, int]:
        return self.extra

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state


@dataclass
class Settings:
    """A field that is replaced."""

    rate: float


def make_tree(seed: int, *, is_used: bool = True) -> dict[str, Any]:
    """Return a tree with tensors, ties, a view, modules, an optimizer, whether used or not, and plain values."""
    torch.manual_seed(seed)
    large = _noise(400_000, seed)
    model, hooked = nn.Linear(30, 40), Hooked(seed)
    optimizer = torch.optim.Adam([*model.parameters(), *hooked.parameters()], lr=seed * 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(seed) if is_used else ():
        hooked(torch.ones(20)).sum().backward()
        model(torch.ones(30)).sum().backward()
        optimizer.step()
        schedule.step()
    return {
        "large": large,
        "tied": large,
        "view": large[1000:2000],
        "small": _noise(8, seed),
        "settings": Settings(seed * 0.5),
        "model": model,
        "strided": _noise(50, seed).reshape(5, 10) if seed == SAVED else _noise(50, seed).reshape(10, 5).t(),
        "hooked": hooked,
        "optimizer": optimizer,
        "tally": Tally(seed),
        "schedule": schedule,
        "array": np.arange(200) * seed,
        "values": {"step": seed, "name": f"run {seed}", "losses": [seed, seed + 1]},
        "list": [seed, f"{seed}"],
    }


SAVED = 2
OLD = 1
OBJECTS = ("hooked", "optimizer", "tally", "schedule")


def make_store() -> MemoryStore:
    """Return a store that holds the tree to be loaded, as "x"."""
    store = MemoryStore()
    with Store(store, OpenOptions(types=[Settings])) as opened:
        opened.save("x", make_tree(SAVED))
    return store


def _noise(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def find_facts(tree: dict[str, Any]) -> Facts:
    """Return what a tree holds, bit for bit."""
    facts: Facts = {}
    for name, value in tree.items():
        _add_facts(facts, name, value)
    return facts


def _add_facts(facts: Facts, name: str, value: Any) -> None:
    if isinstance(value, nn.Module | torch.optim.Optimizer | Tally | torch.optim.lr_scheduler.LRScheduler):
        if name in OBJECTS:
            facts[name] = repr(_freeze(value.state_dict()))
        value = value.state_dict()
    if isinstance(value, Settings):
        value = {"rate": value.rate}
    if isinstance(value, dict):
        for key, item in value.items():
            _add_facts(facts, f"{name}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _add_facts(facts, f"{name}.{index}", item)
    else:
        facts[name] = _freeze(value)


def _freeze(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), raw_bytes(value))
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: _freeze(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_freeze(item) for item in value]
    return value


def find_lies(error: BaseException, found: Facts, old: Facts, new: Facts) -> list[str]:
    """Return what an error says that is not so: a leaf must be new, old, or said to be a mixture."""
    overwritten: tuple[str, ...] = getattr(error, "overwritten", ())
    partly: tuple[str, ...] = getattr(error, "partly_written", ())
    lies = [f"{name} is not a leaf" for name in overwritten if name not in old and name not in new]
    lies += [f"{name} is partly written and not overwritten" for name in partly if name not in overwritten]
    for name in {**old, **new, **found}:
        owner = next((each for each in OBJECTS if name.startswith(f"{each}.")), name)
        if name in partly or (owner in partly and name not in overwritten):
            continue
        is_new = name in overwritten or owner in overwritten
        expected = new if is_new else old
        if found.get(name) != expected.get(name):
            lies.append(f"{name} is not {'new' if is_new else 'old'}")
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    if overwritten and ("Before this error, the load had written to" not in text or overwritten[0] not in text):
        lies.append(f"the text does not say what was overwritten: {text}")
    return lies
