"""Compiler settings that contain user code are part of the key."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch.fx import Graph

from holdfast.compile_cache.key_parts import GraphKey
from tests.kit.graph_keys import record_keys

# Any: much of torch has no types.
_CONFIG: Any = inductor_config


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
