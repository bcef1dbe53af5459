"""The key parts `inputs` and `aliasing`: properties of the inputs except values, and which of them share memory.

Symbolic sizes are renamed by order of appearance, because torch derives their names from variable names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import sympy  # type: ignore[import-untyped]  # it has no types, and torch's expressions are sympy's
import torch
from torch.fx import GraphModule

from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.json_text import Json

_ALIGNED_BYTES: Final = 16
"""Alignment that the compiler assumes; it generates other loads for unaligned inputs."""
_NUMBERS: Final = (int, torch.SymInt, torch.SymFloat, torch.SymBool)
_STATIC: Final = "_dynamo_static_input_type"
"""Dynamo's mark for inputs whose address does not change between calls, such as parameters."""
_KIND: Final = re.compile(r"[a-z]+")


class Symbols:
    """The symbols of one graph. Each gets a number when it first appears."""

    def __init__(self) -> None:
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}
        self._ranges: dict[str, Json] = {}

    def describe(self, value: object) -> Json:
        """Return an integer as it is, and any other value, such as a symbolic size, as text."""
        if type(value) is int:
            return value
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return repr(value)
        return self._describe_symbolic(value)

    def list_ranges(self) -> dict[str, Json]:
        """Return the range of each symbol. The compiler relies on ranges without adding guards for them."""
        return dict(self._ranges)

    def _describe_symbolic(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
        try:
            expression, shape_env = value.node.expr, value.node.shape_env
            # Symbols that first appear in the same expression are numbered by name, which can cause a miss. It is rare:
            # dynamo passes each size as a separate input, before any expression that uses it.
            for symbol in sorted(expression.free_symbols - self._names.keys(), key=str):
                self._add(symbol, shape_env)
        except AttributeError as error:
            raise Uncacheable(f"the symbolic number {value} is of an unsupported kind ({error})") from error
        # Rename before printing: terms are printed in the order of their names.
        return str(expression.xreplace(self._names))

    def _add(self, symbol: sympy.Symbol, shape_env: torch.fx.experimental.symbolic_shapes.ShapeEnv) -> None:
        kind = _KIND.match(symbol.name)
        name = f"{kind[0] if kind else 's'}{len(self._names)}"
        self._names[symbol] = sympy.Symbol(name, **symbol.assumptions0)
        bounds = shape_env.var_to_range.get(symbol)
        text = f"{bounds.lower} to {bounds.upper}" if bounds is not None else "unknown"
        self._ranges[name] = f"{text}, a size" if symbol in shape_env.size_like else text


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
