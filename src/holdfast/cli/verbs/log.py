"""The verb `log`: prints snapshots newest first, and a graph of which was saved from which."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Final

from holdfast.cli.lookup import explain_missing, list_names, open_to_read
from holdfast.cli.output import Output, format_time
from holdfast.cli.verb import add_json, add_query, document
from holdfast.cli.verbs.ls import format_value
from holdfast.cli.verbs.names import label_tags, print_damage
from holdfast.json_text import Json
from holdfast.query.expression import FieldRef
from holdfast.query.facts import Facts, describe_damage, describe_snapshot, make_facts, split_damaged
from holdfast.query.globs import Glob, is_glob
from holdfast.query.lineage import HistoryEntry, find_ancestors, iter_graph, make_history
from holdfast.query.select import parse_query, select
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import DamagedName, Tag, iter_tags, read_tag
from holdfast.texts import list_some

_MAX_METRICS: Final = 4
_STEP, _RANKS, _HOST = (FieldRef((name,)) for name in ("step", "ranks", "host"))


def declare_log(parser: ArgumentParser) -> None:
    """Declare the verb `log`."""
    more = (
        "With the name of a snapshot or a tag, show it and everything that it was saved\n"
        "from. Otherwise show all snapshots that begin with PREFIX, or match it as a\n"
        "glob, newest first.\n"
        "FROM names what the process had loaded when it saved the snapshot, or else the\n"
        "snapshot that it had saved before. A snapshot in parentheses was deleted or\n"
        "overwritten since. Exits with 1 if a snapshot is damaged."
    )
    document(parser, more, examples=["holdfast log run1/", "holdfast log best", "holdfast log run1/ --limit 20"])
    parser.add_argument("name", metavar="NAME|PREFIX", nargs="?", default="", help="a snapshot, a tag, or a prefix")
    add_query(parser)
    parser.add_argument("--limit", metavar="N", type=int, help="show at most N snapshots, the newest")
    add_json(parser)
    parser.set_defaults(run_verb=run_log)


def run_log(options: Namespace, url: str, output: Output) -> int:
    """Print the history of snapshots."""
    query = parse_query(where=options.where)
    parse_query(limit=options.limit)
    repo = open_to_read(url, output)
    snapshots, damaged = split_damaged(list_names(repo, "", options.cache_folder))
    tags = [tag for tag in iter_tags(repo.store) if not isinstance(tag, DamagedName)]
    facts = {each.snapshot.name: each for each in make_facts(snapshots, tags, now_s=repo.store.clock())}
    matching = {each.snapshot.name for each in select(facts.values(), query)}
    chosen = _choose(repo, make_history(snapshots), options.name)
    found = [entry for entry in chosen if entry.snapshot.name in matching][: options.limit]
    if options.json:
        history = [_describe(entry, tags) for entry in found]
        output.json(
            {"store": repo.store.url, "history": history, "damaged": [describe_damage(each) for each in damaged]}
        )
    else:
        _print_history(found, facts, tags, output)
        print_damage(damaged, output)
        if not found:
            output.note(f"no snapshot to show in {repo.store.url}")
    return 1 if damaged else 0


def _choose(repo: Repository, history: Sequence[HistoryEntry], name: str) -> list[HistoryEntry]:
    """Return the entries that the user means: a snapshot with its ancestors, or those under a prefix or glob."""
    names = {entry.snapshot.name for entry in history}
    if name not in names and name:
        tag = read_tag(repo.store, name) if not name.endswith("/") else None
        name = tag.snapshot_name if tag else name
    if name in names:
        return find_ancestors(history, name)
    found = [entry for entry in history if entry.snapshot.name.startswith(name)]
    if not found and is_glob(name):
        glob = Glob(name)
        found = [entry for entry in history if glob.matches(entry.snapshot.name)]
    if not found and name:
        raise explain_missing(repo.store, name)
    return found


def _print_history(found: Sequence[HistoryEntry], facts: dict[str, Facts], tags: Sequence[Tag], output: Output) -> None:
    headers = ["", "NAME", "WHEN", "STEP", "RANKS", "HOST", "FROM", "METRICS", "TAGS"]
    rows = [
        [row.lanes, *(_make_cells(row.entry, facts[row.entry.snapshot.name], tags) if row.entry else [""] * 8)]
        for row in iter_graph(found)
    ]
    if rows:
        output.table(headers, rows, right="STEP RANKS")


def _make_cells(entry: HistoryEntry, facts: Facts, tags: Sequence[Tag]) -> list[str]:
    snapshot = entry.snapshot
    return [
        snapshot.name,
        format_time(snapshot.time_s),
        *(format_value(field, facts.find(field)) for field in (_STEP, _RANKS, _HOST)),
        _format_origin(entry),
        _format_metrics(facts),
        label_tags(snapshot, tags),
    ]


def _format_origin(entry: HistoryEntry) -> str:
    lineage = entry.lineage
    names = [origin.name for origin in lineage.loaded] or ([lineage.previous] if lineage.previous else [])
    shown = [f"({name})" if name in entry.lost else name for name in names]
    if not shown:
        return "-"
    return f"{'loaded' if lineage.loaded else 'after'} {list_some(shown, 3)}"


def _format_metrics(facts: Facts) -> str:
    metrics = [f"{name} {format_value(FieldRef(('metrics', name)), value)}" for name, value in facts.iter_metrics()]
    return list_some(metrics, _MAX_METRICS) or "-"


def _describe(entry: HistoryEntry, tags: Sequence[Tag]) -> dict[str, Json]:
    loaded = [{"name": origin.name, "digest": origin.digest_hex or None} for origin in entry.lineage.loaded]
    return {
        **describe_snapshot(entry.snapshot, tags),
        "environment": entry.snapshot.environment,
        "loaded": loaded,
        "previous": entry.lineage.previous or None,
        "parents": list(entry.parents),
        "lost": list(entry.lost),
    }
