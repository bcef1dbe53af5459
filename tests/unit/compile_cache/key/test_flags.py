"""Global state of torch that changes what a call does is part of the key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._native.registry as native_registry

from holdfast.compile_cache.key.flags import describe_flags

_native: Any = native_registry


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
