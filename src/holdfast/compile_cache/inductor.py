"""The cache's interface to torch's compiler: compile graphs, load them, evaluate guards.

Each supported torch version has a folder, such as `torch_2_13`, whose module `compiler` implements these functions with
private names of torch. With any other version, `find_obstacle` returns the reason, and graphs are compiled without the
cache.

To support another version, add such a folder and its line in `_KNOWN`. Then check that these lists are complete for
that version: operators (`code/targets.py`), tables that user code can change (`code/torch_tables.py`), attributes of
custom operators (`key/ops.py`), settings (`key/settings.py`), annotations and in-place functions
(`key/cacheability.py`), and metadata of graphs (`key/graph.py`).
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

from holdfast.compile_cache.key_parts import GraphKey
from holdfast.errors import CompileCacheError

# Torch replaces the class of this module on import; the type stubs do not show `patch`.
patch_compiler_config: Final[Callable[..., Any]] = torch.compiler.config.patch  # type: ignore[attr-defined]

_KNOWN: Final = {"2.13": "holdfast.compile_cache.torch_2_13.compiler"}
"""Version of torch -> the module that implements this interface for it."""


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A newly compiled graph, and what another process needs to load it without compiling."""

    run: Callable[..., Any]
    graph: bytes | None
    """Forward and backward, serialised; None if they cannot be saved."""
    guards: str = ""
    """The sizes that it is valid for, as an expression; empty if it is valid for all sizes that the key allows."""
    kernels: Mapping[str, bytes] = field(default_factory=dict)
    """Digest of a kernel's source -> the shared library built from it."""
    seconds: float = 0.0
    """How long it took to compile."""
    why_not_saved: str = ""
    """Why `graph` is None; empty if the graph can be saved."""


def find_obstacle() -> str:
    """Return why the cache cannot be used with this torch, as a sentence; "" if it can."""
    version = _version()
    if version not in _KNOWN:
        known = " and ".join(_KNOWN)
        return f"the compile cache does not support torch {version}, only {known}; graphs are compiled but not saved"
    try:
        found: str = load_torch().find_obstacle()
    except (ImportError, AttributeError) as error:
        return f"this build of torch {version} lacks a module or name that the compile cache needs: {error}"
    return found


@functools.cache
def load_torch() -> ModuleType:
    """Import the module for this version of torch. It takes about a second, so it is imported when first needed."""
    return import_module(_KNOWN[_version()])


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the compiler settings of a mode and options, as `torch.compile` does. Raises RuntimeError."""
    # Options override the mode, as in torch.compile.
    chosen: dict[str, Any] = torch._inductor.list_mode_options(mode) if mode else {}
    given = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    unknown = sorted(given.keys() - set(torch._inductor.list_options()))
    if unknown:
        raise RuntimeError(f"unknown compiler options: {', '.join(unknown)}; see torch._inductor.list_options()")
    return {**chosen, **given}


def make_key(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any], versions: Mapping[str, str]
) -> GraphKey:
    """Return the key of a graph; raises Uncacheable. See `key/key.py`, which needs private names of torch too."""
    key: GraphKey = load_torch().make_key(graph, inputs, options=options, versions=versions)
    return key


def compile_plainly(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], *, use_caches: bool = True
) -> Callable[..., Any]:
    """Compile as `torch.compile` does, with any torch. Saves nothing, except in torch's own caches if `use_caches`."""
    compiler: Callable[..., Callable[..., Any]] = torch._inductor.compile
    if use_caches:
        return compiler(graph, list(inputs), options=dict(options))
    with patch_compiler_config(force_disable_caches=True):
        return compiler(graph, list(inputs), options=dict(options))


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any], tag: str, system: str = ""
) -> CompiledGraph:
    """Compile forward and backward so that they can be saved.

    Args:
        graph: the graph that dynamo traced; the compiler may modify it.
        inputs: the inputs that dynamo passes to the backend.
        options: compiler settings.
        tag: the digest of the graph's key. Torch's own caches then return only results compiled under the same key.
        system: digest of the machine's description. Libraries in torch's cache directory that were built for another
            system are not used.
    """
    made: CompiledGraph = load_torch().compile_graph(graph, inputs, options=options, tag=tag, system=system)
    return made


def load_graph(
    graph: bytes, kernels: Mapping[str, bytes], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return a callable for a graph that `compile_graph` serialised. Runs code from `graph`: verify it first."""
    run: Callable[..., Any] = load_torch().load_graph(graph, kernels, options or {})
    return run


def evaluate_guards(guards: str, inputs: Sequence[Any], *, install: bool = False) -> bool:
    """Return whether guards hold for the sizes among `inputs`. If `install`, also add them to dynamo's guards."""
    holds: bool = load_torch().evaluate_guards(guards, inputs, install=install)
    return holds


def make_strict_error(text: str) -> CompileCacheError:
    """Return an error that dynamo passes on to the user unchanged, not wrapped as a backend failure."""
    if _version() not in _KNOWN:
        return CompileCacheError(text)
    error: CompileCacheError = load_torch().StrictError(text)
    return error


def is_for_dynamo(error: Exception) -> bool:
    """Return whether the compiler raised this error to make dynamo trace again or skip the frame."""
    found: bool = load_torch().is_for_dynamo(error)
    return found


def _version() -> str:
    return ".".join(torch.__version__.split(".")[:2])
