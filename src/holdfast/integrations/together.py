"""Calls a function on all ranks, so that an error of one is an error of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.distributed.checkpoint.checkpoint import find_world


def call_together(topic: str, act: Callable[[], Any]) -> list[Any]:
    """Call `act` on all ranks and return their results, by rank; if one raises, all raise.

    All ranks must call this, with the same topic. The results must be plain values.
    """
    world = find_world()
    if world is None:
        return [act()]
    with world.join("integration", topic) as ranks:
        return ranks.all_gather(topic, act)
