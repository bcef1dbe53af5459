"""Paths of the tensors in arguments and results, and the form of the arguments around these tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch

from holdfast.errors import Corrupt, NotFound
from holdfast.json_text import Json
from holdfast.trees.kwargs import pack_kwargs, unpack_kwargs

_MAX_DEPTH: Final = 32
_PLAIN: Final = (bool, int, float, str, type(None))
_UNKNOWN: Final = re.compile(r"[\x00-\x1f]")


def list_paths(tree: object) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in arguments or results with their paths in Python syntax: "[1]", ".hidden", "['mask']"."""
    if isinstance(tree, torch.Tensor):
        return [("", tree)]
    found: list[tuple[str, torch.Tensor]] = []
    _add_paths(tree, "", 0, found)
    return found


def _add_paths(tree: object, path: str, depth: int, found: list[tuple[str, torch.Tensor]]) -> None:
    if depth >= _MAX_DEPTH:
        return
    for own, child in _iter_children(tree):
        if isinstance(child, torch.Tensor):
            found.append((path + own, child))
        elif type(child) not in _PLAIN:
            _add_paths(child, path + own, depth + 1, found)


def _iter_children(tree: object) -> Iterator[tuple[str, object]]:
    if isinstance(tree, tuple) and (names := getattr(tree, "_fields", ())):
        yield from ((f".{name}", child) for name, child in zip(names, tree, strict=True))
    elif isinstance(tree, tuple | list):
        yield from ((f"[{index}]", child) for index, child in enumerate(tree))
    elif isinstance(tree, Mapping):
        yield from ((f"[{key!r}]", child) for key, child in tree.items())
    elif is_dataclass(tree) and not isinstance(tree, type | torch.nn.Module):
        yield from ((f".{each.name}", getattr(tree, each.name, None)) for each in fields(tree))


def list_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in the arguments of a call with their paths: "[0]" by position, "['mask']" by keyword."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return [("[0]", args[0])]
    return list_paths(args) + list_paths(kwargs)


def describe_form(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the form of a call's arguments as JSON: plain values and containers, with paths in place of tensors."""
    values, keys = pack_kwargs(*args, **kwargs)
    count = len(args)
    paths = [f"[{index}]" if index < count else f"[{keys[index - count]!r}]" for index in range(len(values))]
    nodes = [_encode(value, path, 0) for value, path in zip(values, paths, strict=True)]
    return json.dumps({"keys": list(keys), "values": nodes}, separators=(",", ":"))


def _encode(value: object, path: str, depth: int) -> Json:
    if isinstance(value, torch.Tensor):
        return {"tensor": path}
    if type(value) in _PLAIN:
        return {"plain": value}
    if depth < _MAX_DEPTH:
        children = [_encode(child, path + own, depth + 1) for own, child in _iter_children(value)]
        if type(value) in (tuple, list):
            return {type(value).__name__: children}
        if type(value) is dict and all(type(key) in _PLAIN for key in value):
            return {"dict": [[key, child] for key, child in zip(value, children, strict=True)]}
    return {"other": type(value).__qualname__}


def build_arguments(form: str, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rebuild the arguments of a call; raises NotFound if one was not kept, Corrupt if the form is invalid."""
    try:
        found = json.loads(form)
        values = [_decode(node, tensors) for node in found["values"]]
        return unpack_kwargs(values, found["keys"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, NotFound):
            raise
        raise Corrupt(f"{_UNKNOWN.sub('?', form)[:80]!r} is not a valid form of arguments: {error!r}") from error


def _decode(node: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    ((kind, value),) = node.items()
    if kind == "tensor":
        if value not in tensors:
            raise NotFound(f"argument {value} is a tensor that was not kept; record inputs at level 'full'")
        return tensors[value]
    if kind == "plain":
        return value
    if kind == "tuple":
        return tuple(_decode(child, tensors) for child in value)
    if kind == "list":
        return [_decode(child, tensors) for child in value]
    if kind == "dict":
        return {key: _decode(child, tensors) for key, child in value}
    raise NotFound(f"an argument of class {str(value)[:80]} cannot be recorded; call the module yourself with one")
