"""Compares the arguments of a call with those of an earlier one, and lists their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Node:
    """A value in the arguments: its class, and its parts or its text."""

    kind: type
    parts: tuple[_Node, ...] = ()
    names: tuple[str, ...] = ()
    text: str = ""


class Arguments:
    """The arguments of a call, without the values of tensors."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Remember these arguments; `describe_call` has accepted them."""
        self.tensors: list[Tensor] = []
        self._root = _make_node((tuple(args), dict(kwargs)), self.tensors)
        self.pattern = _find_pattern(self.tensors)
        """For each tensor, the position of its first occurrence."""

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the tensors of other arguments, in the same order; None if the rest differs."""
        found: list[Tensor] = []
        is_equal = _matches(self._root, (tuple(args), dict(kwargs)), found)
        return found if is_equal and _find_pattern(found) == self.pattern else None


def _make_node(value: Any, tensors: list[Tensor]) -> _Node:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Node(type(value))
    if isinstance(value, list | tuple):
        return _Node(type(value), tuple(_make_node(each, tensors) for each in value))
    if isinstance(value, dict):
        return _Node(dict, tuple(_make_node(each, tensors) for each in value.values()), tuple(value))
    return _Node(type(value), text=repr(value))


def _matches(node: _Node, value: Any, tensors: list[Tensor]) -> bool:
    if type(value) is not node.kind:
        return False
    if isinstance(value, Tensor):
        tensors.append(value)
        return True
    if isinstance(value, dict):
        values: Any = value.values()
        if tuple(value) != node.names:
            return False
    elif isinstance(value, list | tuple):
        values = value
    else:
        # The text distinguishes 0.0 from -0.0, and NaN is equal to itself.
        return repr(value) == node.text
    return len(values) == len(node.parts) and all(
        _matches(part, each, tensors) for part, each in zip(node.parts, values, strict=True)
    )


def _find_pattern(tensors: Sequence[Tensor]) -> list[int]:
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), number) for number, tensor in enumerate(tensors)]
