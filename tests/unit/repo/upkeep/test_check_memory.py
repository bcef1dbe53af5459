"""A check that runs out of memory says so: it does not take a sound snapshot for a damaged one."""

from __future__ import annotations

from typing import NoReturn

import pytest

from holdfast.objects.memory import MemoryStore
from holdfast.repo.format import rank_manifests
from holdfast.repo.upkeep.check import Checker
from tests.faults.scenario import FIRST, save_content
from tests.kit.hooking import Hook


def test_no_memory_for_a_manifest_is_no_finding(hook: Hook) -> None:
    store = MemoryStore()
    save_content(store, "x", FIRST)

    def fail(*_: object) -> NoReturn:
        raise MemoryError

    hook(rank_manifests, "read_manifest", fail)

    with pytest.raises(MemoryError):
        list(Checker(store).iter_findings())
