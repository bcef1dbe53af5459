"""The Trainer saves to a store, keeps what its arguments say, and resumes from it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast.errors import Mismatch, NotFound, Unsupported

pytest.importorskip("transformers", reason="needs Transformers, which `make test` installs")
pytest.importorskip("accelerate", reason="needs Accelerate, which `make test` installs")

from transformers import Trainer, TrainerCallback  # after the test for the library
from transformers.trainer_callback import ExportableState  # likewise

from holdfast.integrations.transformers import use_store  # likewise
from tests.integration.frameworks.trainer_run import BEST, STEPS, BestAtThree, SignalCallback, make_trainer  # likewise
from tests.kit.damaged_packs import damaging_new_packs

# Warnings of the framework are its own matter.
pytestmark = pytest.mark.filterwarnings("default")


def train(folder: Path, *, resume: Any = None, kind: type[Any] = Trainer, **options: Any) -> Any:
    trainer = make_trainer(folder, kind, **options)
    use_store(trainer, holdfast.open(folder / "store"), "run/")
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def names(folder: Path) -> list[str]:
    return [each.name for each in holdfast.open(folder / "store").snapshots("run/")]


@pytest.mark.slow
def test_checkpoints_are_snapshots_and_not_folders(tmp_path: Path) -> None:
    train(tmp_path)

    assert names(tmp_path) == ["run/step-3", "run/step-6", "run/step-9", "run/step-12"]
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.parametrize(
    "resume", [True, *(pytest.param(each, marks=pytest.mark.slow) for each in ("out/checkpoint-6", "run/step-6"))]
)
def test_training_resumes_to_the_last_bit(tmp_path: Path, resume: str | bool) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    expected = train(whole)
    _stop_at(half, 6)

    resumed = train(half, resume=resume)

    assert resumed.state.global_step == STEPS
    store = holdfast.open(tmp_path / "compared")
    assert _weights(store, "a", resumed) == _weights(store, "b", expected)


def _stop_at(folder: Path, step: int) -> None:
    class Stop(TrainerCallback):  # type: ignore[misc]  # its types are not known to mypy: pyproject.toml
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_training_stop = state.global_step == step

    trainer = make_trainer(folder)
    use_store(trainer, holdfast.open(folder / "store"), "run/")
    trainer.add_callback(Stop())
    trainer.train()


def _weights(store: holdfast.Store, name: str, trainer: Any) -> bytes:
    state = holdfast.training_state(trainer.model, trainer.optimizer, trainer.lr_scheduler)
    return store.save(name, state).digest


def test_nothing_to_resume_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint under 'run/'"):
        train(tmp_path, resume=True)
    with pytest.raises(NotFound):
        train(tmp_path, resume="run/step-7")


@pytest.mark.slow
def test_a_run_continues_from_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "store")
    options: dict[str, Any] = {"kind": BestAtThree, **BEST}

    def run(prefix: str, *, seed: int, steps: int = 6, resume: str | None = None) -> Any:
        trainer = make_trainer(tmp_path, max_steps=steps, seed=seed, **options)
        use_store(trainer, store, prefix)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    run("a/", seed=1)
    run("b/", seed=2)

    trainer = run("b/", seed=1, steps=9, resume="a/step-6")

    assert trainer.state.best_model_checkpoint == "a/step-3"
    expected = store.load("a/step-3", only="model.*")["model"]
    weights = trainer.model.state_dict()
    assert all(bool((weights[name] == value).all()) for name, value in expected.items())


@pytest.mark.slow
def test_auto_resumes_if_there_is_something_to_resume_from(tmp_path: Path) -> None:
    assert train(tmp_path, resume="auto", max_steps=3).state.global_step == 3

    resumed = train(tmp_path, resume="auto", max_steps=6)

    assert resumed.state.global_step == 6
    assert resumed._initial_global_step == 3, "it did not start from the beginning"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path) -> None:
    train(tmp_path, max_steps=3)
    with damaging_new_packs(tmp_path / "store"):
        train(tmp_path, resume=True, max_steps=6)

    with pytest.warns(UserWarning, match="'run/step-6' cannot be loaded, trying the one before"):
        trainer = train(tmp_path, resume=True, max_steps=9, neftune_noise_alpha=0.1)

    assert trainer._initial_global_step == 3
    assert trainer.state.global_step == 9
    assert not trainer.model.get_input_embeddings()._forward_hooks, "the first attempt has left nothing behind"


@pytest.mark.slow
def test_an_error_of_the_training_does_not_start_it_again(tmp_path: Path) -> None:
    train(tmp_path, max_steps=6)
    trainer = make_trainer(tmp_path)
    use_store(trainer, holdfast.open(tmp_path / "store"), "run/")
    trainer.add_callback(Failing())

    with pytest.raises(NotFound, match="no such file"):
        trainer.train(resume_from_checkpoint=True)


class Failing(TrainerCallback):  # type: ignore[misc]  # its types are not known to mypy: pyproject.toml
    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        raise NotFound("no such file")


def test_a_snapshot_of_something_else_is_not_resumed_from(tmp_path: Path) -> None:
    holdfast.open(tmp_path / "store").save("run/other", {"model": 1})

    with pytest.raises(Mismatch, match="'run/other' is not a checkpoint of a Trainer"):
        train(tmp_path, resume="run/other")


@pytest.mark.slow
def test_a_signal_saves_the_state_of_callbacks_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    use_store(trainer, holdfast.open(tmp_path / "store"), "run/")
    trainer.add_callback(Counting())
    trainer.add_callback(SignalCallback(signal.SIGTERM, 4))

    trainer.train()

    state = json.loads(holdfast.open(tmp_path / "store").load("run/step-5")["trainer"])
    assert state["stateful_callbacks"]["Counting"]["attributes"] == {"count": 4}


class Counting(TrainerCallback, ExportableState):  # type: ignore[misc]  # its types are not known to mypy: pyproject.toml
    count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


@pytest.mark.slow
def test_the_limit_keeps_the_newest(tmp_path: Path) -> None:
    train(tmp_path, save_total_limit=2)

    assert names(tmp_path) == ["run/step-9", "run/step-12"]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "kept"), [(1, [3, 12]), (2, [3, 12]), (3, [3, 9, 12])])
def test_the_best_is_kept_and_loaded_at_the_end(tmp_path: Path, limit: int, kept: list[int]) -> None:
    trainer = train(tmp_path, kind=BestAtThree, save_total_limit=limit, **BEST)

    assert names(tmp_path) == [f"run/step-{step}" for step in kept]
    assert trainer.state.best_model_checkpoint == "run/step-3"
    saved = holdfast.open(tmp_path / "store").load("run/step-3", only="model.*")["model"]
    weights = trainer.model.state_dict()
    assert all(bool((weights[name] == value).all()) for name, value in saved.items())


@pytest.mark.slow
def test_the_best_is_known_after_resuming(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": BestAtThree, "save_total_limit": 1, **BEST}
    train(tmp_path, max_steps=6, **options)

    trainer = train(tmp_path, resume=True, **options)

    assert trainer.state.best_model_checkpoint == "run/step-3"
    assert names(tmp_path) == ["run/step-3", "run/step-12"]


@pytest.mark.slow
def test_a_folder_that_the_trainer_wrote_before_is_resumed_from(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=3).train()

    trainer = train(tmp_path, resume=str(tmp_path / "out" / "checkpoint-3"))

    assert trainer.state.global_step == STEPS
    assert names(tmp_path) == ["run/step-6", "run/step-9", "run/step-12"]


@pytest.mark.slow
def test_weights_alone_can_be_saved_and_resumed_from(tmp_path: Path) -> None:
    train(tmp_path, save_only_model=True, max_steps=6)

    assert set(holdfast.open(tmp_path / "store").load("run/step-6")) == {"model", "step", "trainer"}
    assert train(tmp_path, save_only_model=True, resume=True).state.global_step == STEPS


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"is_deepspeed_enabled": True}, "DeepSpeed and FSDP1"),
        ({"is_fsdp_enabled": True, "accelerator": SimpleNamespace(is_fsdp2=False)}, "DeepSpeed and FSDP1"),
        ({"args": SimpleNamespace(push_to_hub=True)}, "push_to_hub"),
    ],
)
def test_what_would_not_be_saved_is_refused_at_once(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    plain = {"is_deepspeed_enabled": False, "is_fsdp_enabled": False, "args": SimpleNamespace(push_to_hub=False)}

    with pytest.raises(Unsupported, match=text):
        use_store(SimpleNamespace(**(plain | change)), holdfast.open(tmp_path), "run/")


def test_a_trainer_is_changed_once(tmp_path: Path) -> None:
    trainer, store = make_trainer(tmp_path), holdfast.open(tmp_path / "store")
    use_store(trainer, store, "run/")

    with pytest.raises(Unsupported, match="already"):
        use_store(trainer, store, "run/")
