"""Digests by the CPU and by plain torch operations are those of the blake3 package."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from holdfast.digest import hash_bytes
from holdfast.errors import Unsupported
from holdfast.tensors.device_digest import choice
from holdfast.tensors.device_digest.choice import DigestBackend, digest, digest_pieces
from tests.kit import device_digests
from tests.kit.device_digests import CPU, piece_lists
from tests.tensor_zoo import DTYPES, make_bytes, make_items

BACKENDS: list[DigestBackend] = ["cpu", "torch"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_official_test_vectors(backend: DigestBackend) -> None:
    device_digests.check_official_vectors(backend)


@settings(max_examples=20)
@given(piece_lists())
def test_pieces_of_any_length_anywhere(drawn: tuple[int, list[tuple[int, int]]]) -> None:
    device_digests.check_pieces("torch", *drawn)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_pieces_are_hashed_in_parts(backend: DigestBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    device_digests.check_parts(backend, monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gaps_are_not_hashed(backend: DigestBackend) -> None:
    device_digests.check_gaps(backend)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "complex32", "uint4", "bool", "complex128"])
def test_every_dtype_is_hashed_as_its_bytes(name: str) -> None:
    dtype, items = DTYPES[name], 96
    for backend in BACKENDS:
        assert digest(make_items(dtype, items), backend=backend) == hash_bytes(make_bytes(dtype, items))


def test_pieces_of_the_cpu_are_hashed_by_the_cpu_unless_another_backend_is_forced() -> None:
    assert choice.choose_backend(CPU).backend == "cpu"


def test_nothing_has_no_digests() -> None:
    assert digest_pieces([]) == []


def test_a_tensor_without_bytes_of_its_own_is_refused() -> None:
    with pytest.raises(Unsupported, match="a meta tensor has no bytes"):
        digest(torch.zeros(3, device="meta"))
    with pytest.raises(Unsupported, match="made of other tensors"):
        digest(torch.eye(3).to_sparse())


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be one of cpu, torch, triton, not 'cuda'"):
        digest(torch.zeros(3), backend="cuda")  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("backend", BACKENDS)
def test_generators_are_left_as_they_are(backend: DigestBackend) -> None:
    before = torch.get_rng_state()

    digest(torch.zeros(3000), backend=backend)

    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_that_requires_grad_has_a_digest() -> None:
    tensor = torch.arange(6.0, requires_grad=True)

    assert digest(tensor, backend="torch") == hash_bytes(tensor.detach().numpy().tobytes())
