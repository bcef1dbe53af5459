"""An Accelerator saves its state to a store, keeps what its configuration says, and resumes from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.errors import Mismatch, NameInUse, NotFound, StoreFull, Unsupported
from tests.kit.damaged_packs import damaging_new_packs
from tests.kit.hooking import Hook

pytest.importorskip("accelerate", reason="needs Accelerate, which `make test` installs")

import accelerate  # after the test for the library
from accelerate.state import AcceleratorState, GradientState  # likewise
from accelerate.utils import DistributedType  # likewise

from holdfast.integrations.accelerate import MARKER, use_store  # likewise
from tests.integration.frameworks.accelerate_run import Run  # likewise


@pytest.fixture(autouse=True)
def forget_the_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def folders(run: Run) -> list[str]:
    return sorted(path.name for path in (run.folder / "out" / "checkpoints").iterdir())


@pytest.mark.parametrize("async_", [False, True])
def test_a_run_resumes_to_the_last_bit(tmp_path: Path, async_: bool) -> None:
    expected = Run(tmp_path / "whole")
    expected.train()
    Run(tmp_path / "half", async_=async_).train(until=7)

    resumed = Run(tmp_path / "half", async_=async_)
    resumed.accelerator.load_state()

    assert resumed.progress.batches == 6
    resumed.train()
    assert resumed.digest() == expected.digest()
    assert resumed.names() == expected.names()


def test_a_folder_contains_a_marker_and_nothing_else(tmp_path: Path) -> None:
    run = Run(tmp_path)

    folder = run.accelerator.save_state()

    assert folder == tmp_path / "out" / "checkpoints" / "checkpoint_0"
    assert os.listdir(folder) == [MARKER]
    assert torch.load(folder / MARKER)["custom"] == [{"batches": 0, "rates": []}]


def test_the_limit_keeps_the_newest(tmp_path: Path) -> None:
    run = Run(tmp_path, limit=2)
    run.store.save("run/checkpoint_best", {"not": "numbered"})
    run.train(until=3)
    run.store.tag("protected", "run/checkpoint_0")

    run.train()

    assert run.names() == ["run/checkpoint_0", "run/checkpoint_2", "run/checkpoint_3", "run/checkpoint_best"]
    assert folders(run) == ["checkpoint_0", "checkpoint_2", "checkpoint_3"]
    assert run.store.check() == [], "what was deleted takes no space"


def test_nothing_is_deleted_before_the_new_one_is_durable(tmp_path: Path, hook: Hook) -> None:
    run = Run(tmp_path, limit=1)
    run.accelerator.save_state()
    hook(run.store, "save", _fail)

    with pytest.raises(StoreFull):
        run.accelerator.save_state()

    assert run.names() == ["run/checkpoint_0"]
    assert (tmp_path / "out" / "checkpoints" / "checkpoint_0" / MARKER).is_file()


def _fail(*args: object, **options: object) -> None:
    raise StoreFull("no space left")


def test_the_end_of_training_raises_the_error_of_a_save_in_the_background(tmp_path: Path) -> None:
    run = Run(tmp_path, async_=True)
    run.accelerator.save_state()
    (tmp_path / "out" / "checkpoints" / "checkpoint_1").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / "checkpoint_1" / MARKER).mkdir()
    run.accelerator.save_state()

    with pytest.raises(IsADirectoryError):
        run.accelerator.end_training()


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(until=3)
    with damaging_new_packs(tmp_path / "store"):
        run.train(until=6)
    resumed = Run(tmp_path)

    with pytest.warns(UserWarning, match="'run/checkpoint_1' cannot be loaded, trying the one before"):
        resumed.accelerator.load_state()

    assert resumed.progress.batches == 3
    assert resumed.accelerator.save_state().name == "checkpoint_2", "no number is used twice"


@pytest.mark.parametrize("wanted", ["{}/out/checkpoints/checkpoint_0", "elsewhere/checkpoint_0", "run/checkpoint_0"])
def test_one_checkpoint_is_chosen_by_its_folder_or_name(tmp_path: Path, wanted: str) -> None:
    Run(tmp_path).train(until=6)
    resumed = Run(tmp_path)

    resumed.accelerator.load_state(wanted.format(tmp_path))

    assert resumed.progress.batches == 3
    assert resumed.accelerator.save_state().name == "checkpoint_2"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(ValueError, match="the store has no checkpoint under 'run/' to load"):
        run.accelerator.load_state()
    run.accelerator.save_state()

    with pytest.raises(NotFound, match=r"'out/other' is neither a folder .* checkpoints are run/checkpoint_0"):
        run.accelerator.load_state("out/other")


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    Run(tmp_path).accelerator.save_state()

    with pytest.raises(NameInUse, match=r"^'run/checkpoint_0' exists already; .*load_state\(\) first"):
        Run(tmp_path).accelerator.save_state()


def test_a_folder_of_the_user_is_the_end_of_the_name_and_can_be_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path, automatic=False)
    run.accelerator.save_state("./out/last/")
    run.progress.batches = 5
    run.accelerator.save_state("out/last")
    resumed = Run(tmp_path, automatic=False)

    resumed.accelerator.load_state(str(tmp_path / "out" / "last"))

    assert run.names() == ["run/out/last"]
    assert resumed.progress.batches == 5
    assert run.store.check() == [], "what was overwritten takes no space"
    with pytest.raises(ValueError, match="needs a folder"):
        run.accelerator.save_state()


def test_a_folder_that_accelerate_wrote_before_is_loaded(tmp_path: Path) -> None:
    before = Run(tmp_path, automatic=False)
    before.progress.batches = 4
    accelerate.Accelerator.save_state(before.accelerator, tmp_path / "old")
    run = Run(tmp_path, automatic=False)

    run.accelerator.load_state(str(tmp_path / "old"))

    assert run.progress.batches == 4
    assert run.names() == []


def test_hooks_may_save_and_load_models_themselves(tmp_path: Path) -> None:
    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        torch.save(models[0].state_dict(), Path(folder, "own.pt"))
        weights.pop()

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder, "own.pt")))

    run, resumed = Run(tmp_path), Run(tmp_path)
    for each in (run, resumed):
        each.accelerator.register_save_state_pre_hook(save)
        each.accelerator.register_load_state_pre_hook(load)
    run.train(until=3)

    resumed.accelerator.load_state()

    assert "model" not in run.store.load("run/checkpoint_0")
    assert resumed.digest() == run.digest()


def test_several_models_and_their_optimizers_are_restored(tmp_path: Path) -> None:
    run, resumed = _make_two(tmp_path), _make_two(tmp_path)
    for model, optimizer in zip(run.accelerator._models, run.accelerator._optimizers, strict=True):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    run.accelerator.save_state()

    resumed.accelerator.load_state()

    saved = run.store.load("run/checkpoint_0")
    assert {"model", "model_1", "optimizer", "optimizer_1"} <= saved.keys()
    assert "model_1.weight" in saved["optimizer_1"]["state"]
    pairs = zip(run.accelerator._models, resumed.accelerator._models, strict=True)
    assert all(torch.equal(a, b) for one, two in pairs for a, b in zip(one.parameters(), two.parameters(), strict=True))


def _make_two(folder: Path) -> Run:
    run = Run(folder)
    second: Any = torch.nn.Linear(4, 2)
    run.accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9))
    return run


def test_the_scaler_and_the_accumulation_step_are_restored(tmp_path: Path) -> None:
    run, resumed = Run(tmp_path), Run(tmp_path)
    run.accelerator.step = 3
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    resumed.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    run.accelerator.save_state()

    resumed.accelerator.load_state()

    assert resumed.accelerator.scaler.get_scale() == 8.0
    assert resumed.accelerator.step == 3


def test_another_set_of_objects_is_reported_by_name(tmp_path: Path) -> None:
    Run(tmp_path).accelerator.save_state()
    run = Run(tmp_path)
    run.accelerator.register_for_checkpointing(run.schedule)

    with pytest.raises(Mismatch, match="custom"):
        run.accelerator.load_state()


def test_values_that_need_pickle_are_saved_if_the_user_allows_it(tmp_path: Path) -> None:
    plain, allowing = Run(tmp_path), Run(tmp_path, allow_pickle=True)
    unusual: list[Any] = [complex]  # a class, which only pickle can store
    for run in (plain, allowing):
        run.progress.rates = unusual

    with pytest.raises(Unsupported, match=r"custom\.0\.rates\.0"):
        plain.accelerator.save_state()
    allowing.accelerator.save_state()
    resumed = Run(tmp_path, allow_pickle=True)
    resumed.accelerator.load_state()

    assert resumed.progress.rates == unusual


def test_an_option_that_a_store_does_not_have_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.accelerator.save_state()

    run.accelerator.load_state(map_location="cpu")
    with pytest.raises(Unsupported, match="no option anything"):
        run.accelerator.load_state(anything=1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"distributed_type": DistributedType.DEEPSPEED}, "^DEEPSPEED saves through its own code"),
        ({"distributed_type": DistributedType.FSDP}, "^FSDP1 saves through its own code"),
        ({"distributed_type": DistributedType.MEGATRON_LM}, "^MEGATRON_LM saves through its own code"),
        ({"_models": None}, "^this version of Accelerate does not keep its objects in _models;"),
    ],
)
def test_what_would_not_be_saved_is_refused_at_once(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    run = Run(tmp_path)
    known = {name: getattr(run.accelerator, name) for name in vars(run.accelerator) if name.startswith("_")}
    plain = {**known, "distributed_type": DistributedType.NO, "is_fsdp2": False, **change}
    plain = {name: value for name, value in plain.items() if value is not None}

    with pytest.raises(Unsupported, match=text):
        use_store(SimpleNamespace(**plain), run.store, "run/")


def test_an_accelerator_is_changed_once_and_its_prefix_ends_with_a_slash(tmp_path: Path) -> None:
    run = Run(tmp_path)

    with pytest.raises(Unsupported, match="already"):
        use_store(run.accelerator, run.store, "run/")
    with pytest.raises(ValueError, match="ends with a slash: 'run/'"):
        use_store(accelerate.Accelerator(cpu=True), run.store, "run")
