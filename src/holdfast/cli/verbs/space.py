"""The verbs about disk space: `du`, `prune` and `gc`."""

from __future__ import annotations

import unicodedata
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict

from holdfast.cli.lookup import open_for_plan, open_to_read
from holdfast.cli.output import Output, count, format_bytes, format_time
from holdfast.cli.verb import add_json, add_prefix, add_yes, document
from holdfast.errors import BadName, HoldfastError
from holdfast.mirror.retention import keep_unmirrored
from holdfast.repo.format.layout import natural_order
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.upkeep.collect import Collected, CollectPlan, Rules, collect, plan_collect, verify_may_collect
from holdfast.repo.upkeep.prune import Best, Keep, Pruned, PrunePlan, apply_prune_in_groups, parse_best, read_prune_plan
from holdfast.repo.upkeep.transfer import SLACK_SHARE, RepackPlan, apply_repack, plan_repack
from holdfast.repo.upkeep.usage import SnapshotUsage, Usage, read_usage
from holdfast.texts import parse_duration


def declare_du(parser: ArgumentParser) -> None:
    """Declare the verb `du`."""
    more = (
        "LOGICAL is the size of the values, as `holdfast show` prints it. STORED is the\n"
        "size of a snapshot in packs and manifests, SHARED the part that other snapshots\n"
        "also use, OWN the part that deleting the snapshot can free. Small values are\n"
        "inline: in the manifest, so that each snapshot has its own copy of them. The\n"
        "last line counts whole files, with the headers and padding of packs."
    )
    document(parser, more, examples=["holdfast du", "holdfast du run1/"])
    add_prefix(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run_du)


def run_du(options: Namespace, url: str, output: Output) -> int:
    """Print how much space snapshots use."""
    store = open_to_read(url, output).store
    snapshots = sorted(read_live(store).current, key=lambda snapshot: natural_order(snapshot.name))
    # Read for the whole store: chunks shared with snapshots outside the prefix count as shared, too.
    usage = read_usage(store, snapshots)
    prefix = unicodedata.normalize("NFC", options.prefix)
    shown = [each for each in usage.snapshots if each.snapshot.name.startswith(prefix)]
    totals = _sum(usage)
    if options.json:
        output.json({"store": store.url, "snapshots": [_describe(each) for each in shown], **totals})
        return 0
    headers = ["NAME", "LOGICAL", "STORED", "SHARED", "OWN"]
    rows = [
        [
            each.snapshot.name,
            *map(format_bytes, (each.snapshot.logical_bytes, each.stored_bytes, each.shared_bytes, each.own_bytes)),
        ]
        for each in shown
    ]
    if rows:
        output.table(headers, rows, right="LOGICAL STORED SHARED OWN")
    saved = f", {format_bytes(usage.saved_bytes)} less by compression" if usage.saved_bytes else ""
    output.line(
        f"{count(len(usage.snapshots), 'snapshot')} of {format_bytes(totals['logical_bytes'])}, stored in"
        f" {format_bytes(totals['stored_bytes'])}{saved};"
        f" `holdfast gc` can free {format_bytes(totals['reclaimable_bytes'])}"
    )
    return 0


def declare_prune(parser: ArgumentParser) -> None:
    """Declare the verb `prune`."""
    more = (
        "A snapshot is kept if any rule keeps it, if it has a tag, or if a mirror of the\n"
        "store lacks it (see `holdfast mirror`). Prints its plan, and acts only with\n"
        "--yes. `holdfast gc` then frees the space."
    )
    examples = [
        "holdfast prune --keep-last 3 run1/",
        "holdfast prune --keep-every 1000 --keep-within 7d run1/ --yes",
        "holdfast prune --keep-last 1 --keep-best val_loss:2 run1/ --yes",
    ]
    document(parser, more, examples=examples)
    add_prefix(parser)
    parser.add_argument("--keep-last", metavar="N", type=int, default=0, help="keep the newest N")
    parser.add_argument("--keep-every", metavar="N", type=int, default=0, help="keep steps that are multiples of N")
    parser.add_argument("--keep-within", metavar="TIME", help="keep snapshots younger than TIME: 30m, 12h, 7d, 2w")
    parser.add_argument(
        "--keep-best",
        metavar="METRIC:N",
        type=_parse_best,
        help="keep the N with the smallest METRIC of their metadata; METRIC:N:max for the largest",
    )
    add_yes(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run_prune)


def _parse_best(text: str) -> Best:
    try:
        return parse_best(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def run_prune(options: Namespace, url: str, output: Output) -> int:
    """Print which snapshots would be deleted; delete them with --yes."""
    try:
        within_s = parse_duration(options.keep_within or "0s")
        keep = Keep(options.keep_last, options.keep_every, within_s, best=options.keep_best)
        repo = open_for_plan(url, output, is_applied=options.yes)
        store = repo.store
        plan = keep_unmirrored(repo, read_prune_plan(store, options.prefix, keep))
    except ValueError as error:
        if isinstance(error, HoldfastError):
            raise
        raise BadName(str(error)) from error
    if not options.json:
        _print_prune(plan, output)
    done = apply_prune_in_groups(store, plan, output.progress()) if options.yes else Pruned(plan.delete, ())
    if options.json:
        output.json({"store": store.url, **_describe_prune(plan, done)})
    for verdict in done.kept:
        output.note(f"kept {verdict.snapshot.name} after all: {', '.join(verdict.reasons)}")
    if options.yes:
        output.note(f"deleted {count(len(done.deleted), 'snapshot')}; `holdfast gc --yes` frees the space")
    elif plan.delete:
        output.note(f"nothing was deleted; repeat with --yes to delete {count(len(plan.delete), 'snapshot')}")
    return 0


def declare_gc(parser: ArgumentParser) -> None:
    """Declare the verb `gc`."""
    more = (
        "Run it after rm or prune; it is safe while other processes save. If no process\n"
        "is saving to a local store, space is freed at once. Otherwise files are marked\n"
        "first, and deleted by this run or a later one when no process can be using them.\n"
        "Prints its plan, and acts only with --yes."
    )
    document(parser, more, examples=["holdfast gc", "holdfast gc --yes"])
    parser.add_argument("--repack", action="store_true", help="also rewrite packs that are mostly unused")
    parser.add_argument(
        "--min-age", metavar="TIME", default="1h", help="keep files that are younger than TIME (default: 1h)"
    )
    parser.add_argument("--wait", metavar="TIME", default="0s", help="wait at most this long for running saves")
    add_yes(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run_gc)


def run_gc(options: Namespace, url: str, output: Output) -> int:
    """Print the files that no snapshot needs; delete them with --yes."""
    rules = Rules(min_age_s=parse_duration(options.min_age), wait_s=parse_duration(options.wait))
    repo = open_for_plan(url, output, is_applied=options.yes)
    verify_may_collect(repo.store)
    if options.repack:
        _repack(repo, options, output)
    if not options.yes:
        _print_plan(plan_collect(repo.store, min_age_s=0.0), output, as_json=options.json)
        return 0
    outcome = collect(repo.store, rules, store_id=repo.identity.store_id, progress=output.progress())
    if options.json:
        output.json(asdict(outcome))
    else:
        _print_outcome(outcome, output)
    return 0


def _repack(repo: Repository, options: Namespace, output: Output) -> None:
    plan: RepackPlan = plan_repack(repo, read_live(repo.store).current, slack_share=SLACK_SHARE)
    if not plan.victims:
        output.note("no pack is worth repacking")
        return
    what = f"{count(len(plan.victims), 'pack')} used by {count(len(plan.snapshots), 'snapshot')}"
    size = f"copying {format_bytes(plan.live_bytes)} to free {format_bytes(plan.freed_bytes)}"
    if not options.yes:
        output.note(f"would repack {what}: {size}")
        return
    moved = apply_repack(repo, plan, progress=output.progress())
    output.note(f"repacked {count(len(moved), 'snapshot')} out of {what}: {size}")


def _print_plan(plan: CollectPlan, output: Output, *, as_json: bool) -> None:
    if as_json:
        dead = [{"key": info.key, "bytes": info.size_bytes} for info in plan.dead]
        output.json({"dead": dead, "dead_bytes": plan.dead_bytes, "live_bytes": plan.live_bytes})
        return
    for info in plan.dead:
        output.line(f"would delete {info.key} ({format_bytes(info.size_bytes)})")
    not_needed = f"{count(len(plan.dead), 'file')}, {format_bytes(plan.dead_bytes)}"
    output.line(f"not needed: {not_needed}; in use: {format_bytes(plan.live_bytes)}")
    if plan.dead or plan.records:
        output.note("nothing was deleted; repeat with --yes to delete files that are old enough and not in use")


def _print_outcome(outcome: Collected, output: Output) -> None:
    output.line(
        f"deleted {count(outcome.deleted, 'file')}, {format_bytes(outcome.freed_bytes)};"
        f" {count(outcome.records, 'old record')}, {count(outcome.leases, 'ended lease')},"
        f" {count(outcome.debris, 'temporary file')}"
    )
    if outcome.pending_marks:
        output.note(
            f"{format_bytes(outcome.pending_bytes)} are marked and wait for {outcome.waiting_for[0]};"
            " run gc again later, or with --wait 10m"
        )
    for key in outcome.unfenced:
        output.note(
            f"{key} is a stale lease that cannot be fenced, because its generation numbers are exhausted: files that it"
            " might use are kept. If its save is dead, delete that file and run gc again"
        )


def _print_prune(plan: PrunePlan, output: Output) -> None:
    rows = [
        [
            "keep" if verdict.reasons else "delete",
            verdict.snapshot.name,
            format_time(verdict.snapshot.time_s),
            format_bytes(verdict.snapshot.logical_bytes),
            ", ".join(verdict.reasons),
        ]
        for verdict in plan.verdicts
    ]
    if rows:
        output.table(["", "NAME", "WHEN", "SIZE", "WHY"], rows, right="SIZE")
    else:
        output.note("no snapshots to prune")


def _describe_prune(plan: PrunePlan, done: Pruned) -> dict[str, list[str]]:
    kept = [*plan.keep, *(verdict.snapshot for verdict in done.kept)]
    return {
        "keep": sorted((snapshot.name for snapshot in kept), key=natural_order),
        "delete": [snapshot.name for snapshot in done.deleted],
    }


def _describe(usage: SnapshotUsage) -> dict[str, str | int]:
    return {
        "name": usage.snapshot.name,
        "logical_bytes": usage.snapshot.logical_bytes,
        "stored_bytes": usage.stored_bytes,
        "shared_bytes": usage.shared_bytes,
        "own_bytes": usage.own_bytes,
        "raw_bytes": usage.raw_bytes,
    }


def _sum(usage: Usage) -> dict[str, int]:
    return {
        "logical_bytes": usage.logical_bytes,
        "stored_bytes": usage.stored_bytes,
        "pack_bytes": usage.stored_bytes - usage.manifest_bytes,
        "manifest_bytes": usage.manifest_bytes,
        "live_bytes": usage.live_bytes,
        "reclaimable_bytes": usage.reclaimable_bytes,
        "compression_saved_bytes": usage.saved_bytes,
    }
