"""A call is stored only if all of it was traced into one graph and the description contains everything it read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.compile_cache.whole import state
from holdfast.compile_cache.whole.describe import describe_call
from holdfast.compile_cache.whole.recording import Recording, make_program, watch_bytecode

X = torch.ones(2, 4)
_seen: list[int] = []


def _record(function: Callable[..., Any], *args: Any) -> str:
    """Trace a call, and return why it cannot be stored. Nothing is compiled, so the last reason is always given."""
    torch._dynamo.reset()
    recording = Recording(function, describe_call(function, args, {}))

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        recording.note_graph(graph, inputs)
        recording.refuse("nothing is compiled")
        return graph.forward

    handle = watch_bytecode(recording)
    try:
        with torch._dynamo.config.patch(record_runtime_overhead=False):
            result = torch.compile(function, backend=backend)(*args)
    finally:
        handle.remove()
    with pytest.raises(Uncacheable) as caught:
        make_program(recording, result)
    return caught.value.reason


def _break(x: Tensor) -> Tensor:
    factor = float(x.sum().item())
    return x * factor


def _append(x: Tensor) -> Tensor:
    _seen.append(1)
    return x + 1


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * 2


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.options: dict[str, Any] = {"scale": 2.0, "names": ["a"]}

    def scaled(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.options["scale"]
        return y

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.scaled(self.linear(x)) if self.training else x}


def test_a_module_that_is_traced_completely_can_be_stored() -> None:
    assert _record(_Branching(), X) == "nothing is compiled"


def test_layers_of_torch_can_be_stored() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.Sequential(nn.Embedding(5, 4), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.GELU())

    assert _record(model, torch.ones(2, 3, dtype=torch.int64)) == "nothing is compiled"


def test_a_layer_that_changes_its_buffers_can_be_stored() -> None:
    assert _record(nn.BatchNorm1d(4), X) == "nothing is compiled"


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (_break, (X,), r"dynamo made 2 graphs from \d frames, not one graph"),
        (_append, (X,), "changes an object|calls functions"),
        (_Counting(), (X,), "changes an object|calls functions"),
        (lambda x: x, (X,), "dynamo made 0 graphs"),
    ],
    ids=["break", "list", "attribute", "nothing"],
)
def test_effects_and_graph_breaks_are_refused(function: Any, args: Sequence[Any], reason: str) -> None:
    assert re.search(reason, _record(function, *args))


def test_dynamic_sizes_are_refused() -> None:
    def scale(x: Tensor) -> Tensor:
        return x * x.shape[0]

    torch._dynamo.reset()
    recording = Recording(scale, describe_call(scale, (X,), {}))

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        recording.note_graph(graph, inputs)
        return graph.forward

    torch.compile(scale, backend=backend, dynamic=True)(X)

    assert "dynamic sizes" in recording.reason


def test_traced_code_that_the_description_lacks_is_refused() -> None:
    model = _Branching()
    described = describe_call(nn.Linear(4, 4), (X,), {})
    torch._dynamo.reset()
    recording = Recording(model, described)

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        recording.note_graph(graph, inputs)
        return graph.forward

    torch.compile(model, backend=backend)(X)

    assert recording.reason.startswith("the graph has an input that is not a tensor of the callable")


def test_traced_code_of_torch_that_is_not_in_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    monkeypatch.setattr(state, "_TRACED", state._TRACED - {"torch.backends.mha"})

    assert _record(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), torch.ones(2, 3, 4)) == (
        "dynamo has a guard on torch.backends.mha.get_fastpath_enabled, which is not in the key"
    )


def test_a_function_of_torch_that_only_user_code_reads_can_be_anywhere() -> None:
    assert "torch.fft" not in state._TRACED
    assert _record(lambda x: torch.fft.fft(x).real, X) == "nothing is compiled"


def test_a_callable_that_reads_other_modules_of_yours_can_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    rules: Any = ModuleType("described_rules")
    exec("SCALE = 2.0\ndef scale():\n    return SCALE", vars(rules))
    monkeypatch.setitem(sys.modules, "described_rules", rules)
    monkeypatch.setitem(globals(), "rules", rules)

    assert _record(_read_rules, X) == "nothing is compiled"


def _read_rules(x: Tensor) -> Tensor:
    found: Tensor = x * rules.SCALE + rules.scale()  # type: ignore[name-defined]  # noqa: F821 - set by the test
    return found
