"""The plug-in for torch.distributed.checkpoint on several ranks: resharding, failures, and saves in the background."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.dcp import StorageReader
from holdfast.testing.ranks import run_ranks
from tests.distributed import dcp_states
from tests.distributed.conftest import World
from tests.kit.capabilities import FSDP, needs_parameter, needs_torch
from tests.kit.patience import PROMPT_S, RUN_S
from tests.kit.thinning import keep


def load_here(path: Path, name: str, step: int) -> list[str]:
    """Return what of a checkpoint the store itself does not load as it was."""
    state = holdfast.open(path).load(name)
    return dcp_states.find_faults(state, step)


@pytest.mark.parametrize(("savers", "loaders"), keep([(1, 2), (2, 2), (2, 3), (3, 2), (3, 1)], (2, 3), (3, 1)))
def test_a_checkpoint_of_one_world_is_loaded_by_another(
    world: World, tmp_path: Path, savers: int, loaders: int
) -> None:
    world(savers)(dcp_states.save, str(tmp_path), "run/a", 1)

    found = world(loaders)(dcp_states.load, str(tmp_path), "run/a", 1)

    assert found == [[]] * loaders
    assert load_here(tmp_path, "run/a", 1) == []


def test_meshes_of_two_dims_are_loaded_by_others(world: World, tmp_path: Path) -> None:
    world(4)(dcp_states.save_grid, str(tmp_path))

    assert world(2)(dcp_states.load_grid, str(tmp_path)) == [[], []]
    loaded = holdfast.open(tmp_path).load("grid")
    assert list(loaded) == [str(number) for number in range(len(dcp_states.GRID))]
    assert all(torch.equal(tensor, dcp_states.make_global("rows", 1)) for tensor in loaded.values())


def test_a_checkpoint_leaves_nothing_but_what_it_needs(world: World, tmp_path: Path) -> None:
    world(3)(dcp_states.save, str(tmp_path), "a", 1)
    store = holdfast.open(tmp_path)

    findings = store.check(read=True)

    assert findings == []
    assert not list((tmp_path / "leases").iterdir())
    assert len(list((tmp_path / "manifests").iterdir())) == 4


def test_what_three_ranks_saved_is_the_same_for_one_that_saves_it_again(world: World, tmp_path: Path) -> None:
    world(3)(dcp_states.save, str(tmp_path), "a", 1)
    store = holdfast.open(tmp_path)

    store.save("b", store.load("a"))

    assert [change.name for change in store.diff("a", "b").changed if change.name.startswith("model")] == []


def test_a_native_checkpoint_of_ranks_is_loaded_by_torch(world: World, tmp_path: Path) -> None:
    holdfast.open(tmp_path).save(
        "a",
        {
            "model": {name: dcp_states.make_global(name, 1) for name in dcp_states.PLACEMENTS},
            "plain": dcp_states.make_global("same", 2),
            "step": 1,
            "note": {"text": "x"},
        },
    )

    assert world(2)(dcp_states.load, str(tmp_path), "a", 1) == [[], []]


@needs_parameter("distributed.checkpoint.default_planner.DefaultSavePlanner", "enable_plan_caching")
def test_cached_plans_save_each_step_of_all_ranks(world: World, tmp_path: Path) -> None:
    world(2)(dcp_states.save_with_cached_plans, str(tmp_path))

    assert [load_here(tmp_path, f"step-{step}", step) for step in range(3)] == [[], [], []]


@needs_parameter("distributed.checkpoint.save", "use_collectives")
def test_without_collectives_every_rank_has_a_snapshot_of_its_own(world: World, tmp_path: Path) -> None:
    found = world(2)(dcp_states.save_alone, str(tmp_path), "a")

    store = holdfast.open(tmp_path)
    assert found == [[], []]
    assert [snapshot.name for snapshot in store.snapshots()] == ["a/rank-0", "a/rank-1"]
    held = store.load("a/rank-1")["model"]["rows"]
    assert torch.equal(held["4,0"], dcp_states.make_global("rows", 3)[4:])
    assert store.check(read=True) == []


@needs_parameter("distributed.checkpoint.save", "use_collectives")
@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:.*not requested by any rank:UserWarning"
)
def test_what_nobody_has_saved_stays_as_it_is_and_is_told(world: World, tmp_path: Path) -> None:
    world(2)(dcp_states.save_alone, str(tmp_path), "a")
    target = {"model": {"rows": torch.full((7, 300), -1.0)}}

    with pytest.warns(UserWarning, match=r"saved in part, the rest is left unchanged: model\.rows"):
        dcp_states.dcp.load(target, storage_reader=StorageReader(tmp_path, "a/rank-1"))

    assert torch.equal(target["model"]["rows"][4:], dcp_states.make_global("rows", 3)[4:])
    assert bool((target["model"]["rows"][:4] == -1).all())


def test_a_rank_that_fails_leaves_the_old_checkpoint_and_the_next_save_works(world: World, tmp_path: Path) -> None:
    world(2)(dcp_states.save, str(tmp_path), "a", 1)

    outcome = world(2)(dcp_states.fail_and_save_again, str(tmp_path))

    assert [each["ranks"] for each in outcome] == [[1], [1]]
    assert all("Unpicklable: it is wrong" in each["text"] for each in outcome)
    assert max(each["seconds"] for each in outcome) < PROMPT_S
    assert load_here(tmp_path, "a", 1) == []
    assert load_here(tmp_path, "b", 3) == []


def test_a_rank_that_is_killed_leaves_the_old_checkpoint(world: World, tmp_path: Path) -> None:
    world(2)(dcp_states.save, str(tmp_path), "a", 1)

    found = run_ranks(2, dcp_states.die_while_saving, str(tmp_path), timeout_s=RUN_S, lost=(1,))

    assert found[0] != "saved"
    assert load_here(tmp_path, "a", 1) == []
    world(2)(dcp_states.save, str(tmp_path), "b", 2)
    assert load_here(tmp_path, "b", 2) == []


@pytest.mark.parametrize("has_stores", [False, True])
def test_paths_that_are_local_to_each_node_are_refused(world: World, tmp_path: Path, has_stores: bool) -> None:
    for rank in range(2) if has_stores else ():
        holdfast.open(tmp_path / f"s-{rank}").save("before", {})

    outcome = world(2)(dcp_states.save_to_own_path, str(tmp_path / "s"))

    assert all("the path is local to" in each for each in outcome)
    assert not [name for name in holdfast.open(tmp_path / "s-0").snapshots() if name.name == "a"]
    assert (tmp_path / "s-1").exists() == has_stores


@FSDP
def test_fsdp_training_goes_on_with_another_number_of_ranks(world: World, tmp_path: Path) -> None:
    wanted = world(2)(dcp_states.train_and_save, str(tmp_path))

    found = world(3)(dcp_states.load_and_train, str(tmp_path), False)

    assert found[0][0] == pytest.approx(wanted[0][0], rel=1e-5)
    # The later losses of torch 2.8 differ from those of two ranks, with its own files too.
    assert found == world(3)(dcp_states.load_and_train, str(tmp_path), True)


def test_a_save_in_the_background_keeps_what_was_there_when_it_began(world: World, tmp_path: Path) -> None:
    assert world(2)(dcp_states.save_in_thread, str(tmp_path)) == [[], []]


@needs_torch("distributed.checkpoint.state_dict_saver.AsyncCheckpointerType")
@pytest.mark.slow
def test_a_save_in_another_process_keeps_what_was_there_when_it_began(world: World, tmp_path: Path) -> None:
    assert run_ranks(2, dcp_states.save_in_process, str(tmp_path), timeout_s=RUN_S) == [[], []]
