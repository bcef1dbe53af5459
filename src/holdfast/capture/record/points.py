"""Where a model can be looked at: its modules, parameters and buffers by names that no wrapper has a part in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

from holdfast.capture.record.options import CompiledMode

_WRAPPED: Final = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_COMPILED: Final = "_orig_mod"


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A module that is looked at."""

    fqn: str
    module: torch.nn.Module
    is_compiled: bool = False
    """Its own call is compiled code, so that its hooks are part of that: only whoever calls it can look."""
    is_outside: bool = False
    """Its results are seen by what is inside of it; from outside, only its arguments are."""

    @property
    def class_name(self) -> str:
        """What the user calls it."""
        inner = self.module._modules.get(_COMPILED) or self.module
        return type(inner).__name__


@dataclass(frozen=True, slots=True)
class Points:
    """Where a model is looked at."""

    modules: tuple[Point, ...]
    parameters: dict[str, torch.nn.Parameter]
    """Tied ones have the name that comes first."""
    buffers: tuple[tuple[torch.nn.Module, str, str], ...]
    """Module, own name and full name: a buffer may be replaced."""
    boundaries: tuple[str, ...]
    """Compiled modules whose inside cannot be seen."""

    def iter_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers as they are now."""
        for module, own, name in self.buffers:
            buffer = module._buffers.get(own)
            if buffer is not None:
                yield name, buffer


def find_points(model: torch.nn.Module, *, compiled: CompiledMode) -> Points:
    """Find what can be looked at in a model; a shared module, parameter or buffer has the name that comes first."""
    walk = _Walk(compiled)
    walk.visit(model, "", is_inside=False)
    return Points(tuple(walk.modules), walk.parameters, tuple(walk.buffers), tuple(walk.boundaries))


@dataclass(slots=True)
class _Walk:
    compiled: CompiledMode
    modules: list[Point] = field(default_factory=list)
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    buffers: list[tuple[torch.nn.Module, str, str]] = field(default_factory=list)
    boundaries: list[str] = field(default_factory=list)
    _met: set[int] = field(default_factory=set)

    def visit(self, module: torch.nn.Module, fqn: str, *, is_inside: bool) -> None:
        """Take a module up and all below it; `is_inside` of compiled code nothing can be hooked."""
        if id(module) in self._met:
            return
        self._met.add(id(module))
        self._take_tensors(module, fqn)
        wrapped = _find_wrapped(module)
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

    def _take_tensors(self, module: torch.nn.Module, fqn: str) -> None:
        prefix = f"{fqn}." if fqn else ""
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in self._met:
                self._met.add(id(parameter))
                self.parameters[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._met:
                self._met.add(id(buffer))
                self.buffers.append((module, name, prefix + name))


def _find_wrapped(module: torch.nn.Module) -> str | None:
    """Return the name under which a wrapper holds what it wraps."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return "module"
    return next((name for name in (*_WRAPPED, _COMPILED) if name in module._modules), None)
