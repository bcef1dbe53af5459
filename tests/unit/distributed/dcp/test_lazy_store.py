"""A store that is opened on first use, names made from checkpoint ids, and errors that torch can pickle."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import holdfast
from holdfast.distributed.dcp.lazy_store import LazyStore, choose_name, clean_id, is_name, raising_picklable
from holdfast.errors import BadName, NotFound


def test_a_path_is_opened_on_first_use_and_once(tmp_path: Path) -> None:
    lazy = LazyStore(tmp_path / "store")
    assert not (tmp_path / "store").exists()

    assert lazy.repository is lazy.repository


def test_an_open_store_is_used_as_it_is(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        assert LazyStore(store).repository is store.repository


def test_it_is_pickled_without_the_open_repository(tmp_path: Path) -> None:
    lazy = LazyStore(tmp_path / "store")
    url = lazy.repository.store.url

    assert pickle.loads(pickle.dumps(lazy)).repository.store.url == url


@pytest.mark.parametrize(
    ("checkpoint_id", "rank", "name"),
    [("/runs/step-1/", None, "runs/step-1"), (Path("runs/step-1"), 3, "runs/step-1/rank-3")],
)
def test_a_name_is_the_id_without_slashes_at_its_ends(checkpoint_id: str | Path, rank: int | None, name: str) -> None:
    assert choose_name(checkpoint_id, rank) == name
    assert is_name(checkpoint_id)
    assert clean_id(checkpoint_id) == "runs/step-1"


def test_a_checkpoint_needs_a_valid_name() -> None:
    with pytest.raises(BadName, match="has no name"):
        choose_name(None, None)
    assert not is_name("")


class Odd(Exception):
    """An error that another process may not be able to import."""


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (NotFound("x"), NotFound),
        (ValueError("x"), ValueError),
        (ValueError(object()), RuntimeError),
        (Odd("x"), RuntimeError),
    ],
    ids=["ours", "builtin", "builtin with an object", "foreign"],
)
def test_errors_that_torch_may_not_pickle_become_runtime_errors(raised: Exception, expected: type[Exception]) -> None:
    with pytest.raises(expected) as caught, raising_picklable():
        raise raised
    assert type(caught.value) is expected
