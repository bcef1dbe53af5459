"""A call is recorded while it is compiled as usual, and its program computes the same as torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.compile_cache.backend import make_compiler
from holdfast.compile_cache.whole.known_calls import CallDescription
from holdfast.compile_cache.whole.ordinary import OrdinaryCompile
from holdfast.compile_cache.whole.running import LoadedProgram
from holdfast.store import open as open_store


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_the_program_of_a_training_step_has_the_gradients_of_the_compiled_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    ordinary = OrdinaryCompile(model, make_compiler(open_store(tmp_path).repository), fullgraph=False, dynamic=None)
    call = CallDescription(model, (x,), {}, {})

    record = ordinary.record(call, (x,), {})

    assert record.reason == ""
    assert record.program is not None
    loaded = LoadedProgram(record.program, record.kernels)
    y = loaded([call.found.walk.tensors[number] for number in record.program.inputs])
    assert torch.equal(y, record.result)
    assert _list_gradients(model, y) == _list_gradients(model, record.result)


def _list_gradients(model: nn.Module, y: Any) -> list[Any]:
    model.zero_grad()
    y.square().mean().backward()
    return [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]
