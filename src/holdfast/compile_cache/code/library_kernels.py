"""Kernels that Python code has registered with torch's dispatcher by `torch.library.Library`, and where that was.

The dispatcher keeps the kernels and does not show them. It tells in which file each library object was made.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
import torch._library.custom_ops as custom_ops

from holdfast.compile_cache.code.known import is_in_torch
from holdfast.compile_cache.code.targets import is_builtin

# Files of torch that make libraries for others, and namespaces of which only torch asks them for one.
_ON_BEHALF: Final = (os.path.join("torch", "library.py"), os.path.join("torch", "_library", "custom_ops.py"))
_OWN: Final = frozenset({"_native"})
_ANY_OPERATOR: Final = "_"


class Kernel(NamedTuple):
    """A kernel, as torch.library notes it."""

    operator: str
    """`namespace::name`, with an overload or without."""
    key: str
    """The dispatch key, as "AutogradCPU"."""


class LibraryWatch:
    """Finds kernels of the user's for operators that come with torch."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._held: list[tuple[Any, int]] = []
        self._foreign: list[Kernel] = []

    def list_foreign(self) -> list[Kernel]:
        """Return the kernels that were not registered by torch itself."""
        # By their finalizers: to hold the libraries themselves would keep their kernels in use.
        held = [(finalizer, len(library._op_impls)) for finalizer, library in _iter_libraries()]
        if held != self._held:
            self._held = held
            self._foreign = [kernel for _, library in _iter_libraries() for kernel in _iter_foreign(library)]
        return self._foreign


@functools.cache
def watch_libraries() -> LibraryWatch:
    """Return the watch of this process."""
    return LibraryWatch()


def list_kernels(operator_name: str, *, besides: object = None) -> list[Kernel]:
    """Return the kernels of an operator, but for those that a library object has registered."""
    libraries = (library for _, library in _iter_libraries() if library is not besides)
    kernels = (kernel for library in libraries for kernel in _iter_kernels(library))
    return sorted(kernel for kernel in kernels if kernel.operator.partition(".")[0] == operator_name)


def _iter_libraries() -> Iterator[tuple[Any, Any]]:
    """Yield the finalizers of all living library objects, and these."""
    finalizers: Any = weakref.finalize
    for finalizer, info in list(finalizers._registry.items()):
        if info.func is torch.library._del_library and (library := info.weakref()) is not None:
            yield finalizer, library


def _iter_kernels(library: Any) -> Iterator[Kernel]:
    if library.m is None:
        return  # destroyed, and its kernels with it
    if library.ns == _ANY_OPERATOR:
        yield Kernel("_::fallback", library.dispatch_key)
    for text in library._op_impls:
        namespace, name, key = text.split("/")
        yield Kernel(f"{namespace}::{name}", key or "CompositeImplicitAutograd")


def _iter_foreign(library: Any) -> Iterator[Kernel]:
    if library.ns == _ANY_OPERATOR:
        yield from _iter_kernels(library)
    elif is_builtin(f"{library.ns}::") and library.ns not in _OWN:
        kernels = sorted(_iter_kernels(library))
        # All kernels of a library object come from one place.
        if kernels and not _is_from_torch(kernels[0]):
            yield from kernels


def _is_from_torch(kernel: Kernel) -> bool:
    files = list(_iter_files(kernel))
    if any(file.endswith(_ON_BEHALF) for file in files):
        definition = custom_ops.OPDEFS.get(kernel.operator.partition(".")[0])
        return definition is not None and definition._init_fn.__module__.partition(".")[0] == "torch"
    # Below kernels of Python there may be those of C++, from files that existed where torch was built.
    return all(is_in_torch(file) or file.endswith(".cpp") for file in files)


def _iter_files(kernel: Kernel) -> Iterator[str]:
    """Yield the files in which kernels of an operator for a key were registered, the one in use first."""
    dump: str = torch._C._dispatch_dump(kernel.operator)
    for line in dump.splitlines():
        head, _, place = line.partition(": registered at ")
        if place and head.split("[")[0].split(" ")[0] == kernel.key:
            yield place.partition(" :: ")[0].rpartition(":")[0]
