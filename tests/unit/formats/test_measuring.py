"""Whatever differs between the files, the receipt and the snapshot is found and named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.errors import BadFile, NotFound
from holdfast.formats.importing import ImportResult
from holdfast.formats.verifying import check_import, check_stored
from tests.kit.checkpoints import make_state


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file(make_state(), tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text('{"a": 1}')
    return tmp_path / "model"


@pytest.fixture
def done(store: holdfast.Store, folder: Path) -> ImportResult:
    return store.import_(folder, "m", rename={"head.": "top."})


def _find_names(folder: Path, done: ImportResult) -> list[str]:
    return [finding.name for finding in check_import(str(folder), done.receipt)]


def test_equal_files_and_an_equal_snapshot_have_no_findings(
    store: holdfast.Store, folder: Path, done: ImportResult
) -> None:
    assert _find_names(folder, done) == []
    assert store.verify_import(folder, "m") == []


def test_one_changed_bit_is_found_in_its_tensor(store: holdfast.Store, folder: Path, done: ImportResult) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    found = _find_names(folder, done)

    assert len(found) == 1
    assert found == [finding.name for finding in store.verify_import(folder, "m")]


def _change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    state = make_state()
    state.pop(name, None)
    if tensor is not None:
        state[name] = tensor
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("head.codes", None),
        ("head.codes", torch.arange(37, dtype=torch.int8)),
        ("head.codes", torch.arange(37, dtype=torch.uint8).view(37, 1)),
        ("head.new", torch.ones(2)),
        ("head.empty", torch.empty(0, 5)),
    ],
)
def test_a_tensor_that_is_missing_added_or_of_another_form_is_found(
    folder: Path, done: ImportResult, name: str, tensor: torch.Tensor | None
) -> None:
    _change(folder, name, tensor)

    assert _find_names(folder, done) == [name]


def test_a_carried_file_that_changed_or_is_missing_is_found(folder: Path, done: ImportResult) -> None:
    (folder / "config.json").write_text('{"a": 2}')
    (folder / "tokenizer.json").write_text("{}")

    assert _find_names(folder, done) == ["config.json", "tokenizer.json"]

    (folder / "config.json").unlink()
    assert _find_names(folder, done) == ["tokenizer.json", "config.json"]


def test_a_snapshot_that_was_replaced_is_found(store: holdfast.Store, done: ImportResult) -> None:
    store.save("m", {"x": 1}, overwrite=True)

    findings = list(check_stored(store.repository, store.snapshot("m").record, done.receipt))

    assert [finding.name for finding in findings] == ["m"]


def test_views_and_casts_are_compared_with_what_is_stored(store: holdfast.Store, tmp_path: Path) -> None:
    base = torch.randn(60, 70)
    torch.save({"a": base, "b": base.t(), "c": base[:, ::3], "d": base[:1].expand(5, 70)}, tmp_path / "a.pt")

    store.import_(tmp_path / "a.pt", "plain")
    store.import_(tmp_path / "a.pt", "cast", dtype=torch.float16)

    assert store.verify_import(tmp_path / "a.pt", "plain") == []
    assert store.verify_import(tmp_path / "a.pt", "cast") == []


def test_a_digest_in_the_receipt_that_the_snapshot_does_not_have_is_found(
    store: holdfast.Store, done: ImportResult
) -> None:
    first, *rest = done.receipt.tensors
    forged = replace(first, result=replace(first.result, digest=rest[0].result.digest))
    receipt = replace(done.receipt, tensors=(forged, *rest))

    findings = list(check_stored(store.repository, store.snapshot("m").record, receipt))

    assert [finding.name for finding in findings] == [first.name]


def test_a_snapshot_that_was_not_imported_has_no_receipt(store: holdfast.Store, folder: Path) -> None:
    store.save("own", make_state())

    with pytest.raises(NotFound, match="was not imported"):
        store.verify_import(folder, "own")


def test_a_receipt_of_an_export_is_refused(folder: Path, done: ImportResult) -> None:
    with pytest.raises(BadFile, match="verify-export"):
        list(check_import(str(folder), replace(done.receipt, kind="export")))
