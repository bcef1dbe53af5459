"""Undocumented requirements of torch.distributed.checkpoint: planners, payloads, errors that are pickled."""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager

import holdfast
from holdfast.dcp import StorageReader, StorageWriter
from holdfast.distributed.dcp.writer import does_stager_copy
from holdfast.errors import LeaseLost, Mismatch, NameInUse, NotFound, NotShared, StoreFull, Unsupported
from tests.distributed.dcp_states import dcp
from tests.distributed.dcp_trees import Odd, are_same, failure, save
from tests.kit.capabilities import needs_parameter

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:'.*'. saved, but not requested:UserWarning"
)


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


class Chosen(DefaultSavePlanner):
    """Saves in half precision, and says so in its plan."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.half() if isinstance(found, torch.Tensor) else found


class Quiet(Chosen):
    """The same, without saying so."""

    def create_local_plan(self) -> SavePlan:
        return DefaultSavePlanner.create_local_plan(self)


@pytest.mark.parametrize("planner", [Chosen, Quiet])
def test_a_planner_may_save_other_values_than_it_was_given(store: holdfast.Store, planner: type[SavePlanner]) -> None:
    dcp.save({"w": torch.tensor([0.1, 0.2])}, storage_writer=StorageWriter(store, "a"), planner=planner())
    target = {"w": torch.zeros(2, dtype=torch.float16)}

    dcp.load(target, storage_reader=StorageReader(store, "a"))

    assert store.load("a")["w"].dtype == torch.float16
    assert torch.equal(target["w"], torch.tensor([0.1, 0.2]).half())


def test_a_planner_that_does_not_flatten_gives_a_flat_dict(store: holdfast.Store) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)

    dcp.save({"a.b": torch.ones(2), "c": {"d": 1}}, storage_writer=StorageWriter(store, "a"), planner=planner)

    assert are_same(store.load("a"), {"a.b": torch.ones(2), "c": {"d": 1}})


@needs_parameter("distributed.checkpoint.default_planner.DefaultSavePlanner", "enable_plan_caching")
def test_cached_plans_save_the_values_of_each_save(store: holdfast.Store) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = "test_writer_traps"
    state = {"w": torch.zeros(2000), "step": 0}

    for step in range(3):
        state = {"w": torch.full((2000,), float(step)), "step": step}
        dcp.save(state, storage_writer=StorageWriter(store, f"step-{step}"), planner=planner)

    for step in range(3):
        assert are_same(store.load(f"step-{step}"), {"w": torch.full((2000,), float(step)), "step": step})


def test_more_than_plain_values_are_loaded_only_if_that_is_allowed(store: holdfast.Store) -> None:
    with pytest.warns(UserWarning, match="odd .*weights_only=False"):
        save(store, "a", {"odd": Odd(), "step": 3})
    target: dict[str, Any] = {"odd": None, "step": 0}

    refused = failure(lambda: dcp.load(target, storage_reader=StorageReader(store, "a")))
    dcp.load(target, storage_reader=StorageReader(store, "a", weights_only=False))

    assert isinstance(refused, Unsupported)
    assert "weights_only=False" in str(refused)
    assert target == {"odd": Odd(), "step": 3}
    with pytest.raises(Unsupported, match="allow_pickle=True"):
        store.load("a")
    assert store.load("a", only="step") == {"step": 3}
    assert store.load("a", allow_pickle=True) == target


def test_nothing_that_looks_at_a_snapshot_decodes_its_payloads(store: holdfast.Store, tmp_path: Path) -> None:
    save(store, "a", {"odd": Odd(), "w": torch.ones(2)}, weights_only=False)
    save(store, "b", {"odd": Odd(), "w": torch.zeros(2)}, weights_only=False)

    found = store.diff("a", "b")

    assert [str(change.name) for change in found.changed] == ["w"]
    assert len(list(store.snapshot("a"))) == 2


def test_a_failed_save_leaves_the_old_checkpoint_and_no_lease(
    store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = save(store, "a", {"w": torch.zeros(3)}, overwrite=True)

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            raise threading.BrokenBarrierError("not there")

    error = failure(lambda: dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=Failing()))

    assert (type(error), str(error)) == (RuntimeError, "threading.BrokenBarrierError: not there")
    assert store.load("a")["w"].tolist() == [0, 0, 0]
    assert not list(Path(store.url, "leases").iterdir())


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.lock = threading.Lock()


def test_errors_that_cannot_travel_become_plain_ones(store: holdfast.Store) -> None:
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            raise Unpicklable("it is", "wrong")

    error = failure(lambda: dcp.save({"w": torch.ones(3)}, storage_writer=StorageWriter(store, "a"), planner=Failing()))

    assert "Unpicklable: it is" in str(pickle.loads(pickle.dumps(error)))


@pytest.mark.parametrize(
    "error",
    [
        NameInUse("a", name="b"),
        NotFound("a", name="b"),
        LeaseLost("a"),
        NotShared("a"),
        StoreFull("a", needed_bytes=3),
        Mismatch("a", problems=("x",)),
    ],
)
def test_our_own_errors_travel(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)


def test_a_writer_and_a_reader_pickle_and_are_true(store: holdfast.Store) -> None:
    writer = save(store, "a", {"w": torch.ones(2)}, overwrite=True)
    again, reader = pickle.loads(pickle.dumps(writer)), pickle.loads(pickle.dumps(StorageReader(store, "a")))

    dcp.save({"w": torch.zeros(2)}, storage_writer=again)
    target = {"w": torch.ones(2)}
    dcp.load(target, storage_reader=reader)

    assert bool(writer)
    assert bool(reader)
    assert target["w"].tolist() == [0, 0]


def test_resetting_does_nothing_that_can_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no store")
    writer, reader = StorageWriter(tmp_path / "file"), StorageReader(tmp_path / "file")
    elsewhere = StorageWriter(tmp_path / "new")

    writer.reset("x\0y")
    reader.reset("x\0y")
    elsewhere.reset("x\0y")

    assert "is a file, not a store" in str(failure(lambda: dcp.save({}, storage_writer=writer)))
    assert "control characters" in str(failure(lambda: dcp.save({}, storage_writer=elsewhere)))


def test_a_writer_copies_what_is_saved_asynchronously_by_itself(store: holdfast.Store) -> None:
    base = torch.randn(3, dtype=torch.cfloat)
    writer = StorageWriter(store, "a")

    staged = writer.stage({"conj": base.conj(), "plain": base, "step": 1})

    assert isinstance(writer, AsyncStager)
    assert torch.equal(staged["conj"].resolve_conj(), base.conj().resolve_conj())
    assert staged["plain"].data_ptr() != base.data_ptr()
    assert not writer.should_synchronize_after_execute


def test_a_custom_planner_may_store_bytes_of_its_own(store: holdfast.Store) -> None:
    class Raw(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            return io.BytesIO(b"raw" * 700_000) if write_item.type == WriteItemType.BYTE_IO else object

    read = []

    class Reading(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            read.append(value.read())

    with pytest.warns(UserWarning, match="x .*weights_only=False"):
        dcp.save({"x": 1}, storage_writer=StorageWriter(store, "a"), planner=Raw())
    dcp.load({"x": None}, storage_reader=StorageReader(store, "a", weights_only=False), planner=Reading())

    assert read == [b"raw" * 700_000]
    assert isinstance(failure(lambda: dcp.load({"x": None}, storage_reader=StorageReader(store, "a"))), Unsupported)


def test_planner_data_that_is_not_plain_is_refused(store: holdfast.Store) -> None:
    class Strange(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = {"x": copyreg}
            return plans, metadata

    error = failure(lambda: dcp.save({"x": 1}, storage_writer=StorageWriter(store, "a"), planner=Strange()))

    assert isinstance(error, Unsupported)
    assert "the planner's data" in str(error)
    assert store.latest() is None


def test_whether_torch_copies_what_it_stages_is_found_out_in_a_fake_mode_too() -> None:
    tensor = torch.ones(2)
    staged: Any = BlockingAsyncStager().stage({"w": tensor})
    does_stager_copy.cache_clear()
    with FakeTensorMode():
        found = does_stager_copy()

    assert found == (staged["w"].data_ptr() != tensor.data_ptr())
