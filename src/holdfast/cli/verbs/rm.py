"""The verb `rm`: prints what would be deleted and how much that frees, and deletes with --yes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from holdfast.cli.lookup import expand_names, explain_missing, open_for_plan
from holdfast.cli.output import Output, count, format_bytes, format_time
from holdfast.cli.verb import add_json, document
from holdfast.errors import Corrupt, NameInUse, NewerFormat, NotFound
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.query.facts import describe_snapshot, split_damaged
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import CommittedSnapshot, Tag, delete_snapshot, iter_tags, read_name, read_tag
from holdfast.repo.upkeep.usage import read_freed_bytes


def declare_rm(parser: ArgumentParser) -> None:
    """Declare the verb `rm`."""
    more = (
        "Prints what would be deleted, and deletes only with --yes. Refuses a snapshot\n"
        "that a tag points to. `holdfast gc` then frees the space."
    )
    examples = ["holdfast rm run1/step-100", "holdfast rm run1/step-100 --yes", "holdfast rm 'run1/step-1*'"]
    document(parser, more, examples=examples)
    parser.add_argument("names", metavar="NAME", nargs="+", help="a snapshot, or a glob for snapshots")
    parser.add_argument("--yes", action="store_true", help="delete; without it, only print what would be deleted")
    add_json(parser)
    parser.set_defaults(run_verb=run_rm)


def run_rm(options: Namespace, url: str, output: Output) -> int:
    """Delete snapshots with --yes; without it, only print them."""
    repo = open_for_plan(url, output, is_applied=options.yes)
    tags, damaged = split_damaged(iter_tags(repo.store))
    names = expand_names(repo.store, options.names)
    chosen = repo.store.run_together([partial(_read_deletable, repo.store, name, tags) for name in names])
    for broken in damaged:
        output.note(f"{broken.error}; it may point to one of these snapshots. Run `holdfast check`")
    freed_bytes = _read_freed_bytes(repo.store, chosen)
    for snapshot in _iter_deleted(repo.store, chosen) if options.yes else chosen:
        if not options.json:
            _print_snapshot(snapshot, output, is_deleted=options.yes)
    if options.json:
        described = [describe_snapshot(snapshot, tags) for snapshot in chosen]
        facts: dict[str, Json] = {"store": repo.store.url, "snapshots": described, "is_deleted": options.yes}
        output.json({**facts, "freed_bytes": freed_bytes})
        return 0
    freed = "an unknown amount: a snapshot cannot be read" if freed_bytes is None else format_bytes(freed_bytes)
    if options.yes:
        output.line(f"`holdfast gc --yes` can now free {freed}")
    else:
        output.line(
            f"nothing was deleted; repeat with --yes to delete {count(len(chosen), 'snapshot')} and free {freed}"
        )
    return 0


def _iter_deleted(store: ObjectStore, chosen: Sequence[CommittedSnapshot]) -> Iterator[CommittedSnapshot]:
    """Delete snapshots, and yield each when it was deleted."""
    return store.iter_together((partial(delete_snapshot, store, snapshot.name), 0) for snapshot in chosen)


def _print_snapshot(snapshot: CommittedSnapshot, output: Output, *, is_deleted: bool) -> None:
    size = f"{count(snapshot.num_entries, 'entry')}, {format_bytes(snapshot.logical_bytes)}"
    verb = "deleted" if is_deleted else "would delete"
    output.line(f"{verb} {snapshot.name} ({size}, saved {format_time(snapshot.time_s)})")


def _read_freed_bytes(store: ObjectStore, chosen: Sequence[CommittedSnapshot]) -> int | None:
    """Return how many bytes only these snapshots use; None if a snapshot cannot be read."""
    try:
        return read_freed_bytes(store, read_live(store).current, chosen)
    except (Corrupt, NewerFormat, NotFound):
        return None


def _read_deletable(store: ObjectStore, name: str, tags: Iterable[Tag]) -> CommittedSnapshot:
    """Return the snapshot of a name; raises NameInUse if a tag points to it."""
    snapshot = read_name(store, name).snapshot
    if snapshot is None:
        if read_tag(store, name):
            raise NotFound(f"{name!r} is a tag; delete it with `holdfast tag --delete {name}`", name=name)
        raise explain_missing(store, name)
    pinned = [tag.name for tag in tags if tag.snapshot_name == snapshot.name]
    if pinned:
        raise NameInUse(
            f"{name!r} is kept by the tag {pinned[0]!r}; nothing was deleted."
            f" Delete the tag first (`holdfast tag --delete {pinned[0]}`) or move it",
            name=name,
        )
    return snapshot
