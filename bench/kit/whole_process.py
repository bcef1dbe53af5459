"""One process of the benchmark `whole`: starts a model in one way, trains one step, and prints the time.

It imports only what the way needs: torch's compiler is not imported for the sake of the others.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

from bench.kit.compile_models import digest_step, make_model, train_step

ENCODER = "6-layer encoder"


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Start a model, train one step, and measure both from the start of the process."""
    model, x = _make(request["model"])
    run: Any = model
    if request["way"] == "torch":
        run = torch.compile(model)
    elif request["way"] == "whole":
        import holdfast

        run = holdfast.compile(model, store=request["place"], whole=True)
    y = train_step(run, x)
    if request["optimizer"]:
        torch.optim.AdamW(model.parameters()).step()
    found = {
        "wall": time.monotonic() - request["started"],
        "cpu": time.process_time(),
        "digest": digest_step(model, y),
        "dynamo": "torch._dynamo" in sys.modules,
    }
    if request["way"] == "whole":
        statistics = run.compile_cache.statistics
        found |= {"hit": statistics.hit, "not_saved": dict(statistics.not_saved)}
    return found


def _make(name: str) -> tuple[nn.Module, torch.Tensor]:
    if name != ENCODER:
        return make_model(name)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 16, 64)


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(json.loads(sys.argv[1]))) + "\n")
