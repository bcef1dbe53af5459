"""Torch's compiler as the cache sees it: compile and keep, load, check guards; what is private of it lies behind here.

Each version of torch that is known has a module of its own with the names that it takes. Other versions are an
obstacle, and whoever meets one compiles as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch
import torch._inductor
import torch.compiler.config

from holdfast.errors import CompileCacheError

# Torch makes a class of the module when it is imported, which its types do not tell.
_patch_compiler: Final[Callable[..., Any]] = torch.compiler.config.patch  # type: ignore[attr-defined]

_KNOWN: Final = {"2.13": "holdfast.compile_cache.torch_2_13.compiler"}


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A graph that was compiled just now, and what another process needs to have it without compiling."""

    run: Callable[..., Any]
    graph: bytes | None
    """Forward and backward, or None if they cannot be kept."""
    guards: str = ""
    """On which sizes it holds; empty if on all that the key allows."""
    kernels: Mapping[str, bytes] = field(default_factory=dict)
    """Shared libraries, by the digest of the source that they were built from."""
    seconds: float = 0.0
    why_not: str = ""
    """Why it cannot be kept."""


def find_obstacle() -> str:
    """Return why graphs of this torch cannot be kept, as a sentence, or nothing."""
    version = _version()
    if version not in _KNOWN:
        known = " and ".join(_KNOWN)
        return f"torch {version} is not known to the compile cache ({known} is); graphs are compiled and not kept"
    try:
        found: str = load_torch().find_obstacle()
    except ImportError as error:
        return f"torch {version} lacks what the compile cache needs of it: {error}"
    return found


@functools.cache
def load_torch() -> ModuleType:
    """Import what is private of this torch: a second's work, so not before it is needed."""
    return import_module(_KNOWN[_version()])


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the compiler's settings that `torch.compile` makes of a mode and options; raises RuntimeError."""
    # The mode decides first, as in torch.compile.
    chosen: dict[str, Any] = torch._inductor.list_mode_options(mode) if mode else {}
    given = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    unknown = sorted(given.keys() - set(torch._inductor.list_options()))
    if unknown:
        raise RuntimeError(f"unknown options of the compiler: {', '.join(unknown)}; see torch._inductor.list_options()")
    return {**chosen, **given}


def compile_plainly(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], *, use_caches: bool = True
) -> Callable[..., Any]:
    """Compile as `torch.compile` does, with any torch; nothing is kept, but by torch's own caches if `use_caches`."""
    compiler: Callable[..., Callable[..., Any]] = torch._inductor.compile
    if use_caches:
        return compiler(graph, list(inputs), options=dict(options))
    with _patch_compiler(force_disable_caches=True):
        return compiler(graph, list(inputs), options=dict(options))


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any], tag: str, system: str = ""
) -> CompiledGraph:
    """Compile forward and backward so that they can be kept.

    Args:
        graph: what dynamo traced; it may be changed.
        inputs: as dynamo gives them.
        options: settings of the compiler.
        tag: the key of the graph; torch's own caches serve nothing under it that was made under another.
        system: what the machine is like; libraries built on another are not taken from torch's directory.
    """
    made: CompiledGraph = load_torch().compile_graph(graph, inputs, options=options, tag=tag, system=system)
    return made


def load_graph(
    graph: bytes, kernels: Mapping[str, bytes], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return what `compile_graph` has kept as something to run. This runs code from `graph`: verify it before."""
    run: Callable[..., Any] = load_torch().load_graph(graph, kernels, options or {})
    return run


def hold(guards: str, inputs: Sequence[Any], *, install: bool = False) -> bool:
    """Tell whether guards hold for the sizes among `inputs`, and have dynamo guard on them if `install`."""
    held: bool = load_torch().hold(guards, inputs, install=install)
    return held


def make_error(text: str) -> CompileCacheError:
    """Return an error that reaches the user as it is, and not as a failure of the backend."""
    if _version() not in _KNOWN:
        return CompileCacheError(text)
    error: CompileCacheError = load_torch().Refusal(text)
    return error


def is_for_dynamo(error: Exception) -> bool:
    """Tell whether an error is how the compiler asks dynamo to trace again, or to leave the frame alone."""
    asked: bool = load_torch().is_for_dynamo(error)
    return asked


def _version() -> str:
    return ".".join(torch.__version__.split(".")[:2])
