"""The verbs `repair` and `copy`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from holdfast.cli.lookup import open_for_plan, open_to_read, read_named_snapshot
from holdfast.cli.output import Output, count, describe_saved, format_bytes
from holdfast.cli.verb import add_json, add_yes, document
from holdfast.compile_cache.artifacts.catalog import ARTIFACTS
from holdfast.compile_cache.artifacts.storing import copy_artifact
from holdfast.errors import NotFound
from holdfast.files.keep import verify_other_store
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.url import open_store
from holdfast.repo.format.layout import natural_order
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, iter_user_names
from holdfast.repo.upkeep.repair import RepairPlan, apply_repair, plan_repair
from holdfast.repo.upkeep.transfer import copy_snapshot
from holdfast.repo.write.writer import SaveResult


def declare_repair(parser: ArgumentParser) -> None:
    """Declare the verb `repair`."""
    more = (
        "Reads every byte. Rebuilds the index, lists damaged packs as bad, and lets\n"
        "snapshots use other copies of damaged chunks, if the store has them. With\n"
        "--from, copies what is lost from another store that has the same content, such\n"
        "as a copy or a mirror; only damaged and missing chunks are copied. Reports lost\n"
        "data; no snapshot is deleted. Prints its plan, and acts only with --yes. Exits\n"
        "with 1 if something is lost."
    )
    examples = ["holdfast repair", "holdfast repair --yes", "holdfast repair --from s3://bucket/ckpts --yes"]
    document(parser, more, examples=examples)
    parser.add_argument("--from", dest="source", metavar="STORE", help="a store that may have what this one lost")
    add_yes(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run_repair)


def run_repair(options: Namespace, url: str, output: Output) -> int:
    """Print what can be repaired and what is lost; repair with --yes. Returns 1 if something is lost."""
    repo = open_for_plan(url, output, is_applied=options.yes)
    source = None if options.source is None else open_to_read(options.source, output)
    plan = plan_repair(repo, source=source, progress=output.progress())
    if options.json:
        output.json(_describe(plan))
    else:
        _print(plan, output)
    if plan.actions and not options.yes:
        output.note(f"nothing was changed; repeat with --yes for {count(len(plan.actions), 'action')}")
    if options.yes:
        done = apply_repair(repo, plan, source=source, progress=output.progress())
        output.note(f"carried out {count(len(done), 'action')} of {len(plan.actions)}")
    return 1 if plan.losses else 0


def declare_copy(parser: ArgumentParser) -> None:
    """Declare the verb `copy`."""
    more = (
        "Copies only chunks that the other store does not have, and verifies them on both\n"
        "sides. Content, digest, metadata and commit time are kept. If a copy is\n"
        "interrupted, run it again. A NAME that ends in / means all snapshots that begin\n"
        "with it: run1/, or @compiled/ for all compiled graphs. A compiled graph that the\n"
        "other store has in another form is not replaced."
    )
    examples = [
        "holdfast copy run1/step-100 best --to /mnt/backup",
        "holdfast copy @compiled/ --to /media/usb/bundle",
    ]
    document(parser, more, examples=examples)
    parser.add_argument("names", metavar="NAME", nargs="+", help="a snapshot, a tag, or a prefix that ends in /")
    parser.add_argument("--to", metavar="STORE", required=True, help="the other store; created if it does not exist")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the content of these names in the other store"
    )
    parser.add_argument("--no-create", action="store_true", help="fail if there is no store at --to")
    add_json(parser)
    parser.set_defaults(run_verb=run_copy)


def run_copy(options: Namespace, url: str, output: Output) -> int:
    """Copy snapshots to another store; only missing chunks are copied."""
    source = open_to_read(url, output)
    verify_other_store(source, options.to)
    target = open_repository(open_store(options.to), create=not options.no_create, stages=output.stages)
    damaged = 0
    copied: list[Json] = []
    for snapshot in _iter_wanted(source.store, options.names, output):
        if isinstance(snapshot, DamagedName):
            output.note(f"{snapshot.stem} is damaged and was not copied: {snapshot.error}; run `holdfast check`")
            damaged += 1
            continue
        result = _copy(source, snapshot, target, output, overwrite=options.overwrite)
        copied.append({"source": snapshot.name, **describe_saved(result)})
        if not options.json:
            _print_copied(snapshot, result, target.store.url, output)
    if options.json:
        output.json({"store": source.store.url, "to": target.store.url, "copied": copied, "damaged": damaged})
    return 1 if damaged else 0


def _copy(
    source: Repository, snapshot: CommittedSnapshot, target: Repository, output: Output, *, overwrite: bool
) -> SaveResult:
    if snapshot.name.startswith(ARTIFACTS):
        return copy_artifact(source, snapshot, target, progress=output.progress())
    return copy_snapshot(source, snapshot, target, overwrite=overwrite, progress=output.progress())


def _print_copied(snapshot: CommittedSnapshot, result: SaveResult, url: str, output: Output) -> None:
    is_artifact = snapshot.name.startswith(ARTIFACTS)
    present = f"{url} has the equivalent {result.name}" if is_artifact else f"already present in {url}"
    if result.existed:
        output.line(f"{snapshot.name}: {present}, nothing was copied")
        return
    under = "" if result.name == snapshot.name else f" as {result.name}"
    output.line(
        f"copied {snapshot.name}{under}:"
        f" {count(snapshot.num_entries, 'entry')}, {format_bytes(result.logical_bytes)}"
        f" ({format_bytes(result.new_bytes)} copied, {format_bytes(result.reused_bytes)} already present)"
        f" in {result.seconds:.2f} s"
    )


def _iter_wanted(store: ObjectStore, names: Iterable[str], output: Output) -> Iterator[CommittedSnapshot | DamagedName]:
    """Yield the snapshots of names, tags, and prefixes that end in "/"; raises NotFound for one that matches none."""
    for name in names:
        if not name.endswith("/"):
            yield read_named_snapshot(store, name, output)
            continue
        found = list(iter_user_names(store, name))
        if not found:
            raise NotFound(f"no snapshot starts with {name!r} in {store.url}; `holdfast ls` lists them", name=name)
        yield from sorted(found, key=_order)


def _order(found: CommittedSnapshot | DamagedName) -> tuple[tuple[int, int, str], ...]:
    return natural_order(found.stem if isinstance(found, DamagedName) else found.name)


def _print(plan: RepairPlan, output: Output) -> None:
    for action in plan.actions:
        output.line(f"{action.kind}: {action.target}")
        output.line(f"    {action.reason}")
    for loss in plan.losses:
        entry = f", entry {loss.entry!r}" if loss.entry else ""
        output.line(f"lost: tag {loss.tag!r}" if loss.tag else f"lost: snapshot {loss.snapshot!r}{entry}")
        output.line(f"    {loss.reason}")
    if not plan.actions and not plan.losses:
        output.line("nothing to repair")


def _describe(plan: RepairPlan) -> dict[str, list[dict[str, str]]]:
    return {
        "actions": [{"kind": each.kind, "target": each.target, "reason": each.reason} for each in plan.actions],
        "losses": [asdict(each) for each in plan.losses],
    }
