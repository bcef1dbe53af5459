"""The text of a graph contains the policies of checkpoints, the names of numpy functions, and marks for hooks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from holdfast.compile_cache.key.graph import GraphText
from holdfast.compile_cache.key.inputs import Symbols
from tests.kit.graph_keys import key_of, reason_of

_make_policy: Any = create_selective_checkpoint_contexts
_SIN: Any = torch.ops.aten.sin.default
_COS: Any = torch.ops.aten.cos.default


def policy_of(operator: Any) -> Any:
    return functools.partial(_make_policy, [operator])


def policy_by_environment(cache_hash: str | None = None) -> Any:
    """Return a policy whose code cannot be followed."""

    def policy() -> Any:
        return _make_policy([_SIN] if os.environ.get("SAVE_SIN") else [])

    if cache_hash is not None:
        policy.cache_hash = cache_hash  # type: ignore[attr-defined]  # torch looks for it there
    return policy


def checkpoint_by(policy: Any) -> Callable[[Tensor], Any]:
    return lambda x: checkpoint(torch.sin, x, use_reentrant=False, context_fn=policy)


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def test_a_checkpoint_policy_is_identified_by_its_code() -> None:
    one, same, other = (key_of(checkpoint_by(policy_of(operator)), leaf()) for operator in (_SIN, _SIN, _COS))

    assert one.digest == same.digest
    assert one.digests["graph"] != other.digests["graph"]


def test_a_checkpoint_policy_is_identified_by_its_cache_hash() -> None:
    one, same, other = (key_of(checkpoint_by(policy_by_environment(text)), leaf()) for text in ("a", "a", "b"))

    assert one.digest == same.digest != other.digest


def test_a_checkpoint_policy_without_a_digest_is_not_cached() -> None:
    reason = reason_of(checkpoint_by(policy_by_environment()), leaf())

    assert reason.startswith("the policy of a selective checkpoint uses os._Environ in policy_by_environment")
    assert reason.endswith("whose result may depend on something that is not in the key")


def round_by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.round(x.numpy() * 2, 1).reshape(-1))


def ceil_by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.ceil(x.numpy() * 2).reshape(-1))


def test_functions_of_numpy_are_identified_by_their_names() -> None:
    one, same, other = (key_of(each, torch.ones(3)) for each in (round_by_numpy, round_by_numpy, ceil_by_numpy))

    assert one.digest == same.digest
    assert one.digests["graph"] != other.digests["graph"]


def test_a_node_whose_gradient_has_a_hook_is_marked() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.sin, (x,))
    graph.output((y,))
    for node in (x, y):
        node.meta["has_backward_hook"] = True

    text = GraphText(torch.fx.GraphModule({}, graph), symbols=Symbols(), versions={})

    assert text.lines == ["in0  # hooked", "%0 = torch.sin(in0)  # hooked", "return (%0,)"]
