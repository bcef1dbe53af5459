"""The public face, used as its documentation shows it: one walk through everything a user does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast


def test_a_run_is_saved_looked_into_and_resumed(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.open(tmp_path / "ckpts") as store:
        for step in (99, 100):
            torch.autograd.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            store.save_async(f"run1/step-{step}", {"model": model, "optim": optimizer, "step": step}).wait()

    store = holdfast.open(tmp_path / "ckpts")
    snap = store.latest("run1/")
    assert snap is not None
    assert snap.name == "run1/step-100"
    weight = snap["model.0.weight"]
    assert isinstance(weight, holdfast.LazyTensor)
    assert torch.equal(weight[0:3], model.get_parameter("0.weight")[0:3])
    assert weight.shape == (8, 4)

    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    state = {"model": other, "optim": torch.optim.AdamW(other.parameters()), "step": 0}
    assert store.load_into(snap, state) is state

    assert state["step"] == 100
    assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))
    assert store.load("run1/step-99", only="step") == {"step": 99}
    assert store.check(read=True) == []


def test_a_failed_load_changes_nothing_and_says_what_is_wrong(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "ckpts")
    store.save("x", {"w": torch.ones(2, 3)})
    target = {"w": torch.zeros(3, 2), "b": torch.zeros(1)}

    with pytest.raises(holdfast.Mismatch) as caught:
        store.load_into("x", target)

    assert caught.value.problems == (
        "w: shape (3, 2) in the target, (2, 3) in the snapshot",
        "b: the target has it, the snapshot does not",
    )
    assert target["w"].count_nonzero() == 0
