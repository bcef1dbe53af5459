"""Runs the benchmarks and prints one table; a row at its limit links to the reason, a wrong result ends the run."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

# `python bench/run.py` puts bench/ itself on the path, and `import bench` needs what is above it.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.kit.measure import (
    FULL,
    QUICK,
    RESULTS,
    Result,
    Sizes,
    describe_machine,
    format_table,
    write_json,
)
from bench.kit.sections import ON_REQUEST, explain
from bench.picture import draw_all
from bench.suites import (
    capture,
    check,
    cli,
    codecs,
    deltas,
    device_digest,
    diff_runs,
    exports,
    follow,
    growth,
    imports,
    limits,
    load,
    mirror,
    objects,
    peak,
    planning,
    put,
    query,
    recording,
    reread,
    reuse,
    save,
    scale,
    state,
    where,
)
from bench.suites import compile as compile_suite

SUITES: Final[Mapping[str, Callable[[Sizes, Path], list[Result]]]] = {
    "limits": limits.run,
    "check": check.run,
    "save": save.run,
    "state": state.run,
    "load": load.run,
    "reread": reread.run,
    "where": where.run,
    "peak": peak.run,
    "cli": cli.run,
    "growth": growth.run,
    "scale": scale.run,
    "capture": capture.run,
    "diff_runs": diff_runs.run,
    "recording": recording.run,
    "planning": planning.run,
    "reuse": reuse.run,
    "put": put.run,
    "query": query.run,
    "imports": imports.run,
    "compile": compile_suite.run,
    "exports": exports.run,
    "mirror": mirror.run,
    "objects": objects.run,
    "codecs": codecs.run,
    "deltas": deltas.run,
    "follow": follow.run,
    "device_digest": device_digest.run,
}


def run_suites(names: Sequence[str], sizes: Sizes, work: Path) -> tuple[list[Result], dict[str, float]]:
    """Run the suites with these names, each in its own folder; return all rows, and the seconds of each suite."""
    results: list[Result] = []
    seconds: dict[str, float] = {}
    for name in names:
        print(f"{name:8}", end=" ", file=sys.stderr, flush=True)
        started = time.perf_counter()
        folder = work / name
        folder.mkdir()
        results += explain(name, SUITES[name](sizes, folder))
        shutil.rmtree(folder)
        seconds[name] = round(time.perf_counter() - started, 1)
        print(f"{seconds[name]:6.1f} s", file=sys.stderr, flush=True)
    return results, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: small sizes, few rounds")
    parser.add_argument("--only", action="append", choices=list(SUITES), help="run this suite (may be repeated)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    before = describe_machine(RESULTS)
    with tempfile.TemporaryDirectory(prefix="work-", dir=RESULTS) as work:
        names = options.only or [name for name in SUITES if name not in ON_REQUEST]
        results, seconds = run_suites(names, QUICK if options.quick else FULL, Path(work))
    machine = before | {"load_after": describe_machine(RESULTS)["load"]}
    print("  ".join(f"{key}: {value}" for key, value in machine.items()))
    print(format_table(results))
    judged = [result for result in results if result.verdict]
    passed = sum(result.verdict == "pass" for result in judged)
    print(f"{passed} of {len(judged)} goals reached in {sum(seconds.values()):.0f} s")
    path = options.json or RESULTS / time.strftime("%Y%m%dT%H%M%S.json")
    write_json(path, machine, results, seconds)
    print(f"written to {path}")
    for picture in draw_all(path, path.parent):
        print(f"drawn in {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
