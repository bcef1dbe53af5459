"""Changes of torch's global settings, which decide what torch's compiler makes of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.integration.compile_cache.changes import Change, Compile


def _mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v) * 2


def _attend(compile_: Compile) -> list[Tensor]:
    q, k, v = (torch.linspace(-3, 3, 2 * 4 * 33 * 16).sin().reshape(2, 4, 33, 16).bfloat16() * n for n in (1, 2, 3))
    return [compile_(_mix)(q, k, v)]


def _under(settings: dict[str, tuple[str, Any]], program: Callable[[Compile], list[Tensor]]) -> Any:
    """Return the program under settings of `torch._C`, by the name of the setter: the getter and the value."""

    def run(compile_: Compile) -> list[Tensor]:
        usual = {setter: getattr(torch._C, getter)() for setter, (getter, _) in settings.items()}
        for setter, (_, value) in settings.items():
            getattr(torch._C, setter)(value)
        try:
            return program(compile_)
        finally:
            for setter, value in usual.items():
                getattr(torch._C, setter)(value)

    return run


_WITHOUT_FLASH: Final = {"_set_sdp_use_flash": ("_get_flash_sdp_enabled", False)}
_REDUCED: Final = {"_set_math_sdp_allow_fp16_bf16_reduction": ("_get_math_sdp_allow_fp16_bf16_reduction", True)}

SETTING_CHANGES: Final = (
    Change(
        "attention: sums in bfloat16",
        _under(_WITHOUT_FLASH, _attend),
        _under({**_WITHOUT_FLASH, **_REDUCED}, _attend),
    ),
    Change("attention: without flash", _attend, _under(_WITHOUT_FLASH, _attend)),
)
