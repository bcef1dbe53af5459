"""A store is a mapping of names to snapshots, and everything that it returns has a repr that people can read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import holdfast
from holdfast import NotFound, RngState, Snapshot, Store
from holdfast.dcp import StorageReader, StorageWriter
from holdfast.objects.memory import MemoryStore
from holdfast.testing.faults import FaultyStore
from tests.kit.recordings import Recording, write_recorded

LONGEST = 500


@pytest.fixture
def store() -> Store:
    """A store with three snapshots and a tag."""
    store = Store(MemoryStore())
    for number in (1, 2, 10):
        store.save(f"run/{number}", {"w": torch.full((300,), float(number))}, metadata={"loss": 1 / number})
    store.tag("best", "run/2")
    return store


def test_a_name_or_a_tag_leads_to_its_snapshot(store: Store) -> None:
    assert isinstance(store["run/1"], Snapshot)
    assert store["best"].name == "run/2"
    assert torch.equal(store["run/10"]["w"][0:1], torch.tensor([10.0]))


def test_a_name_that_is_not_there_is_a_key_error(store: Store) -> None:
    with pytest.raises(KeyError) as caught:
        store["run/3"]

    assert isinstance(caught.value, NotFound)


def test_a_key_that_is_no_name_is_refused(store: Store) -> None:
    with pytest.raises(TypeError, match="the keys of a store are names of snapshots, not int: 3"):
        store[3]  # type: ignore[index]  # that is the point


@pytest.mark.parametrize(
    ("name", "is_in"), [("run/1", True), ("best", True), ("run", False), ("", False), ("../x", False), (3, False)]
)
def test_in_finds_names_and_tags(store: Store, name: object, is_in: bool) -> None:
    assert (name in store) is is_in


def test_iterating_yields_names_in_natural_order(store: Store) -> None:
    assert list(store) == ["run/1", "run/2", "run/10"]
    assert len(store) == 3


def test_an_empty_store_is_true() -> None:
    assert len(Store(MemoryStore())) == 0
    assert Store(MemoryStore())


def test_key_completion_offers_names_and_tags(store: Store) -> None:
    assert store._ipython_key_completions_() == ["run/1", "run/2", "run/10", "best"]


def iter_returned(store: Store) -> Iterator[object]:
    """Yield one of everything that a store returns."""
    yield store
    yield store.repository
    yield store.save("other", {"w": torch.ones(3)})
    yield store.save("other", {"w": torch.ones(3)})
    yield from iter_file_values(store)
    handle = store.save_async("async", {"w": torch.ones(2000)})
    yield handle
    yield handle.wait()
    yield handle
    yield from (store["run/1"], store["run/1"].record, store["run/1"]["w"])
    yield from (*store.tags(), *store.snapshots())
    diff = store.diff("run/1", "run/2", values=True)
    yield from (diff, *diff.changes, *(distance for change in diff.changes for distance in change.distances))
    yield from (store.plan_prune(keep_last=1), store.prune("async", keep_last=1))
    yield from (store.gc(), store.statistics())
    with store.manager("run/") as manager:
        yield manager
    yield from iter_run_values(store)
    yield from (store.compiler(), RngState(), holdfast.ResumableSampler(10))
    yield holdfast.training_state(torch.nn.Linear(2, 2))
    yield holdfast.Call(torch.zeros(3))
    yield from (StorageWriter(store, "a"), StorageReader(store, "run/1"))
    yield from (store.repository.store, FaultyStore(store.repository.store), store.compiler().cache)
    yield from store.repository.store.list("", limit=1)


def iter_file_values(store: Store) -> Iterator[object]:
    with TemporaryDirectory() as folder:
        Path(folder, "a.txt").write_text("a", encoding="utf-8")
        yield store.put("files", Path(folder, "a.txt"))
        yield store.get("files", Path(folder, "out"))


def iter_run_values(store: Store) -> Iterator[object]:
    for recording in (Recording("good"), Recording("bad", is_bad=True)):
        write_recorded(store.repository, recording)
    run = store.run("good")
    yield from (run, *store.runs(), *run.events(run.steps[0]))
    found = store.diff_runs("good", "bad")
    yield from (found, *found.origins, *found.rows, *found.steps)
    yield store.record("new", torch.nn.Linear(2, 2))


def test_every_repr_is_short_and_shows_neither_raw_bytes_nor_addresses(store: Store) -> None:
    for value in iter_returned(store):
        text = repr(value)
        assert len(text) < LONGEST, text
        assert "\\x" not in text, text
        assert " object at 0x" not in text, text
        assert "\n" not in text, text


def test_a_save_result_is_shown_with_its_sizes(store: Store) -> None:
    result = store.save("big", {"w": torch.arange(1 << 18)})

    assert repr(result).startswith(f"<SaveResult 'big' {result.digest.hex()[:12]}: 2.0 MiB, 2.0 MiB new, in ")
    assert "the same content was already present" in repr(store.save("big", {"w": torch.arange(1 << 18)}))


def test_the_card_of_a_save_shows_how_much_was_new(store: Store) -> None:
    weight = torch.arange(1 << 18)
    store.save("first", {"w": weight})

    page = store.save("second", {"w": weight, "v": torch.arange(1 << 18) + 1})._repr_html_()

    assert "2.0 MiB new, 2.0 MiB already present" in page
    assert "width:50.0%" in page


def test_the_result_of_a_handle_is_what_wait_returns(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "ckpts")
    handle = store.save_async("a", {"w": torch.ones(3)})

    assert handle.result(timeout_s=60) is handle.wait()
    assert repr(handle).startswith("<SaveHandle 'a': saved, 12 B new")


def test_the_card_of_two_runs_names_the_origin(store: Store) -> None:
    for recording in (Recording("good"), Recording("bad", is_bad=True)):
        write_recorded(store.repository, recording)
    found = store.diff_runs("good", "bad")

    page = found._repr_html_()

    assert found.origin
    assert "good → bad" in page
    assert found.origin.fqn in page
