"""The suite of mirrors measures what it claims."""

from __future__ import annotations

from pathlib import Path

import torch

import holdfast
from bench.kit.measure import TINY
from bench.suites import mirror


def test_a_save_with_a_mirror_is_compared_with_one_without(tmp_path: Path) -> None:
    rows = mirror._measure_save({"x": torch.randn(1000)}, 4000, TINY, tmp_path)

    assert [(row.workload, row.against) for row in rows] == [("save with a mirror", "save without a mirror")]
    assert len(holdfast.open(tmp_path / "mirror")) == len(holdfast.open(tmp_path / "tiered")) > 0
