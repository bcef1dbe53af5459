"""The verb `check`: prints findings as they are found, then how much was checked."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from dataclasses import asdict

from holdfast.cli.lookup import verify_possible
from holdfast.cli.output import SEVERITY_STYLES, Output, count, format_bytes
from holdfast.cli.verb import add_json, document
from holdfast.errors import NotAStore
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.url import open_store
from holdfast.repo.upkeep.check import Checker, Finding, Tally, check_links


def declare_check(parser: ArgumentParser) -> None:
    """Declare the verb `check`."""
    more = (
        "Never writes. The size is that of all packs and manifests, as `holdfast du`\n"
        "prints it. Exits with 1 if there is an error or a warning, but not for notes."
    )
    document(parser, more, examples=["holdfast check", "holdfast check --read --json"])
    parser.add_argument("--read", action="store_true", help="read and verify every byte, not only the structure")
    add_json(parser)
    parser.set_defaults(run_verb=run_check)


def run_check(options: Namespace, url: str, output: Output) -> int:
    """Check a store and print each finding as soon as it is found."""
    store = _open_objects(url)
    checker = Checker(store, read=options.read, progress=output.progress(), stages=output.stages)
    counts: Counter[str] = Counter()
    findings: list[Json] = []
    for finding in checker.iter_findings():
        counts[finding.severity] += 1
        if options.json:
            findings.append(asdict(finding))
        else:
            _print_finding(finding, output)
    if options.json:
        output.json({"store": store.url, "findings": findings, "checked": asdict(checker.tally)})
    else:
        is_healthy = not (counts["error"] or counts["warning"])
        output.line(_summarise(checker.tally, counts, read=options.read), style="good" if is_healthy else "")
    return 1 if counts["error"] or counts["warning"] else 0


def _open_objects(url: str) -> ObjectStore:
    """Open the object store without its config, so that a store with a damaged or lost config can be checked.

    Raises NotAStore if nothing there can be part of a store.
    """
    store = open_store(url, read_only=True)
    listed = store.skipping_links()
    # A directory that contains only links may have been a store: `check` reports them.
    if not listed.list("", limit=1) and any(check_links(store)):
        return store
    verify_possible(listed)
    if not listed.list("", limit=1):
        raise NotAStore(f"{store.url} is not a store; create one with `holdfast -s {store.url} init`")
    return store


def _print_finding(finding: Finding, output: Output) -> None:
    output.line(f"{finding.severity}: {finding.message} [{finding.code}]", style=SEVERITY_STYLES[finding.severity])
    if finding.advice:
        output.line(f"    {finding.advice}")


def _summarise(tally: Tally, counts: Counter[str], *, read: bool) -> str:
    checked = ", ".join(
        (
            count(tally.snapshots, "snapshot"),
            count(tally.manifests, "manifest"),
            count(tally.packs, "pack"),
            count(tally.chunks, "chunk"),
        )
    )
    stored = format_bytes(tally.stored_bytes)
    depth = f"{format_bytes(tally.bytes_read)} of {stored} read"
    if not read:
        depth = f"structure of {stored}; --read reads every byte"
    kinds = ("error", "warning", "note")
    found = ", ".join(count(counts[kind], kind) for kind in kinds if counts[kind]) or "nothing to report"
    return f"checked {checked} ({depth}): {found}"
