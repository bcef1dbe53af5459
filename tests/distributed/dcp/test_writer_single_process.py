"""The plug-in for torch.distributed.checkpoint in one process: saved and loaded values, warnings and errors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import holdfast
from holdfast.dcp import StorageReader, StorageWriter
from holdfast.errors import NameInUse, Unsupported
from tests.distributed.dcp_states import dcp
from tests.distributed.dcp_trees import are_same, blank, failure, make_state, save
from tests.kit.capabilities import needs_ability, needs_parameter

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:'.*'. saved, but not requested:UserWarning"
)


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


def test_a_state_dict_comes_back_as_torch_loads_it(store: holdfast.Store) -> None:
    state = make_state()
    save(store, "run/step-1", state)
    target = blank(state)

    dcp.load(target, storage_reader=StorageReader(store, "run/step-1"))

    assert are_same(target, state)


def test_what_torch_saved_is_loaded_by_the_store_as_nested_as_it_was(store: holdfast.Store) -> None:
    state = make_state()
    save(store, "a", state)

    loaded = store.load("a")

    assert are_same(loaded, state)
    assert not [finding for finding in store.check(read=True) if finding.severity != "note"]


def test_what_the_store_saved_is_loaded_by_torch(store: holdfast.Store) -> None:
    state = make_state() | {
        "text": "x" * 5000,
        "wide": torch.randn(1, 3).expand(4, 3),
        "conj": torch.randn(2, dtype=torch.cfloat).conj(),
    }
    store.save("a", state)
    target = blank(state)
    target["wide"], target["conj"] = torch.zeros(4, 3), torch.zeros(2, dtype=torch.cfloat)

    dcp.load(target, storage_reader=StorageReader(store, "a"))

    assert torch.equal(target.pop("wide"), state.pop("wide"))
    assert torch.equal(target.pop("conj"), state.pop("conj").resolve_conj())
    assert are_same(target, state)


def test_a_path_is_as_good_as_a_store_and_the_name_may_come_later(tmp_path: Path) -> None:
    writer, reader = StorageWriter(tmp_path / "s"), StorageReader(str(tmp_path / "s"))
    state, target = {"w": torch.arange(4.0)}, {"w": torch.zeros(4)}

    dcp.save(state, storage_writer=writer, checkpoint_id="run/step-2")
    dcp.load(target, storage_reader=reader, checkpoint_id="run/step-2")

    assert torch.equal(target["w"], state["w"])
    assert writer.checkpoint_id == reader.checkpoint_id == "run/step-2"


def test_a_second_save_of_the_same_state_writes_no_tensor_again(store: holdfast.Store) -> None:
    save(store, "a", make_state())
    packs = store.repository.store.url + "/packs"
    before = set(Path(packs).iterdir())

    save(store, "b", make_state())

    assert set(Path(packs).iterdir()) == before
    assert store.snapshot("a").digest == store.snapshot("b").digest


def test_the_same_writer_saves_again_under_another_name_or_over_the_same(store: holdfast.Store) -> None:
    writer = StorageWriter(store, "a", overwrite=True)
    dcp.save({"w": torch.zeros(3)}, storage_writer=writer)
    first_id = writer.save_id

    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    dcp.save({"w": torch.full((3,), 2.0)}, storage_writer=writer, checkpoint_id="b")

    assert store.load("a")["w"].tolist() == [1, 1, 1]
    assert store.load("b")["w"].tolist() == [2, 2, 2]
    assert writer.save_id != first_id


def test_a_name_in_use_is_refused_before_anything_is_written(store: holdfast.Store) -> None:
    save(store, "a", {"w": torch.zeros(3)})

    error = failure(lambda: save(store, "a", {"w": torch.ones(3)}))

    assert isinstance(error, NameInUse)
    assert "Checkpoint already exists" in str(error)
    assert store.load("a")["w"].tolist() == [0, 0, 0]


def test_metadata_is_what_torch_expects_of_it(store: holdfast.Store) -> None:
    save(store, "a", make_state(), metadata={"loss": 0.5})
    reader = StorageReader(store, "a")

    found = reader.read_metadata()

    assert getattr(found, "version", "1.0.0") == "1.0.0"  # not every torch has it
    assert found.storage_meta is not None
    assert (found.storage_meta.checkpoint_id, found.storage_meta.load_id) == ("a", reader.load_id)
    assert found.storage_meta.save_id
    assert found.planner_data["groups.0.lr"] == ("groups", 0, "lr")
    assert store.snapshot("a").metadata == {"loss": 0.5}


@needs_ability("report why the metadata of a checkpoint cannot be read")
def test_errors_of_a_missing_checkpoint_say_which(store: holdfast.Store) -> None:
    save(store, "a", {"w": torch.zeros(3)})

    error = failure(lambda: dcp.load({"w": torch.zeros(3)}, storage_reader=StorageReader(store, "b")))

    assert "no snapshot 'b'" in str(error)


def test_only_what_is_asked_for_is_loaded_and_the_rest_is_told(store: holdfast.Store) -> None:
    save(store, "a", make_state())
    target: dict[str, Any] = {"model": {"bias": torch.zeros(5)}, "new": torch.zeros(1)}

    with pytest.warns(UserWarning, match=r"not requested by any rank: model\.weight"):
        dcp.load(target, storage_reader=StorageReader(store, "a"), planner=DefaultLoadPlanner(allow_partial_load=True))

    assert torch.equal(target["model"]["bias"], make_state()["model"]["bias"])
    assert target["new"].tolist() == [0]


def test_a_cast_is_done_as_torch_does_it_and_told(store: holdfast.Store) -> None:
    save(store, "a", {"w": torch.tensor([1.5, -2.5])})
    target = {"w": torch.zeros(2, dtype=torch.int64)}

    with pytest.warns(UserWarning, match=r"cast to another dtype: w \(torch.float32 to torch.int64\)"):
        dcp.load(target, storage_reader=StorageReader(store, "a"))

    assert target["w"].tolist() == [1, -2]


def test_a_target_that_is_not_contiguous_is_filled_and_graphs_notice(store: holdfast.Store) -> None:
    save(store, "a", {"w": torch.arange(12.0).reshape(3, 4), "v": torch.ones(2)})
    weight, vector = torch.zeros(4, 3).t(), torch.zeros(2)
    before = vector._version

    dcp.load({"w": weight, "v": vector}, storage_reader=StorageReader(store, "a"))

    assert torch.equal(weight, torch.arange(12.0).reshape(3, 4))
    assert vector._version > before


def test_views_are_saved_by_their_values(store: holdfast.Store) -> None:
    base = torch.randn(4, dtype=torch.cfloat)
    state = {
        "conj": base.conj(),
        "neg": base.conj().imag,
        "wide": torch.arange(3.0).expand(2, 3),
        "part": torch.arange(100.0)[3:5],
    }

    save(store, "a", state)

    loaded = store.load("a")
    assert all(torch.equal(loaded[name], value.resolve_conj().resolve_neg()) for name, value in state.items())


def test_memory_that_was_freed_is_refused_by_name(store: holdfast.Store) -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)

    error = failure(lambda: save(store, "a", {"gone": tensor}))

    assert isinstance(error, Unsupported)
    assert "gone" in str(error)


def test_a_load_into_a_tree_reads_what_torch_saved(store: holdfast.Store) -> None:
    save(store, "a", {"model": {"w": torch.arange(3.0)}, "step": 4})
    target = {"model": {"w": torch.zeros(3)}, "step": 0}

    store.load_into("a", target)

    assert are_same(target, {"model": {"w": torch.arange(3.0)}, "step": 4})


@needs_parameter("distributed.checkpoint.save", "use_collectives")
def test_without_collectives_a_rank_has_a_snapshot_of_its_own(store: holdfast.Store) -> None:
    state = make_state()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=StorageWriter(store, "a"), use_collectives=False)
        target = blank(state)
        dcp.load(target, storage_reader=StorageReader(store, "a"))

    assert [snapshot.name for snapshot in store.snapshots()] == ["a/rank-0"]
    assert are_same(target, state)
    assert are_same(store.load("a/rank-0"), state)


def test_a_large_state_is_written_in_groups_within_the_budget(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "s", budget_bytes=16 << 20)
    state = {f"w{number}": torch.randn(3 << 18) for number in range(6)} | {"huge": torch.randn(5 << 20)}

    save(store, "a", state)

    assert are_same(store.load("a"), state)
