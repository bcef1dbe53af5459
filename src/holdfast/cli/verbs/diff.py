"""The verb `diff`: prints a line for each difference between two snapshots, and with --values its size."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

from holdfast.cli.lookup import open_to_read, read_named_snapshot
from holdfast.cli.output import Output, Style, format_bytes
from holdfast.cli.verb import add_json, document
from holdfast.diff.changes import Diff, describe_diff
from holdfast.diff.compare import compare
from holdfast.digest import short_hex

_MAX_LINES: Final = 50
_STYLES: Final[dict[str, Style]] = {"added": "good", "removed": "bad", "changed": "warning"}


def declare_diff(parser: ArgumentParser) -> None:
    """Declare the verb `diff`."""
    more = (
        "A line begins with + for a leaf that only B has, - for one that only A has, ~\n"
        "for one that differs. Only manifests are read, unless a tensor was chunked or\n"
        "laid out differently. --values reads the tensors that differ and measures by how\n"
        "much; NaN at the same index on both sides counts as equal. Exits with 1 if there\n"
        "is a difference."
    )
    examples = ["holdfast diff run1/step-100 run1/step-200", "holdfast diff best last --values --only 'model.*'"]
    document(parser, more, examples=examples)
    parser.add_argument("a", metavar="A", help="a snapshot or a tag")
    parser.add_argument("b", metavar="B", help="another snapshot or tag")
    parser.add_argument("--values", action="store_true", help="measure by how much values differ; loads torch")
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", default=[], help="only leaves whose names match; may be repeated"
    )
    parser.add_argument("--all", action="store_true", help=f"print every line, not only the first {_MAX_LINES}")
    add_json(parser)
    parser.set_defaults(run_verb=run_diff)


def run_diff(options: Namespace, url: str, output: Output) -> int:
    """Print the differences between two snapshots."""
    repo = open_to_read(url, output)
    a, b = (read_named_snapshot(repo.store, name, output) for name in (options.a, options.b))
    diff = compare(repo, a, b, only=options.only)
    if options.values and not diff.is_equal:
        from holdfast.diff.values import measure

        diff = measure(repo, diff)
    if options.json:
        output.json(describe_diff(diff))
    else:
        _print(diff, output, limit=len(diff.changes) if options.all else _MAX_LINES, is_filtered=bool(options.only))
    return 0 if diff.is_equal else 1


def _print(diff: Diff, output: Output, *, limit: int, is_filtered: bool) -> None:
    output.line(f"{diff.a.name} ({short_hex(diff.a.digest)}) -> {diff.b.name} ({short_hex(diff.b.digest)})")
    shown = diff.changes[:limit]
    output.columns([change.describe() for change in shown], styles=[_STYLES[change.kind] for change in shown])
    output.cut(len(diff.changes) - limit)
    if diff.a.digest == diff.b.digest:
        output.line(f"equal: the digests are the same ({format_bytes(diff.equal_bytes)})")
    elif is_filtered:
        output.line(str(diff))
    else:
        output.line(f"{diff}; {format_bytes(diff.shared_bytes)} of {format_bytes(diff.b.logical_bytes)} shared")
