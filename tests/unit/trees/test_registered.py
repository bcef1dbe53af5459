"""Which classes may be registered, and how they are found by name."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from holdfast.errors import Unsupported
from holdfast.trees.registered import Types

HERE = __name__


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int


@dataclass(frozen=True)
class Key:
    name: str


def test_types_find_classes_by_id_and_ids_by_class() -> None:
    types = Types([Key, Key, Color])
    assert types.classes == (Key, Color)
    assert types.id_of(Key) == f"{HERE}:Key"
    assert types.find(f"{HERE}:Color") is Color
    with pytest.raises(Unsupported, match=r"pass types=\[Point\] to holdfast.open"):
        types.id_of(Point)
    with pytest.raises(Unsupported, match=r"it was saved as an object of class 'a:b.C'.* pass types=\[C\]"):
        types.find("a:b.C")


class Wrapper(torch.Tensor):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


def test_a_tensor_class_with_flatten_may_be_registered() -> None:
    assert Types([Wrapper]).find(f"{HERE}:Wrapper") is Wrapper


def make_twin() -> type:
    @dataclass
    class Twin:
        pass

    return Twin


@dataclass
class Problem(Exception):
    text: str


class Base:
    __slots__ = ("hidden",)


@dataclass
class Hiding(Base):
    shown: int


class Described:
    def __get__(self, instance: object, owner: type) -> int:
        return 1

    def __set__(self, instance: object, value: object) -> None:
        raise AssertionError("code of the class ran")


@dataclass
class Describing:
    place: Described = Described()


@pytest.mark.parametrize(
    ("classes", "text"),
    [
        ([int], "types= takes enums, dataclasses, named tuples and tensor classes .* not <class 'int'>"),
        ([5], "not 5"),
        ([torch.Tensor], "not <class 'torch.Tensor'>"),
        ([make_twin(), make_twin()], "two different classes passed in types= are called .*Twin; rename one"),
        ([Problem], "dataclass .*Problem is abstract or has state besides its fields"),
        ([Hiding], "dataclass .*Hiding has the slot 'hidden', which is not a field: make it one"),
        ([Describing], "field 'place' is a descriptor, and setting it would run its code"),
    ],
)
def test_a_class_that_cannot_be_rebuilt_completely_is_not_registered(classes: list[Any], text: str) -> None:
    with pytest.raises(Unsupported, match=text):
        Types(classes)
