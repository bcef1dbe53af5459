"""Exported files checked against their receipt and their snapshot: every kind of change is found and named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.errors import BadFile, NotFound
from holdfast.formats.export import FORMATS
from holdfast.formats.receipt import read_receipt, write_receipt
from holdfast.formats.verifying import check_export, read_export_receipt
from tests.kit.exports import make_state


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    store = holdfast.open(tmp_path / "store")
    store.save("a", make_state() | {"config.json": "{}"})
    return store


def _check(path: Path) -> list[str]:
    return [str(finding) for finding in check_export(str(path), read_export_receipt(str(path)))]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("choices", [{}, {"dtype": torch.bfloat16}, {"max_shard_size": 2000}])
def test_an_export_agrees_with_its_receipt_and_its_snapshot(
    store: holdfast.Store, tmp_path: Path, format: str, choices: Any
) -> None:
    if format == "hf":
        pytest.importorskip("huggingface_hub", reason="needs huggingface_hub, which `make test` installs")
    store.export("a", tmp_path / "out", format=format, select="model", **choices)

    assert store.verify_export(tmp_path / "out", "a") == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_whole_training_state_agrees(store: holdfast.Store, tmp_path: Path, format: str) -> None:
    store.export("a", tmp_path / "out", format=format)

    assert store.verify_export(tmp_path / "out", "a") == []


def test_a_tensor_that_is_the_whole_tree_agrees(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("alone", torch.arange(5.0))

    store.export("alone", tmp_path / "out", format="torch")

    assert store.verify_export(tmp_path / "out", "alone") == []


@pytest.mark.parametrize("format", FORMATS)
def test_one_flipped_bit_is_found_and_named(store: holdfast.Store, tmp_path: Path, format: str) -> None:
    store.save("x", {"x": torch.zeros(300_000), "y": torch.ones(3)})
    store.export("x", tmp_path / "out", format=format)
    path = max(
        (each for each in [tmp_path / "out", *(tmp_path / "out").rglob("*")] if each.is_file()),
        key=lambda each: each.stat().st_size,
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    (finding,) = _check(tmp_path / "out")

    assert finding.startswith("x: the receipt has float32 (300000,), digest ")


def _change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"count": tensors["count"].int()}


def _rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {("counts" if name == "count" else name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "findings"),
    [
        (_change, ["count: the receipt has int64 (9,)"]),
        (_rename, ["counts: not in the receipt; found int64 (9,)", "count: missing; the receipt has int64 (9,)"]),
        (lambda found: found | {"new": torch.ones(2)}, ["new: not in the receipt; found float32 (2,)"]),
        (lambda found: found | {"count": found["count"].view(3, 3)}, ["count: the receipt has int64 (9,)"]),
    ],
)
def test_every_change_is_named(
    store: holdfast.Store, tmp_path: Path, change: Callable[[Any], Any], findings: list[str]
) -> None:
    store.export("a", tmp_path / "out", select="model")
    save_file({name: tensor.clone() for name, tensor in change(load_file(tmp_path / "out")).items()}, tmp_path / "out")

    found = _check(tmp_path / "out")

    assert len(found) == len(findings)
    assert all(each.startswith(expected) for each, expected in zip(found, findings, strict=True))


def test_a_changed_file_beside_the_weights_is_named(store: holdfast.Store, tmp_path: Path) -> None:
    store.export("a", tmp_path / "out", format="hf", select="model")
    (tmp_path / "out" / "config.json").write_text("[]")
    (tmp_path / "out" / "extra.txt").write_text("new")

    found = _check(tmp_path / "out")

    assert [each.partition(":")[0] for each in found] == ["config.json", "extra.txt"]


def test_another_snapshot_is_named(store: holdfast.Store, tmp_path: Path) -> None:
    store.export("a", tmp_path / "out", select="model")
    store.save("b", make_state(1))

    (finding,) = store.verify_export(tmp_path / "out", "b")

    assert finding.name == "b"


def test_a_copy_elsewhere_is_checked_by_the_receipt_alone(store: holdfast.Store, tmp_path: Path) -> None:
    done = store.export("a", tmp_path / "out", format="dcp")
    shutil.move(tmp_path / "out", tmp_path / "moved")
    shutil.rmtree(tmp_path / "store")
    write_receipt(str(tmp_path / "receipt.json"), done.receipt)

    assert list(check_export(str(tmp_path / "moved"), read_receipt(str(tmp_path / "receipt.json")))) == []


def test_files_without_a_receipt_are_refused(store: holdfast.Store, tmp_path: Path) -> None:
    store.export("a", tmp_path / "out", receipt=tmp_path / "elsewhere.json")

    with pytest.raises(NotFound, match=r"has no receipt .* name one with --receipt FILE"):
        store.verify_export(tmp_path / "out", "a")


def test_the_receipt_of_an_import_is_refused(store: holdfast.Store, tmp_path: Path) -> None:
    store.export("a", tmp_path / "out.safetensors", select="model")
    receipt = store.import_(tmp_path / "out.safetensors", "back").receipt

    with pytest.raises(BadFile, match="the receipt is of an import; `holdfast verify-import` checks it"):
        list(check_export(str(tmp_path / "out.safetensors"), receipt))
