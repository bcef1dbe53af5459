"""The key part `custom_ops`: code of operators that are not part of torch, and user code that replaces torch's own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import torch
import torch._library.custom_ops as custom_ops
import torch._library.simple_registry as registry
from torch.fx import GraphModule

from holdfast.compile_cache.code.digest import digest_code
from holdfast.compile_cache.code.known import find_user_code, is_builtin, name_operator
from holdfast.compile_cache.code.torch_tables import (
    KERNELS,
    PATTERN,
    TableEntry,
    find_out_variant,
    iter_python_kernels,
    iter_registered_code,
    list_library_kernels,
    watch_libraries,
    watch_tables,
)
from holdfast.compile_cache.key_parts import UnknownCode
from holdfast.digest import hash_bytes
from holdfast.json_text import Json

_HINT: Final = 'to cache the graph, pass versions={{"{name}": "1"}} and change the version whenever the code changes'

# Attributes in which `torch.library.custom_op` keeps the functions of an operator -> names in the key.
_FUNCTIONS: Final = {
    "_init_fn": "implementation",
    "_abstract_fn": "fake",
    "_setup_context_fn": "setup_context",
    "_backward_fn": "backward",
    "_vmap_fn": "vmap",
}
_TABLES: Final = {"_backend_fns": "implementation", "_torch_dispatch_fns": "rule"}


def describe_operators(graph: GraphModule, versions: Mapping[str, str]) -> Json:
    """Return digests of the user operators that a graph may call, and of user code that replaces torch's own.

    Raises UnknownCode if some of this code has no digest and no version.
    """
    found = _Descriptions(versions)
    for name in sorted(set(_iter_operators(graph))):
        found.add_operator(name)
    found.add_replacements()
    return found.described


def _iter_operators(graph: GraphModule) -> Iterator[str]:
    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
                    yield name_operator(node.target).partition(".")[0]


class _Descriptions:
    """Collects digests or versions of user code, by operator or by what the code replaces."""

    def __init__(self, versions: Mapping[str, str]) -> None:
        self.described: dict[str, Json] = {}
        self._versions = versions

    def add_operator(self, name: str) -> None:
        """Describe a user operator and the operators that its code calls; ignores those of torch."""
        if name in self.described or not (name in self._versions or _is_user_operator(name)):
            return
        self.described[name] = None  # ends the recursion if it calls itself
        try:
            self.described[name] = self._describe_operator(name)
        except AttributeError as error:
            raise UnknownCode(
                f"the code of the operator {name} cannot be found in this version of torch ({error})"
            ) from error

    def add_replacements(self) -> None:
        """Describe user code in torch's tables. Any graph may use it: the compiler replaces operators by others."""
        for kernel in watch_libraries().list_user_code():
            name = kernel.operator.partition(".")[0]
            if name not in self._versions:
                reason = f"your code registers a kernel for {name} ({kernel.key}), and torch does not keep its code"
                raise UnknownCode(f"{reason}; {_HINT.format(name=name)}")
            self.described[f"kernel of {name} for {kernel.key}"] = {"version": self._versions[name]}
        for entry in watch_tables().list_user_code():
            self._add_entry(entry)

    def _add_entry(self, entry: TableEntry) -> None:
        name = _name_entry(entry)
        title = f"{entry.role} of {name if entry.role == PATTERN else entry.subject}"
        version = self._versions.get(name, self._versions.get(str(entry.subject)))
        if version is not None:
            self.described[title] = {"version": version}
        elif entry.role == PATTERN:
            reason = f"torch's compiler rewrites graphs with a pattern of yours ({name}), which has no digest"
            raise UnknownCode(f"{reason}; {_HINT.format(name=name)}")
        elif entry.role == KERNELS:
            self.described[title] = self._describe_kernels(entry.subject, str(entry.subject))
        else:
            self.described[title] = self._digest(entry.code, f"your {title}", name)

    def _describe_operator(self, name: str) -> Json:
        if name in self._versions:
            return {"version": self._versions[name]}
        definition = custom_ops.OPDEFS.get(name)
        found = self._describe_compiled(name) if definition is None else self._describe_definition(name, definition)
        return {**found, **self._describe_additions(name)}

    def _describe_definition(self, name: str, definition: Any) -> dict[str, Json]:
        """Return the digests of all functions of an operator defined by `torch.library.custom_op`."""
        entry = registry.singleton.get(name)
        found: dict[str, Json] = {
            "schema": definition._schema,
            "autocast": repr(sorted(definition._autocast_dtype.items())),
            "tags": sorted(map(str, definition._opoverload.tags)),
            "effect": None if entry is None else str(entry.effect.effect),
        }
        for attribute, role in _FUNCTIONS.items():
            function = getattr(definition, attribute)
            where = f"the {role} of the operator {name}"
            found[role] = None if function is None else self._digest(function, where, name)
        for attribute, role in _TABLES.items():
            for key, function in getattr(definition, attribute).items():
                where = f"the {role} for {key} of the operator {name}"
                found[f"{role} for {key}"] = self._digest(_unwrap(function), where, name)
        if definition._used_triton_kernels:
            _refuse(f"the operator {name} launches Triton kernels, whose code has no digest", name)
        if others := list_library_kernels(name, besides=definition._lib):
            _refuse(f"the operator {name} has a kernel ({others[0].key}) whose code torch does not keep", name)
        return found

    def _describe_compiled(self, name: str) -> dict[str, Json]:
        """Return the digests of all loaded libraries, any of which may contain the operator."""
        if any(defined.partition(".")[0] == name for defined in torch.library._defs):
            _refuse(f"the operator {name} was defined by torch.library.Library, which does not keep its code", name)
        if unseen := [kernel.key for kernel in list_library_kernels(name) if kernel.key != "Meta"]:
            _refuse(f"the operator {name} has Python code ({', '.join(unseen)}) that torch does not keep", name)
        libraries = sorted(map(str, torch.ops.loaded_libraries))
        if not libraries:
            _refuse(f"the operator {name} comes from a library that torch.ops.load_library did not load", name)
        return {"libraries": sorted(_hash_library(path, os.stat(path).st_mtime_ns) for path in libraries)}

    def _describe_additions(self, name: str) -> dict[str, Json]:
        """Return the digests of what was added to an operator after its definition: fakes, rules, Python kernels."""
        found: dict[str, Json] = {}
        for number, (role, function) in enumerate(iter_registered_code(name)):
            where = f"the {role} of the operator {name}"
            found[f"{role}, {number}"] = self._digest(function, where, name)
        for overload in _list_overloads(name):
            found[f"kernels of {overload}"] = self._describe_kernels(overload, f"the operator {name}")
            if (variant := find_out_variant(overload)) is not None:
                found[f"out variant of {overload}"] = name_operator(variant)
                self.add_operator(name_operator(variant).partition(".")[0])
        return found

    def _describe_kernels(self, operator: Any, owner: str) -> Json:
        name = name_operator(operator).partition(".")[0]
        return {
            key: self._digest(kernel, f"the Python kernel for {key} of {owner}", name)
            for key, kernel in iter_python_kernels(operator)
        }

    def _digest(self, function: object, where: str, name: str) -> str:
        """Return the digest of a function, and describe the operators that it may call.

        Args:
            function: the function.
            where: what the function is; the beginning of the reason if it has no digest.
            name: the name under which the user can pass a version for it.
        """
        try:
            found = digest_code(function, where=where)
        except UnknownCode as error:
            raise UnknownCode(f"{error.reason}; {_HINT.format(name=name)}") from error
        for operator in sorted(found.operators):
            self.add_operator(operator)
        return found.digest


def _refuse(reason: str, name: str) -> None:
    raise UnknownCode(f"{reason}; {_HINT.format(name=name)}")


def _is_user_operator(name: str) -> bool:
    definition = custom_ops.OPDEFS.get(name)
    home = definition._init_fn.__module__ if definition is not None else "torch"
    return not is_builtin(name) or home.partition(".")[0] != "torch"


def _name_entry(entry: TableEntry) -> str:
    """Return the name under which the user can pass a version for an entry: of the operator, or of the function."""
    if entry.role == PATTERN:
        function: Any = find_user_code(entry.code, {})
        return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    if isinstance(entry.subject, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return name_operator(entry.subject).partition(".")[0]
    return str(entry.subject)


def _list_overloads(name: str) -> list[Any]:
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short)
    return [getattr(packet, overload) for overload in packet.overloads()]


def _unwrap(function: Any) -> object:
    """Return the user's function inside the wrappers that torch has added."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells["fn"].cell_contents if function.__module__ == custom_ops.__name__ and "fn" in cells else function


@lru_cache(maxsize=64)
def _hash_library(path: str, modified_ns: int) -> str:
    """Return the digest of a file. `modified_ns` is part of the cache key, so that a changed file is read again."""
    with open(path, "rb") as file:
        return hash_bytes(file.read()).hex()
