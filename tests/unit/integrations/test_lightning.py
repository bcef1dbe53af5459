"""The CheckpointIO for Lightning: names, markers, who owns a snapshot, and what is deleted."""

from __future__ import annotations

import os
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.integrations.marker import read_marker

pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'holdfast[lightning]'")

from holdfast.integrations.lightning import HoldfastCheckpointIO, open_checkpoint


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> holdfast.Store:
    monkeypatch.chdir(tmp_path)
    return holdfast.open("store")


def _make(value: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((4,), value)}, "global_step": 7, **more}


def _names(store: holdfast.Store) -> list[str]:
    return [snapshot.name for snapshot in store.snapshots()]


def _read(path: str | Path) -> float:
    return float(torch.load(path)["state_dict"]["weight"][0])


def test_a_checkpoint_is_loaded_from_the_path_to_which_it_was_saved(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store)
    plugin.save_checkpoint(_make(2.0), "out/epoch=0-step=7.ckpt")

    loaded = plugin.load_checkpoint("out/epoch=0-step=7.ckpt")
    assert torch.equal(loaded["state_dict"]["weight"], torch.full((4,), 2.0))
    assert loaded["global_step"] == 7
    assert store.snapshot("out/epoch=0-step=7").metadata["step"] == 7


@pytest.mark.parametrize(
    ("prefix", "path", "name"),
    [
        (None, "out/last.ckpt", "out/last"),
        (None, "out/../last.ckpt", "last"),
        (None, "out/weights.pt", "out/weights.pt"),
        ("run/", "out/last.ckpt", "run/last"),
        ("", "out/last.ckpt", "last"),
        ("run/", "out/.temp.ckpt", "run/.temp"),
    ],
)
def test_the_name_of_a_snapshot(store: holdfast.Store, prefix: str | None, path: str, name: str) -> None:
    HoldfastCheckpointIO(store, prefix=prefix).save_checkpoint(_make(), path)

    assert _names(store) == [name]


def test_a_path_outside_of_the_working_directory_is_a_name_without_its_first_slash(
    store: holdfast.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    HoldfastCheckpointIO(store).save_checkpoint(_make(), tmp_path / "out" / "last.ckpt")

    assert _names(store) == [f"{tmp_path}/out/last".strip("/")]


def test_saving_to_a_path_again_overwrites_and_frees(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store)
    plugin.save_checkpoint(_make(1.0), "last.ckpt")
    plugin.save_checkpoint(_make(2.0), "last.ckpt")

    assert _names(store) == ["last"]
    assert _read("last.ckpt") == 2.0
    assert store.check() == []


def test_without_gc_the_space_is_left_for_later(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store, gc=False)
    plugin.save_checkpoint(_make(1.0), "last.ckpt")
    plugin.save_checkpoint(_make(2.0), "last.ckpt")

    assert store.check() != []


def test_two_folders_with_one_prefix_do_not_overwrite_each_other(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store, prefix="run/")
    for number, folder in enumerate(("a", "b", "c")):
        plugin.save_checkpoint(_make(number), f"{folder}/last.ckpt")
    plugin.save_checkpoint(_make(9), "b/last.ckpt")

    assert _names(store) == ["run/last", "run/last~2", "run/last~3"]
    assert [_read(f"{folder}/last.ckpt") for folder in "abc"] == [0.0, 9.0, 2.0]


def test_a_tag_of_the_same_name_is_left_alone(store: holdfast.Store) -> None:
    store.save("other", {"x": 1})
    store.tag("run/last", "other")
    HoldfastCheckpointIO(store, prefix="run/").save_checkpoint(_make(5.0), "last.ckpt")

    assert _names(store) == ["other", "run/last~2"]
    assert store.load("run/last") == {"x": 1}


def test_a_save_that_was_killed_before_its_marker_is_overwritten_by_the_next(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store, prefix="run/")
    plugin.save_checkpoint(_make(1.0), "last.ckpt")
    os.unlink("last.ckpt")
    plugin.save_checkpoint(_make(2.0), "last.ckpt")

    assert _names(store) == ["run/last"]
    assert _read("last.ckpt") == 2.0


def test_the_leftover_of_another_host_is_not_overwritten(
    store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = HoldfastCheckpointIO(store, prefix="run/")
    monkeypatch.setattr("socket.gethostname", lambda: "other-host")
    plugin.save_checkpoint(_make(1.0), "last.ckpt")
    os.unlink("last.ckpt")
    monkeypatch.setattr("socket.gethostname", lambda: "this-host")
    plugin.save_checkpoint(_make(2.0), "last.ckpt")

    assert _names(store) == ["run/last", "run/last~2"]


def test_removing_deletes_marker_and_snapshot_and_frees_the_space(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store)
    plugin.save_checkpoint(_make(1.0), "one.ckpt")
    plugin.save_checkpoint(_make(2.0), "two.ckpt")
    plugin.remove_checkpoint("one.ckpt")

    assert not os.path.exists("one.ckpt")
    assert _names(store) == ["two"]
    assert store.check() == []


def test_removing_what_is_not_there_does_nothing(store: holdfast.Store) -> None:
    HoldfastCheckpointIO(store).remove_checkpoint("absent.ckpt")

    assert _names(store) == []


def test_removing_a_link_keeps_the_checkpoint_it_points_to(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store)
    plugin.save_checkpoint(_make(1.0), "epoch=0.ckpt")
    os.symlink("epoch=0.ckpt", "last.ckpt")
    assert plugin.load_checkpoint("last.ckpt")["global_step"] == 7

    plugin.remove_checkpoint("last.ckpt")
    assert _names(store) == ["epoch=0"]
    assert os.listdir() != []
    assert not os.path.lexists("last.ckpt")


def test_saving_to_a_link_keeps_the_checkpoint_it_pointed_to(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store)
    plugin.save_checkpoint(_make(1.0), "epoch=0.ckpt")
    os.symlink("epoch=0.ckpt", "last.ckpt")
    plugin.save_checkpoint(_make(2.0), "last.ckpt")

    assert (_read("epoch=0.ckpt"), _read("last.ckpt")) == (1.0, 2.0)


def test_removing_a_copy_of_a_marker_keeps_the_snapshot(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store)
    plugin.save_checkpoint(_make(1.0), "a.ckpt")
    shutil.copy("a.ckpt", "b.ckpt")
    plugin.remove_checkpoint("b.ckpt")

    assert _names(store) == ["a"]
    assert _read("a.ckpt") == 1.0


def test_a_marker_that_was_moved_takes_its_snapshot_along(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store)
    plugin.save_checkpoint(_make(1.0), "a.ckpt")
    os.rename("a.ckpt", "b.ckpt")
    plugin.save_checkpoint(_make(2.0), "b.ckpt")
    assert _names(store) == ["a"]

    plugin.remove_checkpoint("b.ckpt")
    assert _names(store) == []


def test_a_store_that_was_moved_is_found_by_its_id(store: holdfast.Store) -> None:
    HoldfastCheckpointIO(store).save_checkpoint(_make(3.0), "last.ckpt")
    os.rename("store", "moved")

    assert HoldfastCheckpointIO("moved").load_checkpoint("last.ckpt")["global_step"] == 7


def test_a_marker_of_another_store_is_loaded_from_there_and_never_deleted_there(store: holdfast.Store) -> None:
    HoldfastCheckpointIO("other").save_checkpoint(_make(3.0), "last.ckpt")
    plugin = HoldfastCheckpointIO(store)

    assert plugin.load_checkpoint("last.ckpt")["global_step"] == 7
    plugin.remove_checkpoint("last.ckpt")
    assert not os.path.exists("last.ckpt")
    assert _names(holdfast.open("other")) == ["last"]


def test_a_name_or_tag_in_the_store_is_loaded(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store, prefix="run/")
    plugin.save_checkpoint(_make(), "last.ckpt")
    store.tag("good", "run/last")

    assert plugin.load_checkpoint("holdfast:run/last")["global_step"] == 7
    assert plugin.load_checkpoint("holdfast:good", map_location="cpu")["global_step"] == 7
    with pytest.raises(holdfast.NotFound, match="run/lost"):
        plugin.load_checkpoint("holdfast:run/lost")


def test_a_file_of_torch_is_still_loaded_and_removed(store: holdfast.Store) -> None:
    torch.save(_make(4.0), "old.ckpt")
    plugin = HoldfastCheckpointIO(store)

    assert plugin.load_checkpoint("old.ckpt")["global_step"] == 7
    plugin.remove_checkpoint("old.ckpt")
    assert not os.path.exists("old.ckpt")
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint("old.ckpt")


def test_a_snapshot_is_opened_as_a_file_for_torch_load(store: holdfast.Store) -> None:
    HoldfastCheckpointIO(store, prefix="run/").save_checkpoint(_make(6.0), "last.ckpt")

    assert float(torch.load(open_checkpoint(store, "run/last"))["state_dict"]["weight"][0]) == 6.0
    with pytest.raises(holdfast.NotFound):
        open_checkpoint(store, "run/lost")


def test_values_that_need_pickle_are_allowed_on_both_sides(store: holdfast.Store) -> None:
    checkpoint = _make(hyper_parameters={"loss": partial(torch.sum, dim=0)})
    with pytest.raises(holdfast.Unsupported, match="loss"):
        HoldfastCheckpointIO(store).save_checkpoint(checkpoint, "last.ckpt")
    assert not os.path.exists("last.ckpt")

    plugin = HoldfastCheckpointIO(store, allow_pickle=True)
    plugin.save_checkpoint(checkpoint, "last.ckpt")
    with pytest.raises(holdfast.HoldfastError, match="allow_pickle"):
        plugin.load_checkpoint("last.ckpt")
    assert plugin.load_checkpoint("last.ckpt", weights_only=False)["hyper_parameters"]["loss"].keywords == {"dim": 0}


def test_what_has_no_meaning_here_is_refused(store: holdfast.Store) -> None:
    plugin = HoldfastCheckpointIO(store)
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint(_make(), "last.ckpt", storage_options={"x": 1})
    plugin.save_checkpoint(_make(), "last.ckpt")
    with pytest.raises(TypeError, match="map_location is a device here"):
        plugin.load_checkpoint("last.ckpt", map_location={"cuda:0": "cpu"})


def test_the_plugin_can_be_pickled_for_spawned_processes(store: holdfast.Store) -> None:
    HoldfastCheckpointIO(store).save_checkpoint(_make(), "last.ckpt")

    again = pickle.loads(pickle.dumps(HoldfastCheckpointIO(store)))
    assert again.load_checkpoint("last.ckpt")["global_step"] == 7


def test_a_marker_that_was_written_names_the_store_and_the_snapshot(store: holdfast.Store, tmp_path: Path) -> None:
    HoldfastCheckpointIO(store).save_checkpoint(_make(), "last.ckpt")

    marker = read_marker("last.ckpt")
    assert marker is not None
    assert (marker.store, marker.name) == (str(tmp_path / "store"), "last")
