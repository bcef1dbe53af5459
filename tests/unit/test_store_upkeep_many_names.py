"""What concerns all names takes operations in proportion to their number, and what concerns one does not grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Final

import pytest

from holdfast.objects.memory import MemoryStore
from holdfast.store import Store
from tests.faults.hooked_store import HookedStore
from tests.kit.saving import new_repo, noise, save_bytes

FEW: Final = 40
Act = Callable[[Store], object]

OF_ALL: Final[dict[str, Act]] = {
    "list": lambda store: store.snapshots(),
    "list a prefix": lambda store: store.snapshots("run1/"),
    "latest": lambda store: store.latest(),
    "best": lambda store: store.best("", "loss"),
    "plan of prune": lambda store: store.plan_prune(keep_last=3),
    "gc": lambda store: store.gc(),
    "check": lambda store: store.check(),
    "tags": lambda store: store.tags(),
}
OF_ONE: Final[dict[str, Act]] = {
    "read": lambda store: store["run1/step-1"].digest,
    "tag": lambda store: store.tag("best", "run1/step-1"),
    "save": lambda store: store.save("run1/step-1000", {"a": 1}),
    "delete": lambda store: store.delete("run1/step-1"),
}


@cache
def count_operations(title: str, names: int) -> Counter[str]:
    """Return the operations on a store of so many snapshots, in a store that nothing is known of yet."""
    inner, counted = MemoryStore(), Counter[str]()
    repo = new_repo(inner)
    for step in range(names):
        save_bytes(repo, f"run{step % 2}/step-{step}", {"x": noise(60, step)}, metadata={"metrics": {"loss": step}})
    store = Store(HookedStore(inner, before=lambda name, key: counted.update([name])))
    (OF_ALL | OF_ONE)[title](store)
    return counted


@pytest.mark.parametrize("title", OF_ALL)
def test_operations_on_all_names_grow_no_faster_than_their_number(title: str) -> None:
    few, many = (count_operations(title, names) for names in (FEW, 2 * FEW))

    assert many.total() <= 2 * few.total()
    assert many["list"] <= few["list"] + 1, "names are listed, not looked up one by one"


@pytest.mark.parametrize("title", OF_ONE)
def test_operations_on_one_name_do_not_depend_on_the_number_of_names(title: str) -> None:
    few, many = (count_operations(title, names) for names in (FEW, 2 * FEW))

    assert many.total() <= few.total() + 2
