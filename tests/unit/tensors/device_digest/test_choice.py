"""A backend is used on a device only after it gave the digests of the CPU there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import NoReturn

import pytest
import torch

from holdfast.digest import Digest
from holdfast.errors import DeviceFault, Unsupported
from holdfast.tensors.device_digest import choice
from holdfast.tensors.device_digest.choice import (
    BackendChoice,
    choose_backend,
    digest_on_cpu,
    find_backend,
    find_kernels,
    make_check_batches,
)
from holdfast.tensors.device_digest.pieces import DevicePiece
from holdfast.tensors.device_digest.torch_ops import TorchKernels

CPU = torch.device("cpu")
OTHER = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Check every backend anew, and forget what the test made of it."""
    for cached in (choice._choose_checked, choice._check, choice._make_backend, choice._make_kernels):
        cached.cache_clear()
    yield
    for cached in (choice._choose_checked, choice._check, choice._make_backend, choice._make_kernels):
        cached.cache_clear()


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What each backend does on a device that is not there: the digests of the CPU, unless a test replaces it."""
    found: dict[str, object] = {"torch": digest_on_cpu, "triton": digest_on_cpu, "cpu": digest_on_cpu}
    batches = make_check_batches(CPU)
    monkeypatch.setattr(choice, "_make_backend", _Cached(found))
    monkeypatch.setattr(choice, "make_check_batches", lambda device: batches)
    monkeypatch.setattr(choice, "find_spec", lambda name: name)
    return found


class _Cached:
    """Looks like a cached function."""

    def __init__(self, found: dict[str, object]) -> None:
        self._found = found

    def __call__(self, backend: str, device: torch.device) -> object:
        return self._found[backend]

    def cache_clear(self) -> None:
        """Forget nothing: there is nothing."""


def _flip(pieces: Sequence[DevicePiece]) -> list[Digest]:
    first, *rest = digest_on_cpu(pieces)
    return [Digest(bytes([first[0] ^ 1]) + first[1:]), *rest]


def _fail(pieces: Sequence[DevicePiece]) -> list[Digest]:
    raise RuntimeError("no compiler\nmore lines")


def _do_nothing(pieces: Sequence[DevicePiece]) -> list[Digest]:
    raise DeviceFault("a kernel did not run")


@pytest.mark.parametrize(
    ("device", "backend"),
    [(CPU, "cpu"), (OTHER, "triton"), (torch.device("xpu", 0), "triton"), (torch.device("mps"), "torch")],
    ids=str,
)
def test_each_device_has_its_fastest_backend(backends: object, device: torch.device, backend: str) -> None:
    assert choose_backend(device).backend == backend


@pytest.mark.usefixtures("backends")
def test_without_triton_torch_operations_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend(OTHER) == BackendChoice("torch", "checked against the CPU on cuda:0")


def test_after_a_wrong_digest_bytes_are_copied_to_the_host(backends: dict[str, object]) -> None:
    backends["triton"] = _flip

    with pytest.warns(RuntimeWarning, match="by triton are not used on cuda:0: it returned wrong digests for 3 of 43"):
        found = choose_backend(OTHER)

    assert (found.backend, found.has_wrong) == ("cpu", True)
    assert choose_backend(OTHER) is found
    with pytest.raises(Unsupported, match="cannot be computed on cuda:0 by triton: it returned wrong digests"):
        find_backend("triton", OTHER)
    assert find_backend("cpu", OTHER) is digest_on_cpu


def test_a_full_device_is_checked_again_at_the_next_use(backends: dict[str, object]) -> None:
    def fail(pieces: object) -> NoReturn:
        raise torch.OutOfMemoryError("full")

    working, backends["triton"] = backends["triton"], fail
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = choose_backend(OTHER)
        assert (found.backend, found.has_wrong) == ("cpu", False)
        assert found.reason == "cuda:0 has no memory left to check its kernels; bytes are copied to the host"
        backends["triton"] = working

        assert choose_backend(OTHER).backend == "triton"


def test_after_a_kernel_that_did_nothing_bytes_are_copied_to_the_host(backends: dict[str, object]) -> None:
    backends["triton"] = _do_nothing

    with pytest.warns(RuntimeWarning, match="it returned a wrong digest of random bytes"):
        found = choose_backend(OTHER)

    assert (found.backend, found.has_wrong) == ("cpu", True)
    assert find_kernels(OTHER) is None


@pytest.mark.usefixtures("backends")
def test_kernels_are_those_of_the_chosen_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)

    assert isinstance(find_kernels(OTHER), TorchKernels)
    assert find_kernels(CPU) is None


def test_a_kernel_that_cannot_be_compiled_is_replaced_by_torch_operations(backends: dict[str, object]) -> None:
    backends["triton"] = _fail

    with pytest.warns(RuntimeWarning, match="it failed with RuntimeError: no compiler$"):
        found = choose_backend(OTHER)

    assert (found.backend, found.has_wrong) == ("torch", False)
    assert "triton: it failed with RuntimeError: no compiler" in found.reason


def test_if_every_backend_fails_bytes_are_copied_to_the_host(backends: dict[str, object]) -> None:
    backends["triton"] = backends["torch"] = _fail

    with pytest.warns(RuntimeWarning, match="are not used"):
        assert choose_backend(OTHER).backend == "cpu"


def test_triton_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)

    with pytest.raises(Unsupported, match="cannot be computed on cpu by triton: Triton is not installed"):
        find_backend("triton", CPU)


def test_the_check_has_lengths_and_offsets_of_all_kinds() -> None:
    pieces, long, short = make_check_batches(CPU)

    starts, lengths = [piece.start for piece in pieces], [piece.stop - piece.start for piece in pieces]
    assert {0, 1, 64, 1023, 1024, 1025, 65_536} <= set(lengths)
    assert sum(start % 16 == 0 for start in starts) >= len(starts) // 3
    assert len({start % 16 for start in starts}) > 8
    # Kernels are faster where no leaf of a whole program is short.
    aligned = [piece for piece in long if piece.start % 16 == 0]
    assert sum((piece.stop - piece.start) // 1024 for piece in aligned) >= 2 * 64
    assert all((piece.stop - piece.start) % 1024 == 0 for piece in long)
    assert min(piece.stop - piece.start for piece in short) == 64


def test_a_device_that_torch_does_not_have_is_not_listed() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert choice.list_accelerators() == []
