"""Compiler settings are part of the key if they can change compiled code, and user code in them is, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch.fx import Graph

from holdfast.compile_cache.key.settings import describe_config
from holdfast.compile_cache.key_parts import GraphKey, Uncacheable
from tests.kit.graph_keys import record_keys

# Any: much of torch has no types.
_CONFIG: Any = inductor_config
_DYNAMO: Any = dynamo_config
_COMPILER: Any = compiler_config


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
