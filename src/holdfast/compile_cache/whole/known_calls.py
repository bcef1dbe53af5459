"""One way in which a callable was called: what it depends on, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.compile_cache.key.system import describe_system
from holdfast.compile_cache.key_parts import GraphKey, Uncacheable, hash_parts
from holdfast.compile_cache.whole.describe import Description, describe_call, list_watched_parts
from holdfast.compile_cache.whole.program import Program
from holdfast.compile_cache.whole.state import (
    TorchCode,
    describe_flags_of_call,
    describe_settings,
    read_torch_code,
    verify_tables,
)
from holdfast.json_text import Json

WHOLE_FORMAT: Final = 1
"""Increased when the meaning of descriptions or programs changes; everything stored before is then a miss."""


class CallDescription:
    """A call, its key, and a quick test whether another call has the same key."""

    def __init__(
        self, callable_: object, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Json]
    ) -> None:
        """Describe a call. Raises Uncacheable."""
        self._flags = describe_flags_of_call()
        verify_tables()
        self._torch_code: TorchCode = read_torch_code()
        self.found: Description = describe_call(callable_, args, kwargs)
        self._arguments = Arguments(args, kwargs)
        tensors = self.found.walk.tensors
        self._own = {id(tensor) for tensor in tensors[: self.found.num_own_tensors]}
        if any(id(tensor) in self._own for tensor in self._arguments.tensors):
            raise Uncacheable("an argument is a tensor of the callable itself")
        self._guard = _make_guard(tensors)
        self.sharing = find_sharing(tensors)
        self.key = self._make_key(options)

    def _make_key(self, options: Mapping[str, Json]) -> GraphKey:
        return hash_parts(
            {
                "graph": {"whole": WHOLE_FORMAT, "code": self.found.code, "torch_code": self._torch_code.digest},
                "constants": [],
                "inputs": list(self.found.arguments),
                "aliasing": self.sharing,
                "custom_ops": sorted(self.found.operators),
                "flags": self._flags,
                "config": describe_settings(),
                "options": dict(options),
                "system": describe_system(("cpu",)),
            }
        )

    def is_stale(self) -> bool:
        """Return whether something besides the arguments and flags has changed."""
        return not (self._torch_code.is_unchanged() and self.found.walk.watch.is_unchanged(list_watched_parts))

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the tensors of a call with the same key, numbered as in the description; None for another key.

        The caller has found that the description is not stale.
        """
        try:
            if describe_flags_of_call() != self._flags:
                return None
        except Uncacheable:
            return None
        leaves = self._arguments.match(args, kwargs)
        if leaves is None or any(id(tensor) in self._own for tensor in leaves):
            return None
        first = [tensor for number, tensor in enumerate(leaves) if self._arguments.pattern[number] == number]
        tensors = [*self.found.walk.tensors[: self.found.num_own_tensors], *first]
        return tensors if self._guard.check(*tensors) and not any(map(_has_marks, first)) else None


class KnownCall:
    """A call that was compiled or loaded."""

    def __init__(
        self, call: CallDescription, run: Callable[[list[Tensor]], Any] | None, program: Program | None
    ) -> None:
        """Run the program by `run`; if it is None, the callable is compiled as usual."""
        self.call = call
        self._run = run
        self._program = program

    @property
    def is_ordinary(self) -> bool:
        """Whether the callable has to be called as usual."""
        return self._run is None

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Run the program with the tensors of a call."""
        assert self._run is not None, "an ordinary entry has no program"
        assert self._program is not None, "an ordinary entry has no program"
        return self._run([tensors[number] for number in self._program.inputs])

    def may_run(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors share memory as they did when the program was compiled, if it changes any of them."""
        if self._program is None or not self._program.changes_inputs:
            return True
        return find_sharing(tensors) == self.call.sharing


def find_sharing(tensors: Sequence[Tensor]) -> list[Json]:
    """Return groups of tensors that share a storage, as [number, offset] each."""
    groups: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        address = tensor.untyped_storage().data_ptr()
        if address:
            groups.setdefault(address, []).append(number)
    return [
        [[number, tensors[number].storage_offset() * tensors[number].element_size()] for number in numbers]
        for numbers in groups.values()
        if len(numbers) > 1
    ]


def _make_guard(tensors: Sequence[Tensor]) -> Any:
    guards: Any = torch._C._dynamo.guards
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _has_marks(tensor: Tensor) -> bool:
    """Return whether a tensor has attributes of its own, such as marks of dynamic sizes."""
    return bool(vars(tensor))


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
