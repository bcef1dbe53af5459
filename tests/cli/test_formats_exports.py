"""The verbs `export` and `verify-export`: what they write and print, and their exit codes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from tests.cli.runs import Cli


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """A store with a training state."""
    model = {"w": torch.arange(6.0).view(2, 3) / 7, "n": torch.arange(3)}
    holdfast.open(cli.store).save("run/1", {"model": model, "step": 3, "rates": [0.5, 0.25]})
    return cli


def test_it_prints_what_was_written_and_what_was_left_out(saved: Cli) -> None:
    ran = saved("export", "run/1", "out.safetensors")

    folder = saved.store.parent
    assert ran.code == 0
    assert ran.out == (
        f"exported run/1 as safetensors to {folder}/out.safetensors: 2 tensors, 48 B;"
        f" receipt {folder}/out.safetensors.receipt.json\n"
    )
    assert ran.err == (
        "holdfast: left out: step; an int: a safetensors file contains tensors only\n"
        "holdfast: left out: rates.0, rates.1; a float: a safetensors file contains tensors only\n"
    )
    assert sorted(load_file(folder / "out.safetensors")) == ["model.n", "model.w"]


def test_a_cast_is_reported_with_its_error(saved: Cli) -> None:
    out = saved.ok("export", "run/1", "out", "--format", "hf", "--select", "model", "--dtype", "float16")

    assert "cast 1 tensor to float16: largest relative error 0.000" in out
    assert "in model.w, 0 values overflowed\n" in out


def test_every_option_reaches_the_export(saved: Cli) -> None:
    saved.ok("export", "run/1", "out", "--format", "dcp")
    saved.ok("export", "run/1", "out", "--format", "dcp", "--force", "--max-shard-size", "1", "--exclude", "model.n")

    out = saved.store.parent / "out"
    assert len(list(out.glob("*.distcp"))) > 1
    assert [each["name"] for each in json.loads((out / "holdfast-receipt.json").read_text())["tensors"]] == ["model.w"]


def test_json_has_the_facts(saved: Cli) -> None:
    found = json.loads(saved.ok("export", "run/1", "a.pt", "--format", "torch", "--receipt", "r.json", "--json"))

    assert (found["tensors"], found["bytes"], found["left_out"], found["format"]) == (2, 48, [], "torch")
    assert found["receipt"] == "r.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run/1", "out", "--max-shard-size", "big"], "'big' is not the size of a file"),
        (["run/1", "missing/out"], "does not exist; create it, or choose another destination"),
        (["run/1", "out", "--select", "modle"], "no leaf 'modle' in 'run/1'; did you mean"),
        (["run/9", "out"], "run/9"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(saved: Cli, arguments: list[str], message: str) -> None:
    before = sorted(saved.store.parent.iterdir())

    ran = saved("export", *arguments)

    assert ran.code == 2
    assert message in ran.err
    assert "Traceback" not in ran.err
    assert sorted(saved.store.parent.iterdir()) == before


def test_files_that_agree_are_reported_as_equal(saved: Cli) -> None:
    saved("export", "run/1", "out.safetensors")

    out = saved.ok("verify-export", "out.safetensors", "--against", "run/1")

    assert out == "compared 2 tensors and 0 files of out.safetensors with the receipt: all equal\n"


def test_a_difference_is_named_and_the_exit_code_is_1(saved: Cli) -> None:
    saved("export", "run/1", "out.safetensors")
    path = saved.store.parent / "out.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")

    ran = saved("verify-export", "out.safetensors")

    assert ran.code == 1
    assert ran.out.startswith("model.w: the receipt has float32 (2, 3)") or ran.out.startswith("model.n: the receipt")
    assert ran.out.endswith("of out.safetensors with the receipt: 1 difference\n")


def test_no_store_is_needed_with_a_receipt(saved: Cli) -> None:
    saved("export", "run/1", "out.safetensors", "--receipt", "proof.json")

    ran = saved.bare("-s", "/nowhere", "verify-export", "out.safetensors", "--receipt", "proof.json", "--json")

    assert ran.code == 0
    assert ran.json == {"destination": "out.safetensors", "findings": []}
