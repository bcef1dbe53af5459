"""Finds kernels that Python code has registered with torch's dispatcher through `torch.library.Library`.

The dispatcher does not expose the kernels, but it reports the file in which each library object was created.
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

# Files of torch that create libraries on behalf of user code, and namespaces that only torch itself uses.
_ON_BEHALF: Final = (os.path.join("torch", "library.py"), os.path.join("torch", "_library", "custom_ops.py"))
_OWN: Final = frozenset({"_native"})
_ANY_OPERATOR: Final = "_"


class Kernel(NamedTuple):
    """A kernel, as recorded by torch.library."""

    operator: str
    """`namespace::name` or `namespace::name.overload`."""
    key: str
    """The dispatch key, such as "AutogradCPU"."""


class LibraryWatch:
    """Finds user kernels for operators of torch. Searches again only if libraries have changed."""

    def __init__(self) -> None:
        self._libraries: list[tuple[Any, int]] = []
        self._foreign: list[Kernel] = []

    def list_foreign(self) -> list[Kernel]:
        """Return the kernels for operators of torch that torch itself did not register."""
        # Compare finalizers: references to the libraries themselves would keep their kernels registered.
        libraries = [(finalizer, len(library._op_impls)) for finalizer, library in _iter_libraries()]
        if libraries != self._libraries:
            self._libraries = libraries
            self._foreign = [kernel for _, library in _iter_libraries() for kernel in _iter_foreign(library)]
        return self._foreign


@functools.cache
def watch_libraries() -> LibraryWatch:
    """Return the LibraryWatch of this process."""
    return LibraryWatch()


def list_kernels(operator_name: str, *, besides: object = None) -> list[Kernel]:
    """Return the kernels of an operator, except those that the library object `besides` registered."""
    libraries = (library for _, library in _iter_libraries() if library is not besides)
    kernels = (kernel for library in libraries for kernel in _iter_kernels(library))
    return sorted(kernel for kernel in kernels if kernel.operator.partition(".")[0] == operator_name)


def _iter_libraries() -> Iterator[tuple[Any, Any]]:
    """Yield the finalizer and the object of each library that is alive."""
    finalizers: Any = weakref.finalize
    for finalizer, info in list(finalizers._registry.items()):
        if info.func is torch.library._del_library and (library := info.weakref()) is not None:
            yield finalizer, library


def _iter_kernels(library: Any) -> Iterator[Kernel]:
    if library.m is None:
        return  # destroyed together with its kernels
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
        # All kernels of a library object are registered in the same file, so one is enough.
        if kernels and not _is_from_torch(kernels[0]):
            yield from kernels


def _is_from_torch(kernel: Kernel) -> bool:
    files = list(_iter_files(kernel))
    if any(file.endswith(_ON_BEHALF) for file in files):
        definition = custom_ops.OPDEFS.get(kernel.operator.partition(".")[0])
        return definition is not None and definition._init_fn.__module__.partition(".")[0] == "torch"
    # A Python kernel can override one of C++, whose file is a path on the machine that built torch.
    return all(is_in_torch(file) or file.endswith(".cpp") for file in files)


def _iter_files(kernel: Kernel) -> Iterator[str]:
    """Yield the files that registered kernels for an operator and dispatch key, the active kernel first."""
    dump: str = torch._C._dispatch_dump(kernel.operator)
    for line in dump.splitlines():
        head, _, location = line.partition(": registered at ")
        if location and head.split("[")[0].split(" ")[0] == kernel.key:
            yield location.partition(" :: ")[0].rpartition(":")[0]
