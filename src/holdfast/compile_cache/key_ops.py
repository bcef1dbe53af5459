"""The code of operators that do not come with torch, found by private names of torch.library; a part of a key."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import FunctionType
from typing import Any, Final

import torch
import torch._library.custom_ops as custom_ops
import torch._library.simple_registry as registry
from torch.fx import GraphModule

from holdfast.compile_cache.code_digest import hash_code
from holdfast.compile_cache.key_targets import is_builtin, name_operator
from holdfast.compile_cache.parts import Uncacheable
from holdfast.digest import hash_bytes
from holdfast.repo.record import Json

_HINT: Final = 'if you vouch for its code, pass versions={{"{name}": "1"}} and raise that when the code changes'

# What `torch.library.custom_op` keeps of an operator's functions, and how we call it.
_FUNCTIONS: Final = {
    "_init_fn": "implementation",
    "_abstract_fn": "fake",
    "_setup_context_fn": "setup_context",
    "_backward_fn": "backward",
    "_vmap_fn": "vmap",
}
_TABLES: Final = {"_backend_fns": "implementation", "_torch_dispatch_fns": "rule"}


def describe_operators(graph: GraphModule, versions: Mapping[str, str]) -> Json:
    """Return what stands for the code of each foreign operator in a graph; raises Uncacheable if nothing does."""
    found = sorted(set(_iter_operators(graph)))
    described = {name: _describe_operator(name, versions) for name in found if name in versions or _is_foreign(name)}
    return {**described, **_describe_replacements(versions)}


def _describe_replacements(versions: Mapping[str, str]) -> dict[str, Json]:
    """Return what stands for the user's own ways of compiling operators, torch's included: any graph may use them."""
    found: dict[str, Json] = {}
    for operator, function, role in _iter_replacements():
        name = f"{role} of {operator}"
        if (version := versions.get(str(operator))) is not None:
            found[name] = {"version": version}
        else:
            found[name] = hash_code(function, where=f"your {name}")
    return found


def _iter_replacements() -> Iterator[tuple[object, object, str]]:
    """Yield operators, functions and what these are, from the tables of a compiler that has been loaded."""
    lowerings = getattr(sys.modules.get("torch._inductor.lowering"), "user_lowerings", {})
    decompositions = getattr(sys.modules.get("torch._inductor.decomposition"), "decompositions", {})
    for operator, function in lowerings.items():
        yield operator, function, "lowering"
    for operator, function in decompositions.items():
        # The table is torch's own, a thousand functions and methods of operators; those of others are few.
        if type(function) is FunctionType and not function.__module__.startswith("torch."):
            yield operator, function, "decomposition"


def _iter_operators(graph: GraphModule) -> Iterator[str]:
    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
                    yield name_operator(node.target).partition(".")[0]


def _is_foreign(name: str) -> bool:
    definition = custom_ops.OPDEFS.get(name)
    home = definition._init_fn.__module__ if definition is not None else "torch"
    return not is_builtin(name) or home.partition(".")[0] != "torch"


def _describe_operator(name: str, versions: Mapping[str, str]) -> Json:
    if name in versions:
        return {"version": versions[name]}
    try:
        if (definition := custom_ops.OPDEFS.get(name)) is not None:
            return _describe_definition(name, definition)
        return _describe_compiled(name)
    except AttributeError as error:
        raise Uncacheable(f"where this torch keeps the code of the operator {name} is not known ({error})") from error
    except Uncacheable as error:
        raise Uncacheable(f"{error.reason}; {_HINT.format(name=name)}") from error


def _describe_definition(name: str, definition: Any) -> Json:
    """Return the digests of all functions of an operator made by `torch.library.custom_op`."""
    entry = registry.singleton.get(name)
    found: dict[str, Json] = {
        "schema": definition._schema,
        "autocast": repr(sorted(definition._autocast_dtype.items())),
        "tags": sorted(map(str, definition._opoverload.tags)),
        "effect": None if entry is None else str(entry.effect.effect),
    }
    for attribute, role in _FUNCTIONS.items():
        function = getattr(definition, attribute)
        found[role] = None if function is None else hash_code(function, where=f"the {role} of the operator {name}")
    for attribute, role in _TABLES.items():
        for key, function in getattr(definition, attribute).items():
            where = f"the {role} for {key} of the operator {name}"
            found[f"{role} for {key}"] = hash_code(_unwrap(function), where=where)
    if definition._used_triton_kernels:
        raise Uncacheable(f"the operator {name} launches Triton kernels, whose code has no digest")
    return found


def _unwrap(function: Any) -> object:
    """Return the user's function below what torch has put around it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells["fn"].cell_contents if function.__module__ == custom_ops.__name__ and "fn" in cells else function


def _describe_compiled(name: str) -> Json:
    """Return the digests of the libraries that may hold an operator, and of what Python adds to it."""
    if any(defined.partition(".")[0] == name for defined in torch.library._defs):
        raise Uncacheable(f"the operator {name} was defined by torch.library.Library, which does not keep its code")
    added = {kernel.rpartition("/")[2] for kernel in torch.library._impls if _owner(kernel) == name}
    entry = registry.singleton.get(name)
    fakes = [kernel.func for kernel in entry.fake_impl.kernels] if entry is not None else []
    if unseen := added - ({"Meta"} if fakes else set()):
        raise Uncacheable(f"the operator {name} has Python code ({', '.join(sorted(unseen))}) that torch does not keep")
    libraries = sorted(map(str, torch.ops.loaded_libraries))
    if not libraries:
        raise Uncacheable(f"the operator {name} comes from a library that torch.ops.load_library did not load")
    return {
        "libraries": sorted(_hash_library(path, os.stat(path).st_mtime_ns) for path in libraries),
        "fake": [hash_code(fake, where=f"the fake of the operator {name}") for fake in fakes],
    }


def _owner(kernel: str) -> str:
    namespace, _, rest = kernel.partition("/")
    return f"{namespace}::{rest.partition('/')[0].partition('.')[0]}"


@lru_cache(maxsize=64)
def _hash_library(path: str, modified_ns: int) -> str:
    """Return the digest of a file; `modified_ns` makes another file of the same name another call."""
    with open(path, "rb") as file:
        return hash_bytes(file.read()).hex()
