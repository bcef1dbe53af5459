"""Compiles the kernels of device digests for GPUs, without one, and records registers, spills and instructions.

    python -m bench.device_kernels            # compile, and compare with the recorded result
    python -m bench.device_kernels --record   # write bench/results/device_kernels.json

Needs Triton, which `make device-test` installs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.kit.cubins import compile_all
from bench.kit.roofline import render_counts, render_projection

RECORDED: Final = Path(__file__).resolve().parent / "results" / "device_kernels.json"


def compile_result() -> dict[str, Any]:
    """Compile all kernels and return the facts about them, as they are recorded."""
    import triton

    found: dict[str, Any] = {"triton": triton.__version__, "kernels": compile_all()}
    return found


def find_differences(found: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """Return a line for each fact that is not as recorded, and for each kernel that spills registers."""
    lines = []
    if found["triton"] != recorded["triton"]:
        lines.append(f"Triton {found['triton']} compiled this, and {recorded['triton']} what is recorded")
    for architecture, kernels in found["kernels"].items():
        for kernel, facts in kernels.items():
            if facts["stack_bytes"] or facts["spilled_bytes"]:
                lines.append(f"{architecture}, {kernel}: registers are spilled: {facts}")
            if facts != recorded["kernels"].get(architecture, {}).get(kernel):
                lines.append(f"{architecture}, {kernel}: not as recorded: {facts}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print, and compare or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the result to be checked in")
    options = parser.parse_args(arguments)
    found = compile_result()
    if options.record:
        RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(render_counts(found))
    print("A projection from these counts in GB/s, not a measurement:\n")
    print(render_projection(found))
    differences = find_differences(found, json.loads(RECORDED.read_text(encoding="utf-8")))
    for line in differences:
        print(line, file=sys.stderr)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
