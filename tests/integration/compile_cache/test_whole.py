"""A callable that is stored as a whole starts without dynamo in another process, and never after an edit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_MODEL = """
import torch
from torch import nn

K = 2.0

def helper(x):
    return x * K

class Net(nn.Module):
    scale = 1.5

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        return {"y": helper(self.drop(self.norm(torch.relu(self.linear(x))))) * self.scale}
"""
_RUN = """
import json, sys
import torch
import holdfast
from edited import Net

torch.manual_seed(0)
model, x = Net(), torch.randn(3, 4)
compiled = holdfast.compile(model, store=sys.argv[1], whole=True) if sys.argv[1] else model
torch.manual_seed(1)
values = []
for _ in range(2):
    y = compiled(x)["y"]
    y.square().mean().backward()
    values += [y.tolist(), *(parameter.grad.tolist() for parameter in model.parameters())]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
model.eval()
with torch.no_grad():
    values += [compiled(x)["y"].tolist(), *(buffer.tolist() for buffer in model.buffers())]
hit = compiled.compile_cache.statistics.hit if sys.argv[1] else 0
print(json.dumps({"values": values, "hit": hit, "dynamo": "torch._dynamo" in sys.modules}))
"""


def _start(folder: Path, source: str, store: Path) -> dict[str, Any]:
    (folder / "edited.py").write_text(source, encoding="utf-8")
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _RUN, str(store)]
    ran = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_training_and_evaluation_start_without_dynamo_and_an_edit_is_compiled(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = _start(tmp_path, _MODEL, store)

    second = _start(tmp_path, _MODEL, store)

    assert (first["hit"], first["dynamo"]) == (0, True)
    assert (second["hit"], second["dynamo"]) == (2, False)
    assert second["values"] == first["values"]
    for before, after in (("K = 2.0", "K = 3.0"), ("scale = 1.5", "scale = 2.5"), ("torch.relu", "torch.tanh")):
        edited = _start(tmp_path, _MODEL.replace(before, after), store)
        assert edited["dynamo"], f"{after}: the stored callable was used"
        assert edited["values"] != first["values"]
