"""The cache reads the guards that each supported torch writes."""

from __future__ import annotations

import pytest

from holdfast.compile_cache.bundle.compiler import COMPILERS
from tests.kit.graph_guards import write_guards
from tests.kit.torch_versions import only_with_torch

NAMES = {"2.13": ("max", "min"), "2.15": ("torch.sym_max", "torch.sym_min")}
WITH_TORCH = [pytest.param(version, marks=only_with_torch(version)) for version in NAMES]


@pytest.mark.parametrize("version", NAMES)
def test_a_maximum_and_a_minimum_are_plain_guards(version: str) -> None:
    guards = COMPILERS[version].guards

    assert [guards.is_plain(f"{name}(5, L['t0']) < 9") for name in NAMES[version]] == [True, True]


@pytest.mark.parametrize("version", WITH_TORCH)
def test_torch_writes_a_maximum_and_a_minimum_with_these_names(version: str) -> None:
    guards, _ = write_guards(COMPILERS[version])

    assert [f"{name}(" in guards for name in NAMES[version]] == [True, True], guards


@pytest.mark.parametrize("version", WITH_TORCH)
def test_the_guards_that_torch_writes_can_be_evaluated(version: str) -> None:
    guards, holds = write_guards(COMPILERS[version])

    assert holds, guards
