"""Compiler settings are part of the key if they can change compiled code, and user code in them is, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import torch._native.registry as native_registry
import torch.compiler.config as compiler_config
from torch.fx import Graph

from holdfast.compile_cache.key.settings import describe_config, describe_flags
from holdfast.compile_cache.key_parts import GraphKey, Uncacheable
from tests.kit.graph_keys import record_keys

# Any: much of torch has no types.
_CONFIG: Any = inductor_config
_DYNAMO: Any = dynamo_config
_COMPILER: Any = compiler_config
_native: Any = native_registry


class _Pass:
    def __init__(self, uuid: str | None) -> None:
        self._uuid = uuid

    def __call__(self, graph: Graph) -> None:
        pass

    def uuid(self) -> str | None:
        return self._uuid


def test_a_user_pass_is_identified_by_its_uuid() -> None:
    def key(uuid: str | None) -> GraphKey | str:
        with _CONFIG.patch(post_grad_custom_pre_pass=_Pass(uuid)):
            return record_keys(torch.sin, torch.ones(4))[0]

    one, same, other, none = key("a"), key("a"), key("b"), key(None)

    assert isinstance(one, GraphKey) and isinstance(same, GraphKey) and isinstance(other, GraphKey)  # noqa: PT018 - for the types
    assert one.digest == same.digest != other.digest
    assert str(none).startswith(f"the compiler setting post_grad_custom_pre_pass is a {__name__}._Pass, whose code")


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (_CONFIG, "trace.provenance_tracking_to_timeline", True),
        (_CONFIG, "numerics", "strict"),
        (_COMPILER, "compile_on_one_rank", True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_newer_versions_have_is_part_of_the_key(module: Any, name: str, value: object) -> None:
    if name not in module.get_config_copy():
        pytest.skip(f"this torch has no setting {name}")
    usual = describe_config()

    with module.patch({name: value}):
        assert describe_config() != usual


@pytest.mark.parametrize(("name", "value"), [("compile_worker_mode", "thread"), ("compile_threads", 3)])
def test_settings_of_compile_workers_do_not_change_the_key(name: str, value: object) -> None:
    if name not in _CONFIG.get_config_copy():
        pytest.skip(f"this torch has no setting {name}")
    usual = describe_config()

    with _CONFIG.patch({name: value}):
        assert describe_config() == usual


def test_fakes_that_come_from_a_profile_have_no_digest() -> None:
    with _DYNAMO.patch(_custom_ops_profile=object()), pytest.raises(Uncacheable, match="_custom_ops_profile"):
        describe_config()


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
