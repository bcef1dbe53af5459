"""A store that is handed to another process: every option with which it was opened goes along."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from http import HTTPStatus
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import holdfast
from holdfast import integrations
from holdfast import store as store_module
from holdfast.errors import ReadOnlyStore, StoreError, Unsupported
from holdfast.store import OpenOptions, Store

OPTIONS: dict[str, Any] = {
    "read_only": True,
    "budget_bytes": 48 << 20,
    "single_writer": True,
    "types": (HTTPStatus,),
    "environment": False,
    "change_hints": True,
    "create": False,
}


def opened_with(monkeypatch: pytest.MonkeyPatch, store: Store) -> dict[str, Any]:
    """Unpickle a store and return what it was opened with."""
    seen: list[dict[str, Any]] = []
    data = pickle.dumps(store)

    def watch(url: str, options: OpenOptions, store_id: str) -> None:
        seen.append({"url": url, "store_id": store_id, **asdict(options)})

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "make_store", watch)
        pickle.loads(data)
    return seen[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_goes_along_with_a_pickled_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    holdfast.open(tmp_path / "s").save("x", 1)
    options = {name: OPTIONS[name]}
    store = holdfast.open(tmp_path / "s", **options)

    seen = opened_with(monkeypatch, store)

    assert seen[name] == OPTIONS[name]
    plain = opened_with(monkeypatch, holdfast.open(tmp_path / "s"))
    assert {key for key in seen if seen[key] != plain[key]} == {name}


def test_what_was_pickled_twice_is_still_the_same(tmp_path: Path) -> None:
    holdfast.open(tmp_path / "s").save("x", 1)
    once = pickle.loads(pickle.dumps(holdfast.open(tmp_path / "s", **OPTIONS)))
    assert pickle.dumps(pickle.loads(pickle.dumps(once))) == pickle.dumps(once)


def use(writable: Store, closed: Store) -> dict[str, object]:
    """Do in another process what shows how stores were opened."""
    writable.save("there", HTTPStatus.OK)
    try:
        closed.save("no", 1)
    except ReadOnlyStore:
        refused = True
    else:
        refused = False
    return {
        "refused": refused,
        "budget_bytes": writable.repository.budget_bytes,
        "environment": dict(writable.snapshot("there").environment),
        "has hints": writable.repository.hints is not None,
        "loaded": writable.load("here"),
    }


def test_a_new_process_works_with_a_store_as_it_was_opened(tmp_path: Path) -> None:
    options = {**OPTIONS, "read_only": False, "create": True}
    store = holdfast.open(tmp_path / "s", **options)
    store.save("here", HTTPStatus.NOT_FOUND)

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        seen = pool.submit(use, store, holdfast.open(tmp_path / "s", read_only=True)).result()

    assert seen == {
        "refused": True,
        "budget_bytes": 48 << 20,
        "environment": {},
        "has hints": True,
        "loaded": HTTPStatus.NOT_FOUND,
    }
    assert store.load("there") is HTTPStatus.OK
    with pytest.raises(Unsupported):
        holdfast.open(tmp_path / "s").load("there")


@dataclass
class Settings:
    rate: float


def test_a_store_pickles_as_its_place_and_options(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "s", types=[Settings], budget_bytes=32 << 20)
    store.save("x", Settings(0.5))

    again = pickle.loads(pickle.dumps(store))

    assert again.load("x") == Settings(0.5)
    assert again.repository.budget_bytes == 32 << 20
    with pytest.raises(StoreError, match=r"memory://.* belongs to the process that opened it; use a path"):
        pickle.dumps(holdfast.open("memory://"))


@pytest.mark.parametrize("package", [holdfast, integrations], ids=lambda package: package.__name__)
def test_a_package_is_pickled_by_its_name_for_functions_that_refer_to_it(package: ModuleType) -> None:
    assert pickle.loads(pickle.dumps(package)) is package
