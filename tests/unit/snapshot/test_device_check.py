"""What is on a device is compared with the digests of its chunks; what is on the CPU, or a part of a chunk, is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.errors import Corrupt, DigestMismatch
from holdfast.snapshot import entries
from holdfast.snapshot.entries import verify_on_devices

DEVICE = torch.device("cuda", 0)
OPENED: Any = SimpleNamespace(name="x", reader=SimpleNamespace(manifest=SimpleNamespace(names=["a", "b"])))


def _make_part(number: int, *, is_cpu: bool = False, size_bytes: int = 4) -> Any:
    tensor = SimpleNamespace(is_cpu=is_cpu, device=DEVICE)
    return SimpleNamespace(number=number, tensor=tensor, size_bytes=size_bytes)


def _check(monkeypatch: pytest.MonkeyPatch, parts: list[Any], found: list[list[tuple[bool, bool]]]) -> None:
    """Verify parts whose cells are whole or not, and held or not."""

    def hash_all(cells: list[Any]) -> list[Any]:
        assert len(cells) == len(found)
        return [[(SimpleNamespace(is_whole=is_whole), is_held) for is_whole, is_held in each] for each in found]

    monkeypatch.setattr(entries, "make_cells", lambda part, *rest: SimpleNamespace(part=part))
    monkeypatch.setattr(entries, "hash_on_devices", hash_all)
    verify_on_devices(parts, OPENED, None)  # type: ignore[arg-type]  # passed on


def test_a_chunk_that_differs_is_a_damaged_copy_and_not_a_damaged_store(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [_make_part(0), _make_part(1)]

    with pytest.raises(Corrupt, match=r"'x', b: its bytes on cuda:0 .* the copy to the device is damaged") as caught:
        _check(monkeypatch, parts, [[(True, True)], [(True, True), (True, False)]])

    assert not isinstance(caught.value, DigestMismatch)
    assert caught.value.key == "b"


def test_parts_of_chunks_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(monkeypatch, [_make_part(0)], [[(False, False), (True, True)]])


def test_the_cpu_and_tensors_without_bytes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(monkeypatch, [_make_part(0, is_cpu=True), _make_part(1, size_bytes=0)], [])
