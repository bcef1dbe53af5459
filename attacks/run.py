"""Runs every reading verb on a store in this process, and reports exit codes, CPU time and memory as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.cli.main import main

VERBS = (
    ("ls",), ("ls", "--json"), ("show", "evil"), ("show", "evil", "--chunks", "--json"), ("check",),
    ("check", "--read"),
    ("cat", "evil", "weights"), ("get", "evil", "OUT"), ("du",), ("gc",), ("repair",), ("gc", "--yes"),
    ("cat", "good", "config.json"),
)  # fmt: skip


class _Bytes(io.TextIOWrapper):
    """A replacement for standard output that keeps the text."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self) -> str:
        self.seek(0)
        return self.read()


@contextlib.contextmanager
def capture_output() -> Iterator[tuple[_Bytes, _Bytes]]:
    """Capture standard output and standard error."""
    printed, said = _Bytes(), _Bytes()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        yield printed, said


def run(store: str, out: str) -> list[dict[str, object]]:
    """Run all verbs on `store`; restores go to `out`."""
    reports: list[dict[str, object]] = []
    for verb in VERBS:
        started = time.process_time()
        with capture_output() as (printed, said):
            code = main(["-s", store, *(out if word == "OUT" else word for word in verb)])
        reports.append({
            "verb": " ".join(verb), "code": code, "cpu_s": time.process_time() - started, "error": said.text()[-3000:],
            "out": printed.text()[:3000], "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        })  # fmt: skip
    return reports


if __name__ == "__main__":
    # The sound store first: its memory is the baseline.
    run(sys.argv[1], str(Path(sys.argv[3]) / "sound"))
    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(json.dumps({"baseline_kib": baseline, "runs": run(sys.argv[2], str(Path(sys.argv[3]) / "evil"))}))
