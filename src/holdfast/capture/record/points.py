"""What can be recorded of a model: modules, parameters and buffers by name, and tensors in arguments and results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final

import torch

from holdfast.capture.record.options import CompiledMode
from holdfast.errors import Corrupt, NotFound
from holdfast.json_text import Json
from holdfast.trees.apply import pack_kwargs, unpack_kwargs

_WRAPPED: Final = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_COMPILED: Final = "_orig_mod"


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A module that is recorded."""

    fqn: str
    module: torch.nn.Module
    is_compiled: bool = False
    """Its call is compiled code, including its hooks; so the call itself has to be wrapped."""
    is_outside: bool = False
    """Only its inputs are recorded here; taps inside it record the results."""

    @property
    def class_name(self) -> str:
        """The class name, without a compile wrapper."""
        inner = self.module._modules.get(_COMPILED) or self.module
        return type(inner).__name__


@dataclass(frozen=True, slots=True)
class Points:
    """Everything of a model that is recorded."""

    modules: tuple[Point, ...]
    parameters: dict[str, torch.nn.Parameter]
    """A tied parameter has the first of its names."""
    buffers: tuple[tuple[torch.nn.Module, str, str], ...]
    """Module, local name and full name. Not the tensor itself: a module may replace its buffers."""
    boundaries: tuple[str, ...]
    """Compiled modules, inside which nothing can be recorded."""
    described: tuple[tuple[str, torch.nn.Module], ...] = ()
    """All modules by full name, whether they can be hooked or not; wrappers are left out."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """The other names of a tied parameter, and the first."""

    def iter_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the current buffers by full name."""
        for module, own, name in self.buffers:
            buffer = module._buffers.get(own)
            if buffer is not None:
                yield name, buffer


def find_points(model: torch.nn.Module, *, compiled: CompiledMode) -> Points:
    """Find what can be recorded in a model; a shared module, parameter or buffer has the first of its names."""
    walk = _Walk(compiled)
    walk.visit(model, "", is_inside=False)
    return Points(
        *(tuple(walk.modules), walk.parameters, tuple(walk.buffers), tuple(walk.boundaries)),
        described=tuple(walk.described),
        tied=walk.tied,
    )


@dataclass(slots=True)
class _Walk:
    compiled: CompiledMode
    modules: list[Point] = field(default_factory=list)
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    buffers: list[tuple[torch.nn.Module, str, str]] = field(default_factory=list)
    boundaries: list[str] = field(default_factory=list)
    described: list[tuple[str, torch.nn.Module]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    _visited: set[int] = field(default_factory=set)
    _names: dict[int, str] = field(default_factory=dict)
    """By id, the first name of each parameter."""

    def visit(self, module: torch.nn.Module, fqn: str, *, is_inside: bool) -> None:
        """Add a module and everything below it; `is_inside` means inside compiled code, where hooks do not fire."""
        if id(module) in self._visited:
            return
        self._visited.add(id(module))
        self._add_tensors(module, fqn)
        wrapped = _find_wrapped(module)
        if wrapped is None:
            self.described.append((fqn, module))
        is_compiled = wrapped == _COMPILED or module._compiled_call_impl is not None
        is_boundary = is_compiled and self.compiled == "boundary"
        # A list of modules is never called.
        is_callable = type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)
        if not is_inside and is_callable and (is_boundary or wrapped is None):
            self.modules.append(Point(fqn, module, is_compiled=is_boundary and wrapped is None))
        if not is_inside and is_compiled and self.compiled == "tap":
            self.modules.append(Point(fqn, module, is_compiled=wrapped is None, is_outside=True))
        if is_boundary and not is_inside:
            self.boundaries.append(fqn)
        for name, child in module._modules.items():
            if child is not None:
                below = fqn if name == wrapped else f"{fqn}.{name}" if fqn else name
                self.visit(child, below, is_inside=is_inside or is_boundary)

    def _add_tensors(self, module: torch.nn.Module, fqn: str) -> None:
        prefix = f"{fqn}." if fqn else ""
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            first = self._names.setdefault(id(parameter), prefix + name)
            if first == prefix + name:
                self.parameters[first] = parameter
            else:
                self.tied[prefix + name] = first
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._visited:
                self._visited.add(id(buffer))
                self.buffers.append((module, name, prefix + name))


def _find_wrapped(module: torch.nn.Module) -> str | None:
    """Return the attribute under which a wrapper stores the module it wraps; None if this is no wrapper."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return "module"
    return next((name for name in (*_WRAPPED, _COMPILED) if name in module._modules), None)


_MAX_DEPTH: Final = 32
_PLAIN: Final = (bool, int, float, str, type(None))
_UNKNOWN: Final = re.compile(r"[\x00-\x1f]")


def list_paths(tree: object) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in arguments or results with their paths in Python syntax: "[1]", ".hidden", "['mask']"."""
    if isinstance(tree, torch.Tensor):
        return [("", tree)]
    found: list[tuple[str, torch.Tensor]] = []
    _add_paths(tree, "", 0, found)
    return found


def _add_paths(tree: object, path: str, depth: int, found: list[tuple[str, torch.Tensor]]) -> None:
    if depth >= _MAX_DEPTH:
        return
    for own, child in _iter_children(tree):
        if isinstance(child, torch.Tensor):
            found.append((path + own, child))
        elif type(child) not in _PLAIN:
            _add_paths(child, path + own, depth + 1, found)


def _iter_children(tree: object) -> Iterator[tuple[str, object]]:
    if isinstance(tree, tuple) and (names := getattr(tree, "_fields", ())):
        yield from ((f".{name}", child) for name, child in zip(names, tree, strict=True))
    elif isinstance(tree, tuple | list):
        yield from ((f"[{index}]", child) for index, child in enumerate(tree))
    elif isinstance(tree, Mapping):
        yield from ((f"[{key!r}]", child) for key, child in tree.items())
    elif is_dataclass(tree) and not isinstance(tree, type | torch.nn.Module):
        yield from ((f".{each.name}", getattr(tree, each.name, None)) for each in fields(tree))


def list_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in the arguments of a call with their paths: "[0]" by position, "['mask']" by keyword."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return [("[0]", args[0])]
    return list_paths(args) + list_paths(kwargs)


def describe_form(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the form of a call's arguments as JSON: plain values and containers, with paths in place of tensors."""
    values, keys = pack_kwargs(*args, **kwargs)
    count = len(args)
    paths = [f"[{index}]" if index < count else f"[{keys[index - count]!r}]" for index in range(len(values))]
    nodes = [_encode(value, path, 0) for value, path in zip(values, paths, strict=True)]
    return json.dumps({"keys": list(keys), "values": nodes}, separators=(",", ":"))


def _encode(value: object, path: str, depth: int) -> Json:
    if isinstance(value, torch.Tensor):
        return {"tensor": path}
    if type(value) in _PLAIN:
        return {"plain": value}
    if depth < _MAX_DEPTH:
        children = [_encode(child, path + own, depth + 1) for own, child in _iter_children(value)]
        if type(value) in (tuple, list):
            return {type(value).__name__: children}
        if type(value) is dict and all(type(key) in _PLAIN for key in value):
            return {"dict": [[key, child] for key, child in zip(value, children, strict=True)]}
    return {"other": type(value).__qualname__}


def build_arguments(form: str, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rebuild the arguments of a call; raises NotFound if one was not kept, Corrupt if the form is invalid."""
    try:
        found = json.loads(form)
        values = [_decode(node, tensors) for node in found["values"]]
        return unpack_kwargs(values, found["keys"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, NotFound):
            raise
        raise Corrupt(f"{_UNKNOWN.sub('?', form)[:80]!r} is not a valid form of arguments: {error!r}") from error


def _decode(node: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    ((kind, value),) = node.items()
    if kind == "tensor":
        if value not in tensors:
            raise NotFound(f"argument {value} is a tensor that was not kept; record inputs at level 'full'")
        return tensors[value]
    if kind == "plain":
        return value
    if kind == "tuple":
        return tuple(_decode(child, tensors) for child in value)
    if kind == "list":
        return [_decode(child, tensors) for child in value]
    if kind == "dict":
        return {key: _decode(child, tensors) for key, child in value}
    raise NotFound(f"an argument of class {str(value)[:80]} cannot be recorded; call the module yourself with one")
