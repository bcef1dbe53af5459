"""What is remembered of memory is valid until torch writes to it, or it is freed."""

from __future__ import annotations

import pytest
import torch

from holdfast.repo.format.boxes import Box
from holdfast.repo.format.entry import ChunkTable
from holdfast.snapshot.into.held import HeldContent, HeldMemory, Since, find_version, make_since

CONTENT = HeldContent(ChunkTable(0, (16,), bytes(32), ()), None)


def make_noted() -> tuple[HeldMemory, torch.Tensor]:
    held, tensor = HeldMemory(), torch.zeros(4)
    held.note([(tensor, 16, CONTENT)])
    return held, tensor


def test_a_note_is_found_through_every_view_that_shares_the_counter() -> None:
    held, tensor = make_noted()

    assert held.find(tensor, 16) == CONTENT
    assert held.find(tensor.detach(), 16) == CONTENT
    assert held.find(tensor[:2], 16) == CONTENT, "the caller says how many bytes it means"
    assert held.find(tensor, 8) is None
    assert held.find(tensor[1:], 12) is None


def test_every_write_of_torch_ends_a_note() -> None:
    for write in (
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor[1:].zero_(),
        lambda tensor: tensor.detach().mul_(2),
        lambda tensor: torch._foreach_add_([tensor], 1),
    ):
        held, tensor = make_noted()
        write(tensor)
        assert held.find(tensor, 16) is None

    held, tensor = make_noted()
    with torch.inference_mode():
        tensor.add_(1)
    assert held.find(tensor, 16) is None


def test_an_optimizer_step_ends_a_note() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    held = HeldMemory()
    held.note([(parameter, 16, CONTENT)])
    parameter.grad = torch.ones(4)

    torch.optim.AdamW([parameter]).step()

    assert held.find(parameter, 16) is None


def test_a_note_does_not_keep_memory_alive_and_ends_with_it() -> None:
    held, tensor = make_noted()
    del tensor
    assert len(held) == 1
    other = torch.zeros(4)

    held.note([(other, 16, CONTENT)])

    assert len(held) == 1, "the note of freed memory was dropped"


def test_a_tensor_of_inference_mode_has_no_counter() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(4)
    held = HeldMemory()

    held.note([(tensor, 16, CONTENT)])

    assert find_version(tensor) is None
    assert held.find(tensor, 16) is None


def test_a_part_of_a_tensor_is_other_content() -> None:
    part = HeldContent(CONTENT.table, Box((0,), (4,)))

    assert part != CONTENT


class Named:
    """Has a name, as a snapshot does."""

    name = "v/1"


@pytest.mark.parametrize("since", ["v/1", Named()])
def test_a_belief_is_a_name_or_has_one(since: str | Named) -> None:
    assert make_since(since, check=True) == Since("v/1", check=True)


def test_without_a_belief_there_is_nothing_to_check() -> None:
    assert make_since(None, check=False) is None
    with pytest.raises(ValueError, match="needs since="):
        make_since(None, check=True)
