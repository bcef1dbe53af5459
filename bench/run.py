"""Run the benchmarks and print one table; a goal that is missed is said, a wrong result ends the run."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

# `python bench/run.py` puts bench/ itself on the path, and `import bench` needs what is above it.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import (  # noqa: E402 - the path comes first
    bench_check,
    bench_cli,
    bench_growth,
    bench_load,
    bench_peak,
    bench_save,
    bench_state,
    limits,
)
from bench.measure import (  # noqa: E402 - the path comes first
    FULL,
    QUICK,
    RESULTS,
    Result,
    Sizes,
    describe_machine,
    format_table,
    write_json,
)

SUITES: Final[Mapping[str, Callable[[Sizes, Path], list[Result]]]] = {
    "limits": limits.run,
    "check": bench_check.run,
    "save": bench_save.run,
    "state": bench_state.run,
    "load": bench_load.run,
    "peak": bench_peak.run,
    "cli": bench_cli.run,
    "growth": bench_growth.run,
}


def run_suites(names: Sequence[str], sizes: Sizes, work: Path) -> list[Result]:
    """Run the suites of these names, each in a folder of its own."""
    results: list[Result] = []
    for name in names:
        print(f"{time.strftime('%H:%M:%S')} {name} ...", file=sys.stderr, flush=True)
        folder = work / name
        folder.mkdir()
        results += SUITES[name](sizes, folder)
    return results


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
        results = run_suites(options.only or list(SUITES), QUICK if options.quick else FULL, Path(work))
    machine = before | {"load_after": describe_machine(RESULTS)["load"]}
    print("  ".join(f"{key}: {value}" for key, value in machine.items()))
    print(format_table(results))
    missed = [result.workload for result in results if result.verdict == "MISSED"]
    print(f"goals missed: {', '.join(missed)}" if missed else "all goals met")
    path = options.json or RESULTS / time.strftime("%Y%m%dT%H%M%S.json")
    write_json(path, machine, results)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
