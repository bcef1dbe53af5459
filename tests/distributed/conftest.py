"""Worlds of ranks for tests: fresh processes for every run, forked from one that has torch loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from holdfast.testing.ranks import run_ranks
from tests.kit.patience import RUN_S

World = Callable[[int], Callable[..., list[Any]]]

# What ranks of these tests need, and would each load by itself: the first DTensor alone loads dynamo, for seconds.
_PRELOADED = (
    "pytest",
    "hypothesis",
    "torch.distributed.tensor",
    "torch._dynamo",
    "holdfast.store",
    "holdfast.distributed.checkpoint.checkpoint",
    "tests.distributed.placing",
    "tests.distributed.runs",
)


@pytest.fixture(scope="session")
def world() -> World:
    """Return what runs a function on n ranks: `world(3)(function, argument)`."""
    # The first run starts the process that all ranks are forked from; it should not count as a test's time.
    run_ranks(1, int, preload=_PRELOADED)
    return lambda size: partial(run_ranks, size, timeout_s=RUN_S)
