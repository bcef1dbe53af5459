"""The cache reads the guards that torch 2.15 writes."""

from __future__ import annotations

from holdfast.compile_cache.torch_2_15 import COMPILER
from tests.kit.graph_guards import write_guards
from tests.kit.torch_versions import only_with_torch

NAMES = ("torch.sym_max", "torch.sym_min")


def test_a_maximum_and_a_minimum_are_plain_guards() -> None:
    assert [COMPILER.guards.is_plain(f"{name}(5, L['t0']) < 9") for name in NAMES] == [True, True]


@only_with_torch("2.15")
def test_torch_writes_a_maximum_and_a_minimum_with_these_names() -> None:
    guards, _ = write_guards(COMPILER)

    assert [f"{name}(" in guards for name in NAMES] == [True, True], guards


@only_with_torch("2.15")
def test_the_guards_that_torch_writes_can_be_evaluated() -> None:
    guards, holds = write_guards(COMPILER)

    assert holds, guards
