"""The cache's interface to torch's compiler: compile graphs, load them, evaluate guards.

Each supported version of torch has a compiler in `bundle/compiler.py`, which implements this interface with private
names of torch. With any other version, `find_obstacle` returns the reason, and graphs are compiled without the cache.
So this module must not use private names of torch that other versions lack.

To support another version, add it to `_KNOWN` and to `COMPILERS` there. Then run the tests with that version.
`test_inductor_review.py` reports names of torch that nobody has reviewed. Check for each of them whether it belongs in
one of these lists: operators (`code/known.py`), tables that user code can change (`code/torch_tables.py`),
attributes of custom operators (`key/ops.py`), settings (`key/settings.py`), annotations, in-place functions
and metadata of graphs (`key/graph.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, Protocol

import torch
import torch._inductor
import torch._inductor.config as inductor_config

from holdfast.compile_cache.key_parts import GraphKey
from holdfast.errors import CompileCacheError

_KNOWN: Final = ("2.13", "2.15")
"""Versions of torch for which this interface is implemented."""
_COMPILERS: Final = "holdfast.compile_cache.bundle.compiler"


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


class LiftedGraph(Protocol):
    """A graph whose own parameters and buffers have become its first inputs."""

    @property
    def graph(self) -> torch.fx.GraphModule:
        """The graph."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers, in the order of the inputs."""

    def bind(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that passes the tensors and its arguments to `run`, which was compiled from the graph."""


class TorchCompiler(Protocol):
    """The compiler of one version of torch. The functions of this module describe what its methods do."""

    def find_obstacle(self) -> str:
        """Return why graphs cannot be cached, as a sentence; "" if they can."""

    def lift_tensors(self, graph: torch.fx.GraphModule) -> LiftedGraph | None:
        """Return a copy of a graph with its parameters and buffers as first inputs; None if it has none."""

    def make_key(
        self,
        graph: torch.fx.GraphModule,
        inputs: Sequence[Any],
        *,
        options: Mapping[str, Any],
        versions: Mapping[str, str],
    ) -> GraphKey:
        """Return the key of a graph; raises Uncacheable."""

    def compile_graph(
        self,
        graph: torch.fx.GraphModule,
        inputs: Sequence[Any],
        *,
        options: Mapping[str, Any],
        tag: str,
        system: str,
    ) -> CompiledGraph:
        """Compile forward and backward so that they can be saved."""

    def load_graph(self, graph: bytes, kernels: Mapping[str, bytes], options: Mapping[str, Any]) -> Callable[..., Any]:
        """Return a callable for a graph that `compile_graph` serialised."""

    def evaluate_guards(self, guards: str, inputs: Sequence[Any], *, install: bool) -> bool:
        """Return whether guards hold for the sizes among `inputs`."""

    def is_for_dynamo(self, error: Exception) -> bool:
        """Return whether the compiler raised this error so that dynamo traces again, breaks the graph or skips it."""


def find_unsupported() -> str:
    """Return that the cache does not support this version of torch, as a sentence; "" if it does. Imports nothing."""
    version = _version()
    if version in _KNOWN:
        return ""
    known = " and ".join(_KNOWN)
    return f"the compile cache does not support torch {version}, only {known}; graphs are compiled but not saved"


def find_obstacle() -> str:
    """Return why the cache cannot be used with this torch, as a sentence; "" if it can."""
    unsupported = find_unsupported()
    if unsupported:
        return unsupported
    try:
        return load_torch().find_obstacle()
    except (ImportError, AttributeError) as error:
        return f"this build of torch {_version()} lacks a module or name that the compile cache needs: {error}"


@functools.cache
def load_torch() -> TorchCompiler:
    """Return the compiler for this version of torch. Its import takes about a second, so it waits for the first use."""
    compiler: TorchCompiler = import_module(_COMPILERS).COMPILERS[_version()]
    return compiler


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the compiler settings of a mode and options, as `torch.compile` does. Raises RuntimeError."""
    # Options override the mode, as in torch.compile.
    chosen: dict[str, Any] = torch._inductor.list_mode_options(mode) if mode else {}
    given = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    unknown = sorted(given.keys() - set(torch._inductor.list_options()))
    if unknown:
        raise RuntimeError(f"unknown compiler options: {', '.join(unknown)}; see torch._inductor.list_options()")
    return {**chosen, **given}


def lift_tensors(graph: torch.fx.GraphModule) -> LiftedGraph | None:
    """Return a copy of a graph with its parameters and buffers as first inputs; None if it has none."""
    return load_torch().lift_tensors(graph)


def make_key(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any], versions: Mapping[str, str]
) -> GraphKey:
    """Return the key of a graph; raises Uncacheable. See `key/key.py`, which needs private names of torch too."""
    return load_torch().make_key(graph, inputs, options=options, versions=versions)


def compile_plainly(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], *, use_caches: bool = True
) -> Callable[..., Any]:
    """Compile as `torch.compile` does, with any torch. Saves nothing, except in torch's own caches if `use_caches`."""
    compiler: Callable[..., Callable[..., Any]] = torch._inductor.compile
    if use_caches:
        return compiler(graph, list(inputs), options=dict(options))
    # Versions that also have this setting in torch.compiler.config treat the two as one.
    with inductor_config.patch(force_disable_caches=True):
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
    return load_torch().compile_graph(graph, inputs, options=options, tag=tag, system=system)


def load_graph(
    graph: bytes, kernels: Mapping[str, bytes], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return a callable for a graph that `compile_graph` serialised. Runs code from `graph`: verify it first."""
    return load_torch().load_graph(graph, kernels, options or {})


def evaluate_guards(guards: str, inputs: Sequence[Any], *, install: bool = False) -> bool:
    """Return whether guards hold for the sizes among `inputs`. If `install`, also add them to dynamo's guards."""
    return load_torch().evaluate_guards(guards, inputs, install=install)


def make_strict_error(text: str) -> CompileCacheError:
    """Return an error that dynamo passes on to the user unchanged, not wrapped as a failure of the backend."""
    return _find_strict_error()(text)


@functools.cache
def _find_strict_error() -> Callable[[str], CompileCacheError]:
    """Return a class of errors that dynamo does not wrap, if this torch has one. Imports dynamo."""
    passed_on: Any = getattr(import_module("torch._dynamo.exc"), "ShortenTraceback", None)
    if passed_on is None:
        return CompileCacheError

    class StrictError(CompileCacheError, passed_on):  # type: ignore[misc]  # a class that is known only at run time
        def __init__(self, text: str) -> None:
            passed_on.__init__(self, text, first_useful_frame=None)

    return StrictError


def is_for_dynamo(error: Exception) -> bool:
    """Return whether the compiler raised this error so that dynamo traces again, breaks the graph or skips it."""
    return load_torch().is_for_dynamo(error)


def describe_error(error: Exception) -> str:
    """Return the type of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _version() -> str:
    return ".".join(torch.__version__.split(".")[:2])
