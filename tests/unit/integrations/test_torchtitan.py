"""TorchTitan's checkpoint manager in a store: when it saves, what it keeps, what it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import Mismatch, Unsupported

pytest.importorskip("torchtitan.components.checkpointer", reason="needs TorchTitan, which `make test` installs")

from torchtitan.components.checkpointer import CheckpointManager  # after the test for the library

from tests.integration.frameworks.torchtitan_run import STEPS, Training  # likewise

# Warnings of the framework are its own matter.
pytestmark = pytest.mark.filterwarnings("default")


def train(folder: Path, steps: int = STEPS, **options: Any) -> Training:
    training = Training(folder, **options)
    training.train(steps)
    return training


def open_store(folder: Path) -> holdfast.Store:
    return holdfast.open(folder / "checkpoint" / "store")


def names(folder: Path) -> list[str]:
    return [each.name for each in open_store(folder).snapshots()]


def test_a_run_is_saved_every_interval_and_at_the_end(tmp_path: Path) -> None:
    train(tmp_path, 5)

    assert names(tmp_path) == ["step-2", "step-4", "step-5"]


def test_the_first_step_is_saved_if_that_is_wanted(tmp_path: Path) -> None:
    train(tmp_path, 3, interval=3, enable_first_step_checkpoint=True)

    assert names(tmp_path) == ["step-1", "step-3"]


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    expected = train(tmp_path / "whole").digest()
    train(tmp_path / "half", 4)

    assert train(tmp_path / "half").digest() == expected


@pytest.mark.parametrize("async_save", [True, False])
def test_the_last_k_checkpoints_are_kept(tmp_path: Path, async_save: bool) -> None:
    train(tmp_path, keep_latest_k=2, async_save=async_save)

    assert names(tmp_path) == ["step-6", "step-8"]


def test_a_disabled_manager_does_nothing(tmp_path: Path) -> None:
    train(tmp_path, 2, enable=False)

    assert not (tmp_path / "checkpoint").exists()


def test_load_only_saves_nothing(tmp_path: Path) -> None:
    train(tmp_path, 2)

    assert train(tmp_path, 4, load_only=True).step == 4
    assert names(tmp_path) == ["step-2"]


def test_a_step_can_be_chosen(tmp_path: Path) -> None:
    train(tmp_path, 6)
    training = Training(tmp_path)

    assert training.checkpointer.load(step=2)
    assert training.step == 2


def test_the_newest_checkpoint_counts_and_not_the_highest_step(tmp_path: Path) -> None:
    train(tmp_path, 6)
    training = Training(tmp_path)
    training.checkpointer.load(step=2)
    training.step = 4
    training.checkpointer.save(4)
    training.checkpointer.close()
    resumed = Training(tmp_path)

    resumed.checkpointer.load()

    assert resumed.step == 4


def test_runs_in_one_store_are_told_apart_by_prefix(tmp_path: Path) -> None:
    store = str(tmp_path / "shared")
    train(tmp_path / "a", 2, store=store, prefix="a/")

    other = train(tmp_path / "b", 4, store=store, prefix="b/")

    assert other.step == 4
    assert [each.name for each in holdfast.open(store).snapshots()] == ["a/step-2", "b/step-2", "b/step-4"]


def test_a_run_does_not_resume_from_one_whose_prefix_begins_with_its_own(tmp_path: Path) -> None:
    store = str(tmp_path / "shared")
    train(tmp_path / "a", 4, store=store, prefix="a/more/")
    training = Training(tmp_path / "b", store=store, prefix="a/")

    assert not training.checkpointer.load()


def test_a_store_of_others_needs_a_prefix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass a prefix for this run"):
        Training(tmp_path, store=str(tmp_path / "shared"))


def test_the_last_checkpoint_may_have_the_model_only_in_another_dtype(tmp_path: Path) -> None:
    training = train(tmp_path, 4, last_save_model_only=True, export_dtype="bfloat16")

    loaded = open_store(tmp_path).load("step-4")
    assert loaded.keys() == {"model"}
    assert torch.equal(loaded["model"]["0.weight"], training.model.state_dict()["0.weight"].bfloat16())


def test_a_run_continues_from_before_a_checkpoint_that_has_the_model_only(tmp_path: Path) -> None:
    train(tmp_path, 4, last_save_model_only=True)
    training = Training(tmp_path)

    training.checkpointer.load()

    assert training.step == 2


def test_a_run_does_not_begin_anew_beside_a_checkpoint_that_has_the_model_only(tmp_path: Path) -> None:
    train(tmp_path, 4, interval=9, last_save_model_only=True)

    with pytest.raises(Unsupported, match="'step-4' has the model only"):
        Training(tmp_path).checkpointer.load()


def test_the_weights_of_a_checkpoint_that_has_the_model_only_are_loaded_by_its_step(tmp_path: Path) -> None:
    expected = train(tmp_path, 4, last_save_model_only=True, export_dtype="bfloat16").model.state_dict()
    training = Training(tmp_path)
    training.model[0].weight.data.zero_()

    assert training.checkpointer.load(step=4)

    weight = training.model.state_dict()["0.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, expected["0.weight"].bfloat16().float())
    assert training.step == 0


def test_a_seed_checkpoint_begins_a_run(tmp_path: Path) -> None:
    seed = Training(tmp_path, last_save_model_only=True)
    seed.model[0].weight.data.fill_(3.0)
    seed.checkpointer.save(0, last_step=True)
    seed.checkpointer.close()
    training = Training(tmp_path)

    assert training.checkpointer.load()
    assert torch.equal(training.model.state_dict()["0.weight"], torch.full((8, 4), 3.0))
    assert training.step == 0


def test_an_excluded_state_is_not_loaded(tmp_path: Path) -> None:
    train(tmp_path, 2)
    training = Training(tmp_path, exclude_from_loading=["train_state"])

    training.checkpointer.load()

    assert training.step == 0
    assert training.schedules.state_dict() == {"last_epoch": 2}


def test_an_unknown_state_cannot_be_excluded(tmp_path: Path) -> None:
    train(tmp_path, 2)

    with pytest.raises(ValueError, match="exclude_from_loading names \\['weather'\\]"):
        Training(tmp_path, exclude_from_loading=["weather"]).checkpointer.load()


def test_a_model_with_other_names_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 2)
    training = Training(tmp_path)
    training.checkpointer._own.states["more"] = torch.nn.Linear(1, 1)

    with pytest.raises(Mismatch, match=r"does not have more\.weight, more\.bias"):
        training.checkpointer.load()


def test_a_checkpoint_that_torchtitan_has_written_is_loaded_if_the_store_has_none(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.model[0].weight.data.fill_(3.0)
    training.step = 6
    parts = {
        "dataloader": training.loader,
        "model_parts": [training.model],
        "optimizers": training.optimizers,
        "lr_schedulers": training.schedules,
        "states": {"train_state": training},
        "sd_adapter": None,
        "base_folder": str(tmp_path),
    }
    CheckpointManager.Config(enable=True, interval=6, keep_latest_k=0).build(**parts).save(6)
    resumed = Training(tmp_path)

    assert resumed.checkpointer.load()
    assert resumed.step == 6
    assert torch.equal(resumed.model.state_dict()["0.weight"], torch.full((8, 4), 3.0))


def test_an_export_for_hugging_face_is_left_to_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, bool]] = []

    def save(self: Any, curr_step: int, last_step: bool = False) -> bool:
        calls.append((curr_step, last_step))
        return True

    training = Training(tmp_path, last_save_in_hf=True, last_save_model_only=True, sd_adapter=object())
    monkeypatch.setattr(CheckpointManager, "save", save)

    training.train(4)

    assert calls == [(4, True)]
    assert names(tmp_path) == ["step-2"]
