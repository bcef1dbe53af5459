"""The verbs `init` and `tag`: create a store, and give its snapshots second names."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from functools import partial

from holdfast.cli.lookup import choose_tag, open_to_read, open_to_write, read_named_snapshot
from holdfast.cli.output import Output, format_time, format_utc
from holdfast.cli.verb import add_json, document
from holdfast.digest import short_hex
from holdfast.errors import BadName, Corrupt, HoldfastError, NameInUse, NotFound
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.url import open_store
from holdfast.query.facts import describe_damage, split_damaged
from holdfast.repo.format.layout import TAGS, natural_order, verify_user_name
from holdfast.repo.handle.repository import init_repository
from holdfast.repo.names.snapshots import (
    CommittedSnapshot,
    DamagedName,
    Tag,
    delete_tag,
    iter_tags,
    read_name,
    read_tag,
    set_tag,
)


def declare_init(parser: ArgumentParser) -> None:
    """Declare the verb `init`."""
    more = (
        "The directory must be empty, or not exist yet. PATH defaults to -s, else to\n"
        "$HOLDFAST_STORE, else to the current directory."
    )
    document(parser, more, examples=["holdfast init ckpts"])
    parser.add_argument("path", metavar="PATH", nargs="?", help="the directory; created if it does not exist")
    add_json(parser)
    parser.set_defaults(run_verb=run_init)


def run_init(options: Namespace, url: str, output: Output) -> int:
    """Create an empty store."""
    store = open_store(url)
    config = init_repository(store)
    if options.json:
        output.json({"store": store.url, "id": config.store_id})
    else:
        output.line(f"created an empty store in {store.url} (id {config.store_id})")
    return 0


def declare_tag(parser: ArgumentParser) -> None:
    """Declare the verb `tag`."""
    more = (
        "Without arguments, list all tags. With TAG only, print its snapshot. NAME may be\n"
        "a glob that matches one snapshot, and so may the TAG to print or to delete."
    )
    examples = [
        "holdfast tag best run1/step-100",
        "holdfast tag best run1/step-200 --move",
        "holdfast tag --delete best",
    ]
    document(parser, more, examples=examples)
    parser.add_argument("tag", metavar="TAG", nargs="?", help="the tag to print, set or move")
    parser.add_argument("snapshot", metavar="NAME", nargs="?", help="the snapshot that the tag will point to")
    parser.add_argument("--move", action="store_true", help="move the tag if it points to another snapshot")
    parser.add_argument("--delete", metavar="TAG", help="delete this tag; the snapshot is kept")
    add_json(parser)
    parser.set_defaults(run_verb=run_tag)


def run_tag(options: Namespace, url: str, output: Output) -> int:
    """List, show, set, move or delete tags."""
    if options.delete is not None:
        if options.tag is not None:
            raise HoldfastError("tag: --delete takes one tag and nothing else; see `holdfast tag --help`")
        store = open_to_write(url, output).store
        tag = delete_tag(store, choose_tag(store, options.delete))
        return _report_tag(tag, f"deleted tag {tag.name}, which pointed to {tag.snapshot_name}", options, output)
    if options.tag is None:
        return _list_tags(open_to_read(url, output).store, output, as_json=options.json)
    if options.snapshot is None:
        store = open_to_read(url, output).store
        return _print_tag(store, choose_tag(store, options.tag), output, as_json=options.json)
    verify_user_name(options.tag, what="tag")
    store = open_to_write(url, output).store
    swapped = (options.tag, "the tag comes first, `holdfast tag TAG NAME`")
    snapshot = read_named_snapshot(store, options.snapshot, output, swapped=swapped)
    if read_name(store, options.tag).snapshot:
        raise NameInUse(
            f"{options.tag!r} is the name of a snapshot, which would hide a tag of that name; choose another tag",
            name=options.tag,
        )
    tag = set_tag(store, options.tag, snapshot, move=options.move)
    return _report_tag(tag, f"tag {tag.name} points to {tag.snapshot_name} ({short_hex(tag.digest)})", options, output)


def _report_tag(tag: Tag, text: str, options: Namespace, output: Output) -> int:
    """Print what happened to a tag, as a sentence or as JSON."""
    if options.json:
        is_deleted = options.delete is not None
        output.json({"tag": tag.name, "name": tag.snapshot_name, "digest": tag.digest.hex(), "is_deleted": is_deleted})
    else:
        output.line(text)
    return 0


def label_tags(snapshot: CommittedSnapshot, tags: Iterable[Tag]) -> str:
    """Return the tags of a snapshot as text; marks tags that were set before its content changed."""
    own = [tag for tag in tags if tag.snapshot_name == snapshot.name]
    return ", ".join(tag.name if tag.digest == snapshot.digest else f"{tag.name} (changed since)" for tag in own)


def print_damage(broken: Iterable[DamagedName], output: Output) -> None:
    """Print a message about each damaged name."""
    for name in broken:
        output.note(f"{name.stem} is damaged: {name.error}; run `holdfast check`")


def _list_tags(store: ObjectStore, output: Output, *, as_json: bool) -> int:
    tags, damaged = split_damaged(iter_tags(store))
    tags.sort(key=lambda tag: natural_order(tag.name))
    states = store.run_together([partial(_judge_tag, store, tag) for tag in tags])
    if as_json:
        described = [_describe_tag(tag, state) for tag, state in zip(tags, states, strict=True)]
        output.json({"store": store.url, "tags": described, "damaged": [describe_damage(name) for name in damaged]})
    else:
        rows = [
            [tag.name, tag.snapshot_name, format_time(tag.time_s), state]
            for tag, state in zip(tags, states, strict=True)
        ]
        rows += [[name.stem.removeprefix(TAGS), "-", "-", "damaged"] for name in damaged]
        if rows:
            output.table(["TAG", "SNAPSHOT", "SET", "STATE"], rows)
        else:
            output.note(f"no tags in {store.url}; set one with `holdfast tag TAG NAME`")
        print_damage(damaged, output)
    return 1 if damaged or {"missing", "damaged"} & set(states) else 0


def _print_tag(store: ObjectStore, name: str, output: Output, *, as_json: bool) -> int:
    tag = read_tag(store, name)
    if tag is None:
        raise NotFound(f"no tag {name!r} in {store.url}; `holdfast tag` lists them", name=name)
    if as_json:
        output.json(_describe_tag(tag, _judge_tag(store, tag)))
    else:
        output.line(tag.snapshot_name)
    return 0


def _judge_tag(store: ObjectStore, tag: Tag) -> str:
    """Return whether the snapshot of a tag still has the content it had when the tag was set."""
    try:
        snapshot = read_name(store, tag.snapshot_name, likely=0).snapshot
    except (Corrupt, BadName):
        return "damaged"
    if snapshot is None:
        return "missing"
    return "ok" if snapshot.digest == tag.digest else "changed since"


def _describe_tag(tag: Tag, state: str) -> dict[str, Json]:
    return {
        "tag": tag.name,
        "snapshot": tag.snapshot_name,
        "digest": tag.digest.hex(),
        "time": format_utc(tag.time_s),
        "time_s": tag.time_s,
        "state": state,
    }
