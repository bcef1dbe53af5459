"""Global state of torch that changes what a call does is part of the key."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch._native.registry as native_registry

from holdfast.compile_cache.key import flags
from holdfast.compile_cache.key.flags import describe_flags

_native: Any = native_registry

# Setters whose names differ from those of their getters.
_SETTERS: Final = {f"_get_{kind}_sdp_enabled": f"_set_sdp_use_{kind}" for kind in ("cudnn", "flash", "math")} | {
    "_get_fa3_sdp_enabled": "_set_sdp_use_fa3",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_overrideable_sdp_enabled": "_set_sdp_use_overrideable",
}
# State without a setter for every value, or that a build for CPU cannot set.
_OTHERS: Final = {
    "_get_cublas_allow_bf16_reduced_precision_reduction": (False, False),
    "_get_cublas_allow_fp16_reduced_precision_reduction": (False, False),
    "_get_float32_matmul_precision": "high",
    "_get_sdp_priority_order": [2, 1, 0, 3, 4],
}


@pytest.mark.parametrize("name", flags.STATE)
def test_every_state_of_torch_that_can_be_set_changes_the_key(name: str) -> None:
    usual = getattr(torch._C, name, lambda: None)()
    if type(usual) is not bool and name not in _OTHERS:
        return  # this version does not have it, or it is a choice of libraries for other devices
    other = _OTHERS.get(name, not usual)
    setter = getattr(torch._C, _SETTERS.get(name, name.replace("_get_", "_set_").replace("_is_", "_set_")))

    def change(value: Any) -> None:
        setter(*value) if type(value) is tuple else setter(value)

    before = describe_flags(())
    try:
        change(other)
        changed = describe_flags(())
    except RuntimeError:
        pytest.skip("this processor does not support the other value")
    finally:
        change(usual)

    assert changed != before


def test_kernels_in_python_that_are_disabled_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    usual: Any = describe_flags(())

    # As torch.backends.python_native.disable_operations does, which also registers kernels again, with a warning.
    monkeypatch.setattr(_native._filter_state, "_op_symbols", {"_foreach_mm"})

    disabled: Any = describe_flags(())
    assert disabled["backends"]["native"]["disabled"]["_op_symbols"] == ["_foreach_mm"]
    assert usual["backends"]["native"]["disabled"]["_op_symbols"] == []


def test_the_current_gpu_is_part_of_the_key_of_a_graph_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    # A graph that creates a tensor on "cuda" is compiled for the GPU that is the current one.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def describe(device: int, *kinds: str) -> Any:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
        return describe_flags(kinds)

    assert describe(0, "cuda") != describe(1, "cuda")
    assert describe(0, "cpu") == describe(1, "cpu")
