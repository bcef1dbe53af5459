"""The verb `ls`: lists snapshots as a table, with columns of the user's choice, or as a tree of folders."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.cli.lookup import list_chosen, open_to_read
from holdfast.cli.output import Output, format_bytes, format_time, format_utc
from holdfast.cli.verb import add_json, add_query, document
from holdfast.cli.verbs.names import label_tags, print_damage
from holdfast.digest import short_hex
from holdfast.errors import BadExpression
from holdfast.json_text import Json, canonical_json
from holdfast.query.expression import FieldRef, parse_fields
from holdfast.query.facts import MISSING, Facts, describe_damage, describe_snapshot, make_facts, split_damaged
from holdfast.query.globs import is_glob
from holdfast.query.select import Query, parse_query, select
from holdfast.repo.format.layout import natural_order, split_stem
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, Tag, iter_tags
from holdfast.texts import list_some

_SHOWN: Final = 3
"""Of many snapshots in one folder, so many of the first and of the last are shown."""


@dataclass(slots=True)
class _Folder:
    name: str
    path: str = ""
    """The whole name, with a slash at the end; empty for the top."""
    depth: int = -1
    folders: dict[str, _Folder] = field(default_factory=dict)
    snapshots: list[tuple[str, CommittedSnapshot]] = field(default_factory=list)
    """Snapshots directly in this folder, with the last part of their names."""
    num_snapshots: int = 0
    """Snapshots in this folder and in those below it."""
    logical_bytes: int = 0
    newest_s: float = float("-inf")

    def add(self, snapshot: CommittedSnapshot) -> None:
        *folders, last = snapshot.name.split("/")
        folder = self
        folder._count(snapshot)
        for name in folders:
            folder = folder.folders.setdefault(name, _Folder(name, f"{folder.path}{name}/", folder.depth + 1))
            folder._count(snapshot)
        folder.snapshots.append((last, snapshot))

    def _count(self, snapshot: CommittedSnapshot) -> None:
        self.num_snapshots += 1
        self.logical_bytes += snapshot.logical_bytes
        self.newest_s = max(self.newest_s, snapshot.time_s)


def list_tree(snapshots: Iterable[CommittedSnapshot], *, is_long: bool) -> list[list[str]]:
    """Return the rows of a tree: name, number of snapshots, size, newest. Long folders are folded unless `is_long`."""
    return list(_iter_rows(_make_tree(snapshots), is_long=is_long))


def describe_tree(snapshots: Iterable[CommittedSnapshot]) -> list[Json]:
    """Return every folder of a tree as JSON, each before those below it."""
    return [_describe_folder(folder) for folder in _iter_folders(_make_tree(snapshots)) if folder.path]


def _make_tree(snapshots: Iterable[CommittedSnapshot]) -> _Folder:
    root = _Folder("")
    for snapshot in snapshots:
        root.add(snapshot)
    return root


def _iter_rows(top: _Folder, *, is_long: bool) -> Iterator[list[str]]:
    for folder in _iter_folders(top):
        if folder.path:
            size = format_bytes(folder.logical_bytes)
            name = f"{'  ' * folder.depth}{folder.name}/"
            yield [name, str(folder.num_snapshots), size, format_time(folder.newest_s)]
        yield from _iter_own(folder, is_long=is_long)


def _iter_folders(top: _Folder) -> Iterator[_Folder]:
    # Not recursive: a name may have 2,000 parts.
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        yield folder
        waiting += sorted(folder.folders.values(), key=lambda each: natural_order(each.name), reverse=True)


def _iter_own(folder: _Folder, *, is_long: bool) -> Iterator[list[str]]:
    indent = "  " * (folder.depth + 1)
    own = sorted(folder.snapshots, key=lambda pair: natural_order(pair[0]))
    is_folded = not is_long and len(own) > 2 * _SHOWN + 1
    for name, snapshot in own[:_SHOWN] if is_folded else own:
        yield _make_row(indent + name, snapshot)
    if is_folded:
        between = own[_SHOWN:-_SHOWN]
        size = format_bytes(sum(snapshot.logical_bytes for _, snapshot in between))
        yield [f"{indent}... {len(between)} more; -l shows them", "", size, ""]
        for name, snapshot in own[-_SHOWN:]:
            yield _make_row(indent + name, snapshot)


def _make_row(name: str, snapshot: CommittedSnapshot) -> list[str]:
    return [name, "", format_bytes(snapshot.logical_bytes), format_time(snapshot.time_s)]


def _describe_folder(folder: _Folder) -> Json:
    return {
        "folder": folder.path,
        "snapshots": folder.num_snapshots,
        "logical_bytes": folder.logical_bytes,
        "newest": format_utc(folder.newest_s),
    }


def declare_ls(parser: ArgumentParser) -> None:
    """Declare the verb `ls`."""
    more = (
        "Snapshots are listed in natural order: step-99 comes before step-100. Exits with\n"
        "1 if a snapshot or a tag is damaged. Fields are name, step, created, age, size,\n"
        "entries, ranks, host, tag, digest, generation, and the names of metrics and\n"
        "metadata. In an expression, compare them with =, !=, <, <=, >, >=, in and like,\n"
        "and join conditions with and, or and not: see docs/reference/expressions.md."
    )
    examples = [
        "holdfast ls",
        "holdfast ls run1/ --json",
        "holdfast ls 'run*/step-?00'",
        "holdfast ls run1/ --where 'val_loss < 0.3 and age < 2d' --sort val_loss",
        "holdfast ls run1/ --columns step,val_loss,size --sort -step",
        "holdfast ls --tree",
    ]
    document(parser, more, examples=examples)
    parser.add_argument(
        "prefix", metavar="PREFIX", nargs="?", default="", help="only names that start with this, or match this glob"
    )
    parser.add_argument("-l", "--long", action="store_true", help="also show full digests, generations and metadata")
    add_query(parser)
    parser.add_argument("--sort", metavar="FIELDS", help="sort by these fields; -FIELD sorts descending")
    parser.add_argument("--columns", metavar="FIELDS", help="show the names and these fields: step,loss,size")
    parser.add_argument("--limit", metavar="N", type=int, help="list at most N snapshots")
    parser.add_argument("--tree", action="store_true", help="show folders, with the number and size of their snapshots")
    add_json(parser)
    parser.set_defaults(run_verb=run_ls)


def run_ls(options: Namespace, url: str, output: Output) -> int:
    """List snapshots."""
    query = parse_query(where=options.where, sort=options.sort, limit=options.limit)
    columns = _parse_columns(options)
    repo = open_to_read(url, output)
    tags, damaged_tags = split_damaged(iter_tags(repo.store))
    snapshots, damaged = split_damaged(list_chosen(repo, options.prefix, options.cache_folder))
    facts = make_facts(snapshots, tags, now_s=repo.store.clock())
    found = select(facts, query)
    broken = [*damaged, *damaged_tags]
    if options.json:
        _print_json(repo.store.url, found, tags, broken, output, options=options, columns=columns)
    else:
        _print_found(found, damaged, tags, output, options=options, columns=columns)
        print_damage(broken, output)
        if not found and not damaged:
            output.note(f"{_explain_nothing(options, facts, query)} in {repo.store.url}")
    return 1 if broken else 0


def _parse_columns(options: Namespace) -> dict[str, FieldRef]:
    """Return the columns that the user chose, by their headers."""
    if options.columns is None:
        return {}
    if options.tree:
        raise BadExpression("--tree shows folders, which have no fields; leave out --columns")
    fields = parse_fields(options.columns)
    return dict(zip((text.strip() for text in options.columns.split(",")), fields, strict=True))


def _explain_nothing(options: Namespace, facts: Sequence[Facts], query: Query) -> str:
    """Return why nothing is listed; names a field that no snapshot has, because it may be misspelled."""
    prefix = options.prefix
    if not facts:
        which = f"{'matches' if is_glob(prefix) else 'starts with'} {prefix!r}" if prefix else "was saved yet"
        return f"no snapshot {which}"
    unknown = [field for field in query.fields if all(each.find(field) is MISSING for each in facts)]
    if unknown:
        known = sorted({name for each in facts for name, _ in each.iter_metrics()} | _find_keys(facts))
        return f"no snapshot here has the field {str(unknown[0])!r} (fields that exist: {list_some(known, 12)})"
    return f"none of {len(facts)} snapshots matches"


def _find_keys(facts: Iterable[Facts]) -> set[str]:
    return {key for each in facts for key in each.snapshot.metadata if key != "metrics"}


def _print_json(
    url: str,
    found: Sequence[Facts],
    tags: Sequence[Tag],
    broken: Sequence[DamagedName],
    output: Output,
    *,
    options: Namespace,
    columns: dict[str, FieldRef],
) -> None:
    described = [_describe(each, tags, columns) for each in found]
    answer: dict[str, Json] = {"store": url, "snapshots": described}
    if options.tree:
        answer["tree"] = describe_tree([each.snapshot for each in found])
    output.json({**answer, "damaged": [describe_damage(name) for name in broken]})


def _describe(facts: Facts, tags: Sequence[Tag], columns: dict[str, FieldRef]) -> dict[str, Json]:
    described = {**describe_snapshot(facts.snapshot, tags), "environment": facts.snapshot.environment}
    if columns:
        described["columns"] = {header: _to_json(facts.find(field)) for header, field in columns.items()}
    return described


def _to_json(value: Json) -> Json:
    if value is MISSING:
        return None
    # JSON has no infinity and no NaN.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print_found(
    found: Sequence[Facts],
    damaged: Sequence[DamagedName],
    tags: Sequence[Tag],
    output: Output,
    *,
    options: Namespace,
    columns: dict[str, FieldRef],
) -> None:
    snapshots = [each.snapshot for each in found]
    if options.tree:
        rows = list_tree(snapshots, is_long=options.long)
        if rows:
            output.table(["NAME", "SNAPSHOTS", "SIZE", "NEWEST"], rows, right="SNAPSHOTS SIZE")
    elif columns:
        _print_columns(found, columns, output)
    else:
        _print_snapshots(snapshots, damaged, tags, output, long=options.long)


def _print_columns(found: Sequence[Facts], columns: dict[str, FieldRef], output: Output) -> None:
    values = [[each.find(field) for field in columns.values()] for each in found]
    rows = [
        [each.snapshot.name, *(format_value(field, value) for field, value in zip(columns.values(), row, strict=True))]
        for each, row in zip(found, values, strict=True)
    ]
    numeric = [header for number, header in enumerate(columns) if all(_is_numeric(row[number]) for row in values)]
    if rows:
        output.table(["NAME", *columns], rows, right=" ".join(numeric))


def _is_numeric(value: Json) -> bool:
    return value is MISSING or (isinstance(value, int | float) and not isinstance(value, bool))


def format_value(field: FieldRef, value: Json) -> str:
    """Return the value of a field as the cell of a table; `-` if the snapshot does not have it."""
    if value is MISSING:
        return "-"
    if field.path == ("created",):
        return format_time(value)
    if field.path == ("age",):
        return format_age(value)
    if field.path == ("size",):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if field.path == ("tag",):
        return ", ".join(value)
    return value if isinstance(value, str) else canonical_json(value).decode()


def format_age(seconds: float) -> str:
    """Return an age with its largest unit: 5s, 3m, 2h, 4d."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if abs(seconds) >= size:
            return f"{int(seconds / size)}{unit}"
    return f"{int(seconds)}s"


def _print_snapshots(
    snapshots: Sequence[CommittedSnapshot],
    damaged: Sequence[DamagedName],
    tags: Sequence[Tag],
    output: Output,
    *,
    long: bool,
) -> None:
    headers = ["NAME", "WHEN", "ENTRIES", "SIZE", "DIGEST", "TAGS"]
    rows = [
        [
            snapshot.name,
            format_time(snapshot.time_s),
            str(snapshot.num_entries),
            format_bytes(snapshot.logical_bytes),
            snapshot.digest.hex() if long else short_hex(snapshot.digest),
            label_tags(snapshot, tags),
        ]
        for snapshot in snapshots
    ]
    rows += [[split_stem(name.stem), "damaged", "-", "-", "-", ""] for name in damaged]
    if long:
        headers += ["GENERATION", "METADATA"]
        extra = [[str(snapshot.generation), canonical_json(snapshot.metadata).decode()] for snapshot in snapshots]
        rows = [[*row, *more] for row, more in zip(rows, [*extra, *([["-", ""]] * len(damaged))], strict=True)]
    if rows:
        output.table(headers, rows, right="ENTRIES SIZE GENERATION")
