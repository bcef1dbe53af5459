"""Objects that could not be loaded again are refused when they are saved, with the name of the leaf."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from holdfast.distributed.checkpoint.training import training_state
from holdfast.errors import Unsupported
from holdfast.store import Store


class Holder:
    """Saved and loaded by its methods."""

    def __init__(self) -> None:
        self.value = 1

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state_dict: Any) -> None:
        self.value = state_dict["value"]


class NeedsMore(Holder):
    def load_state_dict(self, state_dict: Any, optimizer: Any) -> None:  # type: ignore[override]  # the mistake
        raise NotImplementedError


class TakesKeywords(Holder):
    def load_state_dict(self, *, state_dict: Any) -> None:  # type: ignore[override]  # the mistake
        raise NotImplementedError


class NeedsMoreToSave(Holder):
    def state_dict(self, model: Any) -> Any:  # type: ignore[override]  # the mistake
        raise NotImplementedError


class MakesAnother(Holder):
    @classmethod
    def load_state_dict(cls, state_dict: Any) -> Any:
        return cls()


class Generates(Holder):
    def state_dict(self) -> Any:
        yield 1


class IsNotReady(Holder):
    @property
    def state_dict(self) -> Any:
        raise RuntimeError("not ready")


class OnlySaves(torch.nn.Module):
    def get_extra_state(self) -> Any:
        return {"value": 1}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (NeedsMore(), r"NeedsMore .* load_state_dict cannot be called with the state alone"),
        (TakesKeywords(), r"TakesKeywords .* load_state_dict cannot be called with the state alone"),
        (NeedsMoreToSave(), r"NeedsMoreToSave .* state_dict cannot be called without arguments"),
        (MakesAnother(), r"MakesAnother .* load_state_dict is a class method"),
        (Generates(), "generator cannot be saved"),
        (IsNotReady(), "IsNotReady cannot be saved"),
        (torch.nn.Sequential(OnlySaves()), r"OnlySaves .* no set_extra_state"),
    ],
)
def test_what_could_not_be_loaded_is_refused_when_it_is_saved(store: Store, value: Any, reason: str) -> None:
    with pytest.raises(Unsupported, match=rf"^outer\.part: .*{reason}"):
        store.save("x", {"outer": {"part": value}})

    assert store.latest("") is None


def test_a_part_of_a_training_state_is_refused_as_well(store: Store) -> None:
    with pytest.raises(Unsupported, match="load_state_dict cannot be called with the state alone"):
        store.save("x", training_state(torch.nn.Linear(1, 1), part=NeedsMore()))


class OfTheClass:
    """Its state is that of the class, as that of a global generator is."""

    value = 1

    @classmethod
    def state_dict(cls) -> Any:
        return {"value": cls.value}

    @classmethod
    def load_state_dict(cls, state_dict: Any) -> None:
        cls.value = state_dict["value"]


class TakesOptions(Holder):
    def state_dict(self, *args: Any, prefix: str = "") -> Any:
        return super().state_dict()

    def load_state_dict(self, state_dict: Any, strict: bool = True, **rest: Any) -> None:
        super().load_state_dict(state_dict)


class Assigned:
    """Has methods that were assigned to it, of a kind that has no signature of its own."""

    def __init__(self) -> None:
        self._holder = Holder()
        self.state_dict = functools.partial(Holder.state_dict, self._holder)
        self.load_state_dict = functools.partial(Holder.load_state_dict, self._holder)

    @property
    def value(self) -> int:
        return self._holder.value


@pytest.mark.parametrize("kind", [Holder, OfTheClass, TakesOptions, Assigned])
def test_other_ways_to_write_the_methods_are_accepted(store: Store, kind: type[Any]) -> None:
    store.save("x", {"part": kind()})
    target = kind()

    store.load_into("x", {"part": target})

    assert target.value == 1
