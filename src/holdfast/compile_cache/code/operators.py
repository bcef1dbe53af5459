"""Names of operators, and which of them are part of torch. Does not import torch's compiler."""

from __future__ import annotations

from typing import Any, Final

import torch

# Higher-order operators that their arguments and subgraphs describe completely.
HIGHER_ORDER: Final = frozenset(
    {
        "associative_scan",
        "autograd_function_apply",
        "cond",
        "flex_attention",
        "flex_attention_backward",
        "invoke_subgraph",
        "map_impl",
        "scan",
        "tag_activation_checkpoint",
        "while_loop",
    }
)

# Namespaces of operators that are part of torch, so that its version identifies their code.
BUILTIN_NAMESPACES: Final = frozenset(
    {
        "_native",
        "_quantized",
        "aten",
        "inductor",
        "inductor_prims",
        "mkl",
        "mkldnn",
        "mkldnn_prepacked",
        "onednn",
        "prim",
        "prims",
        "quantized",
        "rngprims",
        "sparse",
    }
)


def name_operator(target: Any) -> str:  # Any: torch does not type these methods
    """Return an operator's name, `namespace::name` or with an overload `namespace::name.overload`."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return str(target.name())


def is_builtin(operator_name: str) -> bool:
    """Return whether an operator, `namespace::name`, is part of torch."""
    return operator_name.partition("::")[0] in BUILTIN_NAMESPACES
