"""Receipts: equal after a round trip, refused when edited, and compared with what was measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.digest import hash_bytes
from holdfast.errors import BadFile
from holdfast.formats.receipt import (
    CarriedFile,
    CastErrors,
    LeftOut,
    Receipt,
    ReceiptTensor,
    TensorDigest,
    check_files,
    check_tensors,
    decode_receipt,
    encode_receipt,
    read_receipt,
    write_receipt,
)
from holdfast.json_text import canonical_json, parse_json

_EXACT = TensorDigest("float32", (2, 3), hash_bytes(b"exact"))
_CAST = TensorDigest("bfloat16", (2, 3), hash_bytes(b"cast"))
_RECEIPT = Receipt(
    kind="import",
    format="safetensors",
    snapshot="llama/base",
    root=hash_bytes(b"root"),
    time="2026-01-31T12:00:00Z",
    holdfast="1.0",
    place="./model.safetensors",
    tensors=(
        ReceiptTensor("model.w", "w", "model.safetensors", _EXACT, _CAST, CastErrors(0.5, 0.25, 1)),
        ReceiptTensor("model.b", "b", "model.safetensors", _EXACT, _EXACT),
    ),
    files=(CarriedFile("config.json", 12, hash_bytes(b"config")),),
    left_out=(LeftOut("step", "safetensors has no numbers"),),
)


def test_a_receipt_that_is_written_is_read_back_equal(tmp_path: Path) -> None:
    path = str(tmp_path / "receipt.json")

    write_receipt(path, _RECEIPT)
    write_receipt(path, _RECEIPT)

    assert read_receipt(path) == _RECEIPT
    assert os.listdir(tmp_path) == ["receipt.json"]


def test_equal_receipts_have_equal_bytes() -> None:
    assert encode_receipt(_RECEIPT) == encode_receipt(replace(_RECEIPT))


def test_no_byte_of_a_receipt_can_be_changed() -> None:
    data = encode_receipt(_RECEIPT)
    for at in range(0, len(data), 7):
        edited = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(BadFile, match=r"r\.json (is not a receipt|was changed)"):
            decode_receipt(edited, where="r.json")


def test_a_receipt_with_another_number_says_that_it_was_changed() -> None:
    edited = encode_receipt(_RECEIPT).replace(b'"size_bytes":12', b'"size_bytes":13')

    with pytest.raises(BadFile, match=r"r\.json was changed after it was written"):
        decode_receipt(edited, where="r.json")


def _drop(fields: dict[str, Any]) -> None:
    del fields["root"]


def _repeat(fields: dict[str, Any]) -> None:
    fields["tensors"] *= 2


def _change_uncast(fields: dict[str, Any]) -> None:
    del fields["tensors"][0]["cast"]


def _negate(fields: dict[str, Any]) -> None:
    fields["files"][0]["size_bytes"] = -1


def _deepen(fields: dict[str, Any]) -> None:
    fields["tensors"][0]["source"]["shape"] = [1] * 65


def _rename(fields: dict[str, Any]) -> None:
    fields["kind"] = "exit"


@pytest.mark.parametrize("change", [_drop, _repeat, _change_uncast, _negate, _deepen, _rename])
def test_a_malformed_receipt_is_refused_even_before_its_digest(change: Callable[[dict[str, Any]], None]) -> None:
    fields = parse_json(encode_receipt(_RECEIPT), where="x")
    change(fields)

    with pytest.raises(BadFile, match=r"r\.json is not a receipt of Holdfast"):
        decode_receipt(canonical_json(fields), where="r.json")


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(BadFile, match="is not a receipt"):
        read_receipt(str(tmp_path / "pipe"))


def test_equal_tensors_give_no_finding() -> None:
    measured = [("b", _EXACT), ("w", _EXACT)]

    assert list(check_tensors(_RECEIPT, measured, side="source", by_file_names=True)) == []


def test_missing_added_and_different_tensors_are_found_and_named() -> None:
    measured = [("model.w", _EXACT), ("model.c", _EXACT)]

    findings = list(check_tensors(_RECEIPT, measured, side="result", by_file_names=False))

    assert [finding.name for finding in findings] == ["model.w", "model.c", "model.b"]
    assert str(findings[0]) == f"model.w: the receipt has {_CAST}; found {_EXACT}"
    assert str(findings[1]).startswith("model.c: not in the receipt; found float32 (2, 3)")
    assert str(findings[2]).startswith("model.b: missing; the receipt has float32 (2, 3)")


def test_a_carried_file_that_differs_is_found() -> None:
    changed = CarriedFile("config.json", 12, hash_bytes(b"other"))

    assert list(check_files(_RECEIPT, _RECEIPT.files)) == []
    assert [finding.name for finding in check_files(_RECEIPT, [changed])] == ["config.json"]
