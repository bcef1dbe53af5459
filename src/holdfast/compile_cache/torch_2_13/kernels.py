"""C++ kernels of torch 2.13: the libraries that a compile has built are read, and given to whoever loads the graph."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol

from blake3 import blake3
from torch._inductor.codecache import CppCodeCache
from torch._inductor.runtime.cache_dir_utils import cache_dir

LOAD_PARAMETERS: Final = (
    "main_code",
    "device_type",
    "submit_fn",
    "extra_flags",
    "optimized_code",
    "needs_vec_isa",
    "kernel_needs_vec_isa",
)
"""The parameters of the one way by which torch loads C++ kernels."""

_DEFAULTS: Final[dict[str, Any]] = {
    "device_type": "cpu",
    "submit_fn": None,
    "extra_flags": (),
    "optimized_code": None,
    "needs_vec_isa": None,
    "kernel_needs_vec_isa": None,
}

Load = Callable[[], Any]


class _Kernels(Protocol):
    """Takes part in the loading of kernels, on one thread, for one graph."""

    def load(self, owner: Any, source: _Source, original: Callable[..., Load]) -> Load:
        """Return what `original` does, or something that does as well."""


class _Source:
    """A kernel as torch asks for it."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Sort out the arguments of a call."""
        given = {**_DEFAULTS, **dict(zip(LOAD_PARAMETERS, args, strict=False)), **kwargs}
        self.main_code: str = given.pop("main_code")
        self.submit_fn: Any = given.pop("submit_fn")
        self.rest = {name: given[name] for name in LOAD_PARAMETERS if name in given}

    def name(self, owner: Any) -> str:
        """Return the digest of all that decides what is built; the flags for the machine are in the graph's key."""
        facts = [owner.__name__, self.main_code, *self.rest.values()]
        return blake3(json.dumps(facts, default=list).encode()).hexdigest()


_taking_part: ContextVar[_Kernels | None] = ContextVar("holdfast_kernels", default=None)


class _Hook(classmethod):  # type: ignore[type-arg]  # a marker: it takes no part unless a graph of ours is under way
    pass


def _install() -> None:
    original = CppCodeCache.__dict__["load_async"]
    if isinstance(original, _Hook):
        return

    @functools.wraps(original.__func__)
    def load_async(cls: Any, *args: Any, **kwargs: Any) -> Load:
        plain: Callable[..., Load] = functools.partial(original.__func__, cls)
        kernels = _taking_part.get()
        if kernels is None:
            return plain(*args, **kwargs)
        return kernels.load(cls, _Source(args, kwargs), plain)

    setattr(CppCodeCache, original.__func__.__name__, _Hook(load_async))


@contextmanager
def _take_part(kernels: _Kernels) -> Iterator[None]:
    _install()
    token = _taking_part.set(kernels)
    try:
        yield
    finally:
        _taking_part.reset(token)


class Recorded:
    """The kernels of a graph that is being compiled."""

    def __init__(self, system: str) -> None:
        """Have them built for `system`, apart from those of others."""
        self._system = system
        self._kernels: dict[str, tuple[_Source, Load, bool]] = {}

    def load(self, owner: Any, source: _Source, original: Callable[..., Load]) -> Load:
        """Remember a kernel."""
        # Torch names a library by its source and its flags, among them -march=native, which is not the same everywhere:
        # in a directory that machines share, what another has built must not become ours.
        code = f"{source.main_code}\n// built for {self._system}\n" if self._system else source.main_code
        load = original(code, submit_fn=source.submit_fn, **source.rest)
        self._kernels[source.name(owner)] = source, load, owner is CppCodeCache
        return load

    def read(self, text: str) -> dict[str, bytes]:
        """Return the libraries that the code in `text` uses: autotuning has loaded more."""
        used = {
            name: load
            for name, (source, load, may_be_trial) in self._kernels.items()
            if not may_be_trial or source.main_code.strip() in text
        }
        return {name: _read_library(load()) for name, load in used.items()}


def _read_library(library: Any) -> bytes:
    path = getattr(library, "__file__", None) or library._name
    with open(path, "rb") as file:
        return file.read()


@contextmanager
def record_kernels(system: str) -> Iterator[Recorded]:
    """Remember the kernels that are built in this context."""
    recorded = Recorded(system)
    with _take_part(recorded):
        yield recorded


class _Supplied:
    def __init__(self, kernels: Mapping[str, bytes]) -> None:
        self._kernels = kernels

    def load(self, owner: Any, source: _Source, original: Callable[..., Load]) -> Load:
        data = self._kernels.get(source.name(owner))
        if data is None:
            return original(source.main_code, submit_fn=source.submit_fn, **source.rest)
        library = _load_library(owner, data)
        return lambda: library


@contextmanager
def supply_kernels(kernels: Mapping[str, bytes]) -> Iterator[None]:
    """Have kernels loaded from `kernels` in this context, and built only if they are not there."""
    with _take_part(_Supplied(kernels)):
        yield


def _load_library(owner: Any, data: bytes) -> Any:
    try:
        return _load_in(owner, data, None)
    except (ImportError, OSError):
        # Where temporary files must not be executed, torch's own directory is elsewhere.
        os.makedirs(cache_dir(), exist_ok=True)
        return _load_in(owner, data, cache_dir())


def _load_in(owner: Any, data: bytes, parent: str | None) -> Any:
    # By its bytes: two libraries of one source are two modules. The file goes at once; what is mapped stays.
    name = blake3(data).hexdigest()
    with tempfile.TemporaryDirectory(prefix="holdfast-kernels-", dir=parent) as folder:
        path = os.path.join(folder, f"{name}.so")
        with open(path, "xb") as file:
            file.write(data)
        return owner._load_library(path, name)
