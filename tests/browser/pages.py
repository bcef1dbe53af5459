"""Reports to show: two runs of a small transformer that diverge at a known place, with any number of rows."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Final

from holdfast.capture.compare.result import CLASSES, ComparedInput, EnvironmentChange, Origin, RunDiff, StepDiff
from holdfast.capture.report.report import Detail, Report, ReportRow
from holdfast.capture.stored.events import Site, Stats
from holdfast.capture.stored.runs import RunFacts
from holdfast.capture.stored.statistics import TensorSummary

LAYERS: Final = 6
PARTS: Final = (
    ("attn.q_proj", "Linear", "model.py:88"),
    ("attn.k_proj", "Linear", "model.py:89"),
    ("attn.v_proj", "Linear", "model.py:90"),
    ("attn.out_proj", "Linear", "model.py:97"),
    ("norm1", "LayerNorm", "model.py:131"),
    ("mlp.up_proj", "Linear", "model.py:210"),
    ("mlp.act", "GELU", "model.py:211"),
    ("mlp.down_proj", "Linear", "model.py:212"),
    ("norm2", "LayerNorm", "model.py:140"),
)
ORIGIN: Final = (3, "layers.3.mlp.down_proj")
SHAPE: Final = "(8, 128, 256)"


def make_page_report(*, steps: int = 10, copies: int = 1, measured: bool = True) -> Report:
    """Return a report of runs that diverge at step 3, in the forward pass of the third layer's last projection."""
    rng = random.Random(7)
    rows = [row for step in range(steps) for row in _make_step(step, rng, copies, measured=measured)]
    origin = next((at for at, row in enumerate(rows) if row.verdict == "ORIGIN"), None)
    notes = ("hooks could not fire inside the compiled module 'head'; its inputs and outputs were recorded",)
    return Report(
        RunFacts("llama/fp32-eager", started_s=1.79e9),
        RunFacts("llama/bf16-fused", status="unfinished", started_s=1.79e9 + 3600, notes=notes),
        _make_diff(rows),
        (range(steps), range(steps)),
        rows=tuple(rows),
        origin=origin,
        tolerance="Tolerance: torch.testing's table for each dtype.",
        details={
            at: _make_detail(row, rng)
            for at, row in enumerate(rows)
            if measured and row.verdict in ("ORIGIN", "PROPAGATED")
        }
        if copies == 1
        else {},
    )


def _make_diff(rows: list[ReportRow]) -> RunDiff:
    found = Counter(row.verdict for row in rows)
    fqn, why = ORIGIN[1], "output differs though inputs and parameters are equal"
    site = Site(ORIGIN[0], "forward", "output", fqn, 0, "")
    origin = Origin(
        *(fqn, ORIGIN[0], "forward", "output", 0, "model.py:212", why, site),
        inputs=(ComparedInput(f"input[0] of {fqn}", "equal"),),
        parameters=(ComparedInput(f"{fqn}.weight", "equal"), ComparedInput(f"{fqn}.bias", "equal")),
    )
    return RunDiff(
        "llama/fp32-eager",
        "llama/bf16-fused",
        origin if found["ORIGIN"] else None,
        steps=(StepDiff(0, {name: found[name.upper()] for name in CLASSES}),),
        environment=(
            EnvironmentChange("torch", "2.12.1", "2.13.0"),
            EnvironmentChange("torch.backends.cudnn.benchmark", "False", "True"),
            EnvironmentChange("torch.get_float32_matmul_precision()", "highest", "high"),
            EnvironmentChange("host", "gpu-07", "gpu-12"),
        ),
    )


def _make_step(step: int, rng: random.Random, copies: int, *, measured: bool) -> list[ReportRow]:
    forward = [
        (f"layers.{layer}.{part}", kind, module, source, call)
        for call in range(copies)
        for layer in range(LAYERS)
        for part, module, source in PARTS
        for kind in ("input", "output")
    ]
    found = []
    error = 0.0 if step <= ORIGIN[0] else 4e-6 * 3.0 ** (step - ORIGIN[0])
    for fqn, kind, module, source, call in forward:
        verdict = "EQUAL" if error == 0.0 else "PROPAGATED"
        if (step, fqn, kind) == (*ORIGIN, "output") and error == 0.0:
            verdict, error = "ORIGIN", 4.1e-5
        error *= 1.0 + 0.08 * rng.random()
        found.append(_make_row(verdict, error, (step, "forward", kind, fqn, call), (module, source), measured=measured))
    for fqn, kind, module, source, call in reversed(forward):
        if kind == "output":
            error *= 1.0 + 0.04 * rng.random()
            site = (step, "backward", "grad", fqn, call)
            verdict = "EQUAL" if step < ORIGIN[0] else "CLOSE" if error < 5e-5 else "PROPAGATED"
            found.append(_make_row(verdict, error, site, (module, source), measured=measured))
    for fqn, _, _, _, call in forward[:: 2 * 9]:
        site = (step, "optimizer", "parameter", f"{fqn}.weight", call)
        verdict = "EQUAL" if step < ORIGIN[0] else "PROPAGATED"
        found.append(_make_row(verdict, error / 30, site, ("", ""), measured=measured))
    if step == 5:
        found.append(
            ReportRow("MISSING", step, 0, "forward", "output", "layers.5.dropout", note="only in llama/bf16-fused")
        )
    return found


def _make_row(
    verdict: str, error: float, site: tuple[int, str, str, str, int], where: tuple[str, str], *, measured: bool
) -> ReportRow:
    step, phase, kind, fqn, call = site
    row = ReportRow(
        verdict=verdict,
        step=step,
        rank=0,
        phase=phase,
        kind=kind,
        fqn=fqn,
        call=call,
        dtype="float32",
        shape=SHAPE,
        module=where[0],
        source=where[1],
        pairing="exact",
    )
    if not measured or verdict in ("EQUAL", "MISSING"):
        return row
    return replace(
        row,
        rel=error,
        abs=9 * error,
        cos=1 - error**2,
        sqnr=-20 * math.log10(max(error, 1e-9)),
        ulp=float(round(error * 2**23)),
        mismatch=min(100.0, error * 1e5),
    )


def _make_detail(row: ReportRow, rng: random.Random) -> Detail:
    error = row.rel or 0.0
    sides = [
        TensorSummary(Stats(-4.2, 4.4, 0.01, 512.3, 0, 0, 0, tuple(_make_bins(rng, shift))), -4.5, 4.5)
        for shift in (0.0, error)
    ]
    return Detail((3, 118, 202), ("0.3712345", f"{0.3712345 + 9 * error:.9g}"), *sides)


def _make_bins(rng: random.Random, shift: float) -> list[int]:
    tops = [math.exp(-(((at - 19.5) / 7 - min(0.6, 3 * shift)) ** 2) * 2) for at in range(40)]
    return [round(9000 * top * (0.95 + rng.random() / 10)) for top in tops]
