"""The modules, parameters and buffers of a model that can be recorded, by names without wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from holdfast.capture.record.options import CompiledMode

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
