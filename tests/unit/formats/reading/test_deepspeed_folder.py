"""ZeRO checkpoints: the weights are those that DeepSpeed itself restores, and no object of DeepSpeed is made."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import BadFile, Untrusted
from holdfast.formats.reading.deepspeed_folder import is_zero_folder, read_zero_folder
from holdfast.repo.files import open_source_folder

_ROOT = Path(__file__).parents[4]
_RANKS = 2


def _save(folder: Path, stage: int) -> dict[str, torch.Tensor]:
    """Save a ZeRO checkpoint on two ranks; return the weights that DeepSpeed restores from it."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed, which `make test` installs")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    command = [sys.executable, "-m", "tests.kit.zero_run", str(folder), str(stage)]
    running = [
        subprocess.Popen([*command, str(rank), str(_RANKS), port], cwd=_ROOT, stdout=subprocess.DEVNULL)
        for rank in range(_RANKS)
    ]
    assert [process.wait(timeout=240) for process in running] == [0, 0]
    expected: dict[str, torch.Tensor] = torch.load(f"{folder}.pt", weights_only=True)
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_weights_are_those_that_deepspeed_restores(tmp_path: Path, stage: int) -> None:
    expected = _save(tmp_path / "zero", stage)
    store = holdfast.open(tmp_path / "store")

    done = store.import_(tmp_path / "zero", "m")

    loaded = store.load("m")
    assert done.receipt.format == "deepspeed"
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].float(), tensor.float()), name
    assert [each.name for each in done.receipt.left_out] == ["the optimizer state", "the training state"]
    assert store.verify_import(tmp_path / "zero", "m") == []

    (tmp_path / "zero" / "global_step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(BadFile, match=r"is incomplete: ZeRO stage \d of 2 ranks, and there are 1 files"):
        read_zero_folder(open_source_folder(str(tmp_path / "zero")))


def _write(folder: Path, optimizer: Any, **model: Any) -> None:
    """Write the two files of a rank, in the form that DeepSpeed gives them."""
    shapes = [OrderedDict(a=torch.Size([2, 3]), b=torch.Size([4]))]
    state = {"module": {}, "buffer_names": [], "param_shapes": shapes, "shared_params": {}, **model}
    folder.mkdir(exist_ok=True)
    torch.save({"optimizer_state_dict": optimizer}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save(state, folder / "mp_rank_00_model_states.pt")


def _make_optimizer(**changes: Any) -> dict[str, Any]:
    flat = torch.arange(10.0)
    return {"zero_stage": 2, "partition_count": 1, "single_partition_of_fp32_groups": [flat], **changes}


def test_weights_are_cut_from_the_flat_vector_and_ties_are_kept(tmp_path: Path) -> None:
    _write(tmp_path / "zero", _make_optimizer(), shared_params={"c": "a"})
    store = holdfast.open(tmp_path / "store")

    store.import_(tmp_path / "zero", "m")

    loaded = store.load("m")
    assert torch.equal(loaded["a"], torch.arange(6.0).view(2, 3))
    assert torch.equal(loaded["b"], torch.arange(6.0, 10.0))
    assert loaded["c"] is loaded["a"]


def test_the_newest_checkpoint_is_the_one_that_latest_names(tmp_path: Path) -> None:
    _write(tmp_path / "step2", _make_optimizer())
    assert not is_zero_folder(open_source_folder(str(tmp_path)))

    (tmp_path / "latest").write_text("step2\n")
    assert is_zero_folder(open_source_folder(str(tmp_path)))

    (tmp_path / "latest").write_text("../../step2")
    assert not is_zero_folder(open_source_folder(str(tmp_path)))
    shutil.rmtree(tmp_path / "step2")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"zero_stage": 4}, "ZeRO stage 4"),
        ({"partition_count": 2}, "of 2 ranks, and there are 1 files"),
        ({"single_partition_of_fp32_groups": [torch.ones(9)]}, "'b' ends after the last byte of its group"),
        ({"single_partition_of_fp32_groups": []}, "a rank has only 0 groups"),
        ({"single_partition_of_fp32_groups": [3]}, "no plain tensor"),
    ],
)
def test_a_checkpoint_that_is_not_complete_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    _write(tmp_path / "zero", _make_optimizer(**changes))

    with pytest.raises(BadFile, match=reason):
        read_zero_folder(open_source_folder(str(tmp_path / "zero")))


def test_objects_that_are_no_part_of_deepspeed_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "zero", _make_optimizer(extra=slice(1, 2)))

    with pytest.raises(Untrusted, match=r"slice, which is no part of DeepSpeed"):
        read_zero_folder(open_source_folder(str(tmp_path / "zero")))
