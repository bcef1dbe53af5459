"""The key parts `inputs` and `aliasing`: properties of the inputs except values, and which of them share memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule

from holdfast.compile_cache.key.symbols import Symbols
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.json_text import Json

_ALIGNED_BYTES: Final = 16
"""Alignment that the compiler assumes; it generates other loads for unaligned inputs."""
_NUMBERS: Final = (int, torch.SymInt, torch.SymFloat, torch.SymBool)
_STATIC: Final = "_dynamo_static_input_type"
"""Dynamo's mark for inputs whose address does not change between calls, such as parameters."""


def describe_inputs(graph: GraphModule, inputs: Sequence[object], symbols: Symbols) -> Json:
    """Return a row for each input, in order, and the ranges of their symbols.

    Sizes come from dynamo's fake tensors: those of the real inputs are numbers where the graph has symbols.
    """
    rows = [
        _describe_input(value, node.meta, symbols, number)
        for number, (node, value) in enumerate(zip(_placeholders(graph), inputs, strict=True))
    ]
    return {"inputs": rows, "symbols": symbols.list_ranges()}


def describe_aliasing(inputs: Sequence[object]) -> Json:
    """Return groups of inputs that share a storage, as [index, offset in bytes from the lowest of the group]."""
    groups = []
    for numbers in find_shared(inputs):
        starts = {number: _start_bytes(inputs[number]) for number in numbers}
        first = min(starts.values())
        groups.append([[number, start - first] for number, start in starts.items()])
    return groups


def find_shared(inputs: Sequence[object]) -> list[list[int]]:
    """Return the indices of inputs that share a storage, in groups of two or more."""
    groups: dict[tuple[str, int], list[int]] = {}
    for number, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            storage = value.untyped_storage()
            # By address, or by the storage object if it has no address (meta device). Empty storages share nothing.
            address = storage.data_ptr() or (storage._cdata if storage.nbytes() else 0)
            if address:
                groups.setdefault((str(value.device), address), []).append(number)
    return [numbers for numbers in groups.values() if len(numbers) > 1]


def may_share(inputs: Sequence[object]) -> bool:
    """Return whether some inputs share a storage, or are of a kind that does not show it."""
    try:
        return bool(find_shared(inputs))
    except Exception:  # noqa: BLE001 - tensor subclasses, and tensors without a storage, can raise anything
        return True


def list_fakes(graph: GraphModule) -> list[object]:
    """Return the fake tensor or symbol with which dynamo traced each input."""
    return [node.meta.get("example_value") for node in _placeholders(graph)]


def _placeholders(graph: GraphModule) -> Iterator[torch.fx.Node]:
    return (node for node in graph.graph.nodes if node.op == "placeholder")


def _describe_input(value: object, meta: dict[str, Any], symbols: Symbols, number: int) -> Json:
    fake = meta.get("example_value")
    if isinstance(value, torch.Tensor):
        if not isinstance(fake, torch.Tensor):
            raise Uncacheable(
                f"input {number} was not traced by dynamo, so it is not known which of its sizes may change"
            )
        return _describe_tensor(value, fake, meta, symbols)
    if isinstance(value, _NUMBERS) and not isinstance(value, bool):
        return {"number": symbols.describe(value if fake is None else fake)}
    raise Uncacheable(f"input {number} is a {type(value).__qualname__}, neither a tensor nor a number")


def _describe_tensor(value: torch.Tensor, fake: torch.Tensor, meta: dict[str, Any], symbols: Symbols) -> Json:
    row: dict[str, Json] = {
        "dtype": str(value.dtype),
        "device": str(value.device),
        "size": [symbols.describe(each) for each in fake.shape],
        "stride": [symbols.describe(each) for each in fake.stride()],
    }
    # Rare properties are listed only if they are true, because a key has hundreds of rows.
    row.update({name: True for name, is_so in _iter_rare_properties(value) if is_so})
    # The offset matters: an output that is a view of the input can be re-created by its absolute offset.
    if offset := symbols.describe(fake.storage_offset()):
        row["offset"] = offset
    if static := (meta.get("tensor_dict") or {}).get(_STATIC):
        row["static"] = str(static)
    return row


def _iter_rare_properties(value: torch.Tensor) -> Iterator[tuple[str, bool]]:
    yield "requires_grad", value.requires_grad
    yield "parameter", isinstance(value, torch.nn.Parameter)
    yield "not a leaf", not value.is_leaf
    yield "inference", value.is_inference()
    yield "conjugate", value.is_conj()
    yield "negative", value.is_neg()
    yield "unaligned", not value.is_meta and value.data_ptr() % _ALIGNED_BYTES != 0


def _start_bytes(value: Any) -> int:  # Any: `find_shared` returns only tensors
    start: int = value.storage_offset() * value.element_size()
    return start
