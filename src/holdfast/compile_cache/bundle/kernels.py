"""Reads the C++ kernels that torch builds for a graph, and supplies them when the graph is loaded.

A graph that is saved with its kernels can be loaded on a machine without a C++ compiler.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol

from blake3 import blake3
from torch._inductor.codecache import CppCodeCache
from torch._inductor.runtime.cache_dir_utils import cache_dir

from holdfast.compile_cache.artifacts.trust import as_private_file

LOAD_PARAMETERS: Final = (
    "main_code",
    "device_type",
    "submit_fn",
    "extra_flags",
    "optimized_code",
    "needs_vec_isa",
    "kernel_needs_vec_isa",
)
"""The parameters of `CppCodeCache.load_async`, through which torch loads every C++ kernel."""

_DEFAULTS: Final[dict[str, Any]] = {
    "device_type": "cpu",
    "submit_fn": None,
    "extra_flags": (),
    "optimized_code": None,
    "needs_vec_isa": None,
    "kernel_needs_vec_isa": None,
}

LoadKernel = Callable[[], Any]


class _KernelLoader(Protocol):
    """Loads kernels in place of torch while one graph is compiled or loaded."""

    def load(self, owner: Any, source: _KernelSource, original: Callable[..., LoadKernel]) -> LoadKernel:
        """Return a function that loads the kernel: that of `original`, or an equivalent one."""


class _KernelSource:
    """The arguments with which torch loads a kernel."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Parse the arguments of a call of `CppCodeCache.load_async`."""
        arguments = {**_DEFAULTS, **dict(zip(LOAD_PARAMETERS, args, strict=False)), **kwargs}
        self.main_code: str = arguments.pop("main_code")
        self.submit_fn: Any = arguments.pop("submit_fn")
        self.rest = {name: arguments[name] for name in LOAD_PARAMETERS if name in arguments}

    def name(self, owner: Any) -> str:
        """Return the digest of what determines the library. The machine's flags are in the graph's key instead."""
        facts = [owner.__name__, self.main_code, *self.rest.values()]
        return blake3(json.dumps(facts, default=list).encode()).hexdigest()


_active: ContextVar[_KernelLoader | None] = ContextVar("holdfast_kernels", default=None)


class _Hook(classmethod):  # type: ignore[type-arg]  # classmethod is generic only in the stubs
    """Marks the method with which `_install` replaced that of torch."""


def _install() -> None:
    original = CppCodeCache.__dict__["load_async"]
    if isinstance(original, _Hook):
        return

    @functools.wraps(original.__func__)
    def load_async(cls: Any, *args: Any, **kwargs: Any) -> LoadKernel:
        plain: Callable[..., LoadKernel] = functools.partial(original.__func__, cls)
        kernels = _active.get()
        if kernels is None:
            return plain(*args, **kwargs)
        return kernels.load(cls, _KernelSource(args, kwargs), plain)

    setattr(CppCodeCache, original.__func__.__name__, _Hook(load_async))


@contextmanager
def _intercepting(kernels: _KernelLoader) -> Iterator[None]:
    _install()
    token = _active.set(kernels)
    try:
        yield
    finally:
        _active.reset(token)


class RecordedKernels:
    """Loads kernels as torch does while a graph is compiled, and records them."""

    def __init__(self, system: str) -> None:
        """Keep libraries built for `system`, a digest, apart from those of other systems."""
        self._system = system
        self._kernels: dict[str, tuple[_KernelSource, LoadKernel, bool]] = {}

    def load(self, owner: Any, source: _KernelSource, original: Callable[..., LoadKernel]) -> LoadKernel:
        """Load a kernel as torch does, and record it."""
        # Torch names a library by its source and flags, and -march=native means something else on another machine. The
        # extra line gives each system its own library if machines share torch's cache directory.
        code = f"{source.main_code}\n// built for {self._system}\n" if self._system else source.main_code
        load = original(code, submit_fn=source.submit_fn, **source.rest)
        self._kernels[source.name(owner)] = source, load, owner is CppCodeCache
        return load

    def read(self, text: str) -> dict[str, bytes]:
        """Return the libraries that the generated code `text` uses. Autotuning also loads others."""
        used = {
            name: load
            for name, (source, load, may_be_unused) in self._kernels.items()
            if not may_be_unused or source.main_code.strip() in text
        }
        return {name: _read_library(load()) for name, load in used.items()}


def _read_library(library: Any) -> bytes:
    path = getattr(library, "__file__", None) or library._name
    with open(path, "rb") as file:
        return file.read()


@contextmanager
def record_kernels(system: str) -> Iterator[RecordedKernels]:
    """Record the kernels that are loaded inside the `with` block."""
    recorded = RecordedKernels(system)
    with _intercepting(recorded):
        yield recorded


class _SuppliedKernels:
    def __init__(self, kernels: Mapping[str, bytes]) -> None:
        self._kernels = kernels

    def load(self, owner: Any, source: _KernelSource, original: Callable[..., LoadKernel]) -> LoadKernel:
        data = self._kernels.get(source.name(owner))
        if data is None:
            return original(source.main_code, submit_fn=source.submit_fn, **source.rest)
        library = _load_library(owner, data)
        return lambda: library


@contextmanager
def supply_kernels(kernels: Mapping[str, bytes]) -> Iterator[None]:
    """Load kernels from `kernels` inside the `with` block; build only those that it lacks."""
    with _intercepting(_SuppliedKernels(kernels)):
        yield


def _load_library(owner: Any, data: bytes) -> Any:
    try:
        return _load_in(owner, data, None)
    except (ImportError, OSError):
        # The temporary directory may be mounted noexec; torch's cache directory is usually elsewhere.
        os.makedirs(cache_dir(), exist_ok=True)
        return _load_in(owner, data, cache_dir())


def _load_in(owner: Any, data: bytes, parent: str | None) -> Any:
    # Named by its bytes, since two libraries built from one source are different modules.
    name = blake3(data).hexdigest()
    with as_private_file(data, f"{name}.so", parent) as path:
        return owner._load_library(path, name)


class _NamedKernels:
    def __init__(self) -> None:
        self.names: list[str] = []

    def load(self, owner: Any, source: _KernelSource, original: Callable[..., LoadKernel]) -> LoadKernel:
        self.names.append(source.name(owner))
        return lambda: None


@contextmanager
def name_kernels() -> Iterator[list[str]]:
    """Yield a list of the names of the kernels that torch would load inside the `with` block. None is loaded."""
    named = _NamedKernels()
    with _intercepting(named):
        yield named.names
