"""Tensors are moved or cast, others stay the same object, and copies to accelerators use a side stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from holdfast.errors import Unsupported
from holdfast.trees.apply import cast_floating, find_accelerator, move_to_device, to_kwargs
from tests.kit.capabilities import needs_torch, param_dtypes
from tests.kit.hooking import Hook

CPU: Final = torch.device("cpu")
META: Final = torch.device("meta")


@pytest.mark.parametrize("device", ["cpu", "cpu:0", CPU], ids=str)
def test_a_tree_that_is_there_already_is_the_same_object(device: torch.device | str) -> None:
    tree = {"a": [torch.ones(1)], "b": pack_sequence([torch.ones(1)])}

    assert move_to_device(tree, device) is tree


def test_tensors_are_moved_and_all_else_is_kept() -> None:
    tree: dict[str, Any] = {"a": [torch.ones(2), 5], "there": torch.ones(3, device=META)}

    moved = move_to_device(tree, "meta")

    assert moved["a"][0].device == META
    assert moved["a"][1] == 5


def test_a_packed_sequence_moves_without_its_batch_sizes() -> None:
    moved = move_to_device(pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False), "meta")

    assert [tensor.device for tensor in moved if tensor is not None] == [META, CPU, META, META]


def test_a_packed_sequence_that_is_there_already_is_the_same_object() -> None:
    moved = move_to_device(pack_sequence([torch.ones(2)]), "meta")

    assert move_to_device(moved, "meta") is moved


def test_a_tensor_in_two_places_is_moved_once() -> None:
    tied = torch.ones(2)

    moved = move_to_device({"in": tied, "out": tied}, "meta")

    assert moved["in"] is moved["out"]


def test_a_tensor_without_data_is_refused_and_located() -> None:
    with pytest.raises(
        Unsupported, match=r"^a meta tensor of shape \(2, 3\) has no data to move to cpu; load"
    ) as caught:
        move_to_device({"w": torch.ones(2, 3, device=META)}, CPU)
    assert vars(caught.value)["__notes__"] == ["at tree['w']"]


class Journal:
    """What streams and copies did, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []


class Stream:
    """A stream that notes what is asked of it."""

    def __init__(self, journal: Journal, name: str) -> None:
        self.journal = journal
        self.name = name

    def __enter__(self) -> None:
        self.journal.lines.append(f"enter {self.name}")

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.journal.lines.append(f"leave {self.name}")

    def wait_stream(self, other: Stream) -> None:
        self.journal.lines.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.journal.lines.append(f"host waits for {self.name}")


def test_a_torch_that_raises_without_an_accelerator_has_none(hook: Hook) -> None:
    def refuse() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    hook(torch.accelerator, "current_accelerator", refuse)

    assert find_accelerator() is None
    assert move_to_device(torch.ones(2), "cpu").tolist() == [1, 1]


@pytest.fixture
def meta_accelerator(monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Make torch believe that the meta device is an accelerator, and note what its streams do."""
    journal = Journal()
    copy = torch.Tensor.to

    def note_copy(tensor: torch.Tensor, target: torch.device, *, non_blocking: bool) -> torch.Tensor:
        journal.lines.append(f"copy {tuple(tensor.shape)} non_blocking={non_blocking}")
        # Nothing leaves the meta device; what matters here is who waits for whom.
        return torch.empty_like(tensor, device=target) if tensor.is_meta else copy(tensor, target)

    def note_record(tensor: torch.Tensor, stream: Stream) -> None:
        journal.lines.append(f"record {tuple(tensor.shape)} on {stream.name}")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: META)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream(journal, "current"))
    monkeypatch.setattr(torch, "Stream", lambda device: Stream(journal, "side"))
    monkeypatch.setattr(torch.Tensor, "to", note_copy)
    monkeypatch.setattr(torch.Tensor, "record_stream", note_record)
    return journal


def test_copies_to_an_accelerator_run_on_a_side_stream_that_the_current_one_waits_for(
    meta_accelerator: Journal,
) -> None:
    move_to_device([torch.ones(1), torch.ones(2)], META, non_blocking=True)

    assert meta_accelerator.lines == [
        "enter side",
        "copy (1,) non_blocking=True",
        "leave side",
        "enter side",
        "copy (2,) non_blocking=True",
        "leave side",
        "current waits for side",
        "record (1,) on current",
        "record (2,) on current",
    ]


def test_nobody_waits_if_all_is_on_the_accelerator_already(meta_accelerator: Journal) -> None:
    tree = [torch.ones(1, device=META)]

    assert move_to_device(tree, META) is tree
    assert meta_accelerator.lines == []


def test_tensors_that_are_made_of_others_are_copied_on_the_current_stream(meta_accelerator: Journal) -> None:
    sparse = torch.ones(2, 2).to_sparse()

    move_to_device(sparse, META)

    assert meta_accelerator.lines == ["copy (2, 2) non_blocking=False"]


@pytest.mark.parametrize(("non_blocking", "ending"), [(False, []), (True, ["host waits for current"])])
def test_the_host_waits_once_for_all_that_comes_from_an_accelerator(
    meta_accelerator: Journal, monkeypatch: pytest.MonkeyPatch, non_blocking: bool, ending: list[str]
) -> None:
    monkeypatch.setattr("holdfast.trees.apply._verify_data", lambda tensor, target: None)

    move_to_device([torch.ones(1, device=META), torch.ones(2, device=META)], CPU, non_blocking=non_blocking)

    copies = [f"copy ({size},) non_blocking={non_blocking}" for size in (1, 2)]
    assert meta_accelerator.lines == copies + ending


ON_AN_ACCELERATOR: Final = """
import torch
from holdfast.trees.apply import move_to_device
from tests.kit import fake_accelerator

fake, libraries = fake_accelerator.install()

moved = move_to_device({"a": torch.ones(2), "b": (torch.ones(3),)}, "fake")
assert moved["a"].device == torch.device("fake", 0), moved["a"].device
assert move_to_device(moved, "fake") is moved
assert move_to_device(moved, "fake:0") is moved
assert fake.log == ["cpu to fake:0", "cpu to fake:0", "record (2,)", "record (3,)"], fake.log
assert move_to_device(moved, "cpu")["b"][0].tolist() == [1.0, 1.0, 1.0]
"""


# A device cannot be unregistered, so it gets a process of its own.
@pytest.mark.slow
def test_a_real_device_type_of_torch_takes_part_with_its_streams() -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", ON_AN_ACCELERATOR]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)

    assert done.returncode == 0, done.stderr


def test_arguments_are_moved_and_come_as_tuples_of_one() -> None:
    args, kwargs = to_kwargs((torch.ones(1), 2), {"k": [torch.ones(1)]}, "meta")

    assert (len(args), len(kwargs)) == (1, 1)
    assert args[0][0].device == kwargs[0]["k"][0].device == META
    assert args[0][1] == 2


@pytest.mark.parametrize(("args", "kwargs"), [((1,), {}), ((), {"a": 1})])
def test_arguments_by_position_and_by_keyword_are_padded_to_one_length(
    args: tuple[int, ...], kwargs: dict[str, int]
) -> None:
    assert to_kwargs(args, kwargs, CPU) == ((args,), (kwargs,))


@pytest.mark.parametrize("kwargs", [{}, None])
def test_a_call_without_arguments_has_none_to_pad(kwargs: dict[str, int] | None) -> None:
    assert to_kwargs((), kwargs, CPU) == ((), ())
    assert to_kwargs((1,), kwargs, CPU) == (((1,),), ({},))


def test_only_floating_tensors_are_cast() -> None:
    tree: dict[str, Any] = {
        "f": torch.ones(1),
        "h": torch.ones(1, dtype=torch.bfloat16),
        "i": torch.ones(1, dtype=torch.int64),
    }
    others = [torch.ones(1, dtype=dtype) for dtype in (torch.bool, torch.complex64, torch.uint8)]

    cast = cast_floating({**tree, "others": others}, torch.float64)

    assert cast["f"].dtype == cast["h"].dtype == torch.float64
    assert cast["i"] is tree["i"]
    assert cast["others"] is others


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_a_tree_that_needs_no_cast_is_the_same_object(dtype: torch.dtype | None) -> None:
    tree = [torch.ones(1), 2.5]

    assert cast_floating(tree, dtype) is tree


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_leaf_requires_grad_after_a_cast_as_it_did(grad_mode: type[torch.no_grad], requires_grad: bool) -> None:
    leaf = torch.ones(2, requires_grad=requires_grad)

    with grad_mode():
        cast = cast_floating(leaf, torch.float64)

    assert cast.requires_grad == requires_grad
    assert cast.is_leaf == (grad_mode is not torch.enable_grad or not requires_grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor.requires_grad_])
def test_a_gradient_reaches_the_leaf_that_was_cast(dtype: torch.dtype, kind: Any) -> None:
    leaf = kind(torch.ones(2))

    (cast_floating([leaf], dtype)[0] * 3).sum().backward()

    assert leaf.grad.tolist() == [3.0, 3.0]
    assert leaf.grad.dtype == torch.float32


def test_what_is_inside_a_graph_stays_inside_it() -> None:
    leaf = torch.ones(2, requires_grad=True)

    (gradient,) = torch.autograd.grad(cast_floating(leaf * 3, torch.float64).sum(), [leaf])

    assert gradient.tolist() == [3.0, 3.0]


def test_what_is_inside_a_graph_requires_grad_even_if_none_is_being_made() -> None:
    inner = torch.ones(2, requires_grad=True) * 3

    with torch.no_grad():
        assert cast_floating(inner, torch.float64).requires_grad


@pytest.mark.parametrize("dtype", param_dtypes("float8_e4m3fn", "float8_e5m2fnuz", "float8_e8m0fnu"))
def test_small_floats_are_cast_as_well(dtype: torch.dtype) -> None:
    assert cast_floating(torch.ones(2).to(dtype), torch.float64).tolist() == [1.0, 1.0]


def test_a_dtype_that_is_not_floating_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"^floating tensors cannot be cast to torch\.int64; choose a floating dtype"):
        cast_floating([torch.ones(1)], torch.int64)


@needs_torch("float4_e2m1fn_x2")
def test_two_values_in_one_element_are_not_cast() -> None:
    packed = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)

    with pytest.raises(Unsupported, match=r"^a tensor of torch\.float4_e2m1fn_x2 cannot be cast to torch\.float64"):
        cast_floating(packed, torch.float64)
