"""Why graphs of DTensor have no key: ranks with equal graphs of dynamo need different code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.compile_cache.key.key import make_key
from holdfast.compile_cache.key_parts import Uncacheable

# Torch warns of its own interfaces.
pytestmark = pytest.mark.filterwarnings("ignore")


def _take_part(x: Any) -> Any:
    return x.redistribute(x.device_mesh, [Shard(0)]).sin()


@contextmanager
def _be_rank(rank: int) -> Iterator[Any]:
    """Have a mesh of two ranks, of which this process is one and the other does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def _trace(rank: int) -> tuple[list[str], list[str], list[str]]:
    """Return, for one of two ranks, the operations of dynamo's and autograd's graphs, and why there is no key."""
    traced: list[str] = []
    compiled: list[str] = []
    reasons: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled.extend(f"{node.target} {node.args}" for node in graph.graph.nodes if node.op == "call_function")
        run: Callable[..., Any] = make_boxed_func(graph.forward)
        return run

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        traced.extend(f"{node.op} {node.target} {node.args}" for node in graph.graph.nodes)
        with pytest.raises(Uncacheable) as caught:
            make_key(graph, inputs, options={}, versions={})
        reasons.append(caught.value.reason)
        return aot_autograd(fw_compiler=compile_graph)(graph, inputs)

    torch._dynamo.reset()
    with _be_rank(rank) as mesh:
        x = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()], src_data_rank=None)
        run: Any = torch.compile(_take_part, backend=backend)
        run(x)
    return traced, compiled, reasons


@pytest.mark.slow
def test_two_ranks_have_one_graph_of_dynamo_and_two_of_autograd() -> None:
    first, second = _trace(0), _trace(1)

    assert first[0] == second[0]
    different = [(one, other) for one, other in zip(first[1], second[1], strict=True) if one != other]
    # Each rank takes its own part of a split tensor.
    assert different[0] == ("<built-in function getitem> (split, 0)", "<built-in function getitem> (split, 1)")
    assert first[2] == second[2]
    assert "is a tensor subclass (DTensor), whose code is not in the key" in first[2][0]
