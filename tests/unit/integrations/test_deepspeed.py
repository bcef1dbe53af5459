"""A checkpoint of DeepSpeed is one snapshot, and is found where DeepSpeed looks for files."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import NotFound, Unsupported

pytest.importorskip("deepspeed", reason="needs DeepSpeed, which `make test` installs")

from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo  # after the test for the library
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from holdfast.integrations.deepspeed import HoldfastCheckpointEngine  # likewise

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


@pytest.fixture
def engine(store: holdfast.Store) -> HoldfastCheckpointEngine:
    return HoldfastCheckpointEngine(store, "run/")


def save(engine: Any, folder: Path, tag: str = "global_step2", *, commit: bool = True, **states: Any) -> Path:
    """Make the calls of `DeepSpeedEngine.save_checkpoint`; return the folder of the tag."""
    info = CheckpointCommitInfo(tag=tag, save_dir=str(folder), save_latest=True)
    engine.create(info)
    engine.makedirs(folder / tag, exist_ok=True)
    for name, state in states.items():
        engine.save(state, str(folder / tag / f"{name}.pt"))
    if commit:
        assert engine.commit(info)
    return folder / tag


def save_two(engine: Any, folder: Path, model: Any, optimizer: Any) -> Path:
    return save(engine, folder, **{MODEL.removesuffix(".pt"): model, OPTIMIZER.removesuffix(".pt"): optimizer})


def test_files_of_a_tag_are_loaded_as_they_were_saved(engine: Any, store: holdfast.Store, tmp_path: Path) -> None:
    model = {"module": OrderedDict(weight=torch.arange(4.0)), "param_shapes": [OrderedDict(weight=torch.Size([4]))]}
    optimizer = {"exp_avg": torch.ones(3), "empty": {}, "args": (1, None, "x")}

    folder = save_two(engine, tmp_path / "out", model, optimizer)

    assert [each.name for each in store.snapshots()] == ["run/global_step2"]
    loaded = engine.load(str(folder / MODEL), map_location=lambda storage, location: storage)
    assert torch.equal(loaded["module"].pop("weight"), torch.arange(4.0))
    assert loaded == {"module": OrderedDict(), "param_shapes": model["param_shapes"]}
    loaded = engine.load(str(folder / OPTIMIZER), map_location="cpu")
    assert torch.equal(loaded.pop("exp_avg"), torch.ones(3))
    assert loaded == {"empty": {}, "args": (1, None, "x")}


def test_objects_of_deepspeed_need_no_pickle(engine: Any, tmp_path: Path) -> None:
    scaler = DynamicLossScaler(
        init_scale=256.0, scale_window=10, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
    )
    scaler.cur_scale = 128.0
    state = {
        "loss_scaler": scaler,
        "static": LossScaler(scale=3),
        "zero_stage": ZeroStageEnum.gradients,
        "param_slice_mappings": [OrderedDict(weight=fragment_address(numel=4, start=8))],
    }

    folder = save(engine, tmp_path, optim=state)

    loaded = engine.load(str(folder / "optim.pt"))
    assert type(loaded["loss_scaler"]) is DynamicLossScaler
    assert vars(loaded["loss_scaler"]) == vars(scaler)
    assert vars(loaded["static"]) == vars(state["static"])
    assert loaded["zero_stage"] is ZeroStageEnum.gradients
    assert loaded["param_slice_mappings"] == state["param_slice_mappings"]


def test_the_saved_state_is_not_changed(engine: Any, tmp_path: Path) -> None:
    scaler = LossScaler()
    state = {"loss_scaler": scaler, "list": [ZeroStageEnum.weights]}

    save(engine, tmp_path, optim=state)

    assert state == {"loss_scaler": scaler, "list": [ZeroStageEnum.weights]}


def test_nothing_is_visible_before_the_commit(engine: Any, store: holdfast.Store, tmp_path: Path) -> None:
    folder = save(engine, tmp_path, commit=False, model={"a": 1})

    assert store.snapshots() == []
    assert not (folder / "model.pt").exists()


def test_torch_load_of_a_file_loads_its_part_of_the_snapshot(engine: Any, tmp_path: Path) -> None:
    folder = save_two(engine, tmp_path, {"a": torch.ones(2)}, {"zero_stage": ZeroStageEnum.gradients})

    assert torch.load(folder / MODEL)["a"].tolist() == [1.0, 1.0]
    assert torch.load(folder / OPTIMIZER, weights_only=False) == {"zero_stage": ZeroStageEnum.gradients}


def test_an_export_is_a_file_and_leaves_the_checkpoint_of_the_step_alone(
    engine: Any, store: holdfast.Store, tmp_path: Path
) -> None:
    folder = save(engine, tmp_path, model={"a": 1})
    info = CheckpointCommitInfo(tag="global_step2", save_dir=str(tmp_path), save_latest=False)

    engine.create(info)
    engine.save({"weight": torch.ones(2)}, str(tmp_path / "pytorch_model.bin"))
    engine.commit(info)

    assert torch.load(tmp_path / "pytorch_model.bin")["weight"].tolist() == [1.0, 1.0]
    assert engine.load(str(folder / "model.pt")) == {"a": 1}


def test_a_value_that_the_format_cannot_store_is_named(engine: Any, store: holdfast.Store, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"model\.client"):
        save(engine, tmp_path, model={"client": object()})

    assert store.snapshots() == []


def test_a_value_is_pickled_if_that_is_allowed(store: holdfast.Store, tmp_path: Path) -> None:
    engine = HoldfastCheckpointEngine(store, "run/", allow_pickle=True)

    folder = save(engine, tmp_path, model={"client": Path})

    assert engine.load(str(folder / "model.pt")) == {"client": Path}
    with pytest.raises(Unsupported):
        HoldfastCheckpointEngine(store, "run/").load(str(folder / "model.pt"))


def test_a_tag_that_is_saved_again_replaces_the_old_checkpoint(engine: Any, tmp_path: Path) -> None:
    save(engine, tmp_path, model={"a": 1})

    folder = save(engine, tmp_path, model={"a": 2})

    assert engine.load(str(folder / "model.pt")) == {"a": 2}


def test_a_file_that_deepspeed_has_written_is_loaded_as_before(engine: Any, tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "old.pt")

    assert engine.load(str(tmp_path / "old.pt")) == {"a": 1}


def test_a_checkpoint_in_another_store_is_found_by_its_file(engine: Any, tmp_path: Path) -> None:
    folder = save(engine, tmp_path, model={"a": 1})
    other = HoldfastCheckpointEngine(holdfast.open(tmp_path / "other"), "run/")

    assert other.load(str(folder / "model.pt")) == {"a": 1}


def test_a_path_without_a_file_is_named(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"global_step9/model\.pt does not exist"):
        engine.load(str(tmp_path / "global_step9" / "model.pt"))


def test_the_latest_tag_is_that_of_the_newest_checkpoint(engine: Any, tmp_path: Path) -> None:
    assert engine.latest_tag() is None

    save(engine, tmp_path, "global_step10", model={"a": 1})
    save(engine, tmp_path, "global_step2", model={"a": 2})

    assert engine.latest_tag() == "global_step2"


def test_an_unknown_class_in_a_checkpoint_is_refused(engine: Any, store: holdfast.Store, tmp_path: Path) -> None:
    folder = save(engine, tmp_path, model={"a": 1})
    store.save("run/global_step2", {"model": {"a": {"deepspeed class": "Popen"}}}, overwrite=True)

    with pytest.raises(Unsupported, match="'Popen'"):
        engine.load(str(folder / "model.pt"))


def test_a_prefix_without_a_slash_is_refused(store: holdfast.Store) -> None:
    with pytest.raises(ValueError, match="'run/'"):
        HoldfastCheckpointEngine(store, "run")


def test_deepspeed_need_not_copy_tensors_before_it_saves_them(engine: Any) -> None:
    assert engine.preserves_storage_sharing() is False
