"""The benchmark of device digests: each workload is compared with both other hashes; a wrong digest ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.kit.measure import TINY, WrongResult
from bench.suites import device_digest
from holdfast.tensors.device_digest.choice import digest_pieces


def _hash_nothing(storage: object, *, stable_hash: bool) -> str:
    """Stand in for torch's hash, which takes half a minute to compile."""
    return "0" * 40


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave our operations as they are: the compiler takes a minute."""
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)


def test_each_workload_has_a_row_against_each_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_digest, "hash_storage", _hash_nothing)

    rows = device_digest.run(TINY, tmp_path)

    assert [row.against for row in rows] == [
        *["torch's content-store hash"] * 4,
        *["blake3 package"] * 4,
        "torch's content-store hash, stable (SHA-1)",
    ]
    assert all(row.figure > 0 and row.unit == "GB per CPU second" for row in rows)


def test_a_wrong_digest_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_digest, "hash_storage", _hash_nothing)
    monkeypatch.setattr(
        device_digest,
        "digest_pieces",
        lambda pieces, backend: digest_pieces(pieces, backend=backend)[:: -1 if backend == "torch" else 1],
    )

    with pytest.raises(WrongResult, match="'torch' returned digests that are not those"):
        device_digest.run(TINY, tmp_path)
