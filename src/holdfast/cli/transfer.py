"""The verbs that move bytes: put, get, cat."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterable

from holdfast.cli.lookup import find_snapshot, open_to_read, open_to_write
from holdfast.cli.output import Output, count, format_bytes
from holdfast.digest import short_hex
from holdfast.errors import BadName, NameInUse, NotFound
from holdfast.repo.filetree import is_below, plan_files, restore
from holdfast.repo.reader import open_snapshot
from holdfast.repo.record import Json
from holdfast.repo.snapshots import read_name
from holdfast.repo.tags import read_tag
from holdfast.repo.writer import Request, save
from holdfast.store.protocol import ObjectStore


def run_put(options: Namespace, url: str, output: Output) -> int:
    """Save files as a snapshot."""
    metadata = _parse_metadata(options.meta)
    repo = open_to_write(url)
    _verify_no_tag(repo.store, options.name)
    sources = plan_files(options.paths, outside=repo.store.url)
    if not sources:
        raise NotFound(f"there are no files in {', '.join(options.paths)}; nothing was saved")
    request = Request(options.name, sources, metadata=metadata, overwrite=options.overwrite)
    result = save(repo, request, progress=output.progress())
    what = f"{result.name}: {count(len(sources), 'file')}, {format_bytes(result.logical_bytes)}"
    if result.existed:
        output.line(f"{what}; it held exactly this already, nothing was written")
        return 0
    sizes = f"{format_bytes(result.new_bytes)} new, {format_bytes(result.reused_bytes)} reused"
    output.line(f"saved {what} ({sizes}) in {result.seconds:.2f} s; digest {short_hex(result.digest)}")
    return 0


def run_get(options: Namespace, url: str, output: Output) -> int:
    """Write the entries of a snapshot as files."""
    repo = open_to_read(url)
    if is_below(options.directory, repo.store.url):
        raise BadName(f"{options.directory} lies inside the store {repo.store.url}; choose a directory outside of it")
    started = time.monotonic()
    with open_snapshot(repo, find_snapshot(repo.store, options.name, output)) as reader:
        done = restore(
            reader, options.directory, only=options.only, overwrite=options.overwrite, progress=output.progress()
        )
    seconds = time.monotonic() - started
    size = f"{count(done.num_files, 'file')}, {format_bytes(done.num_bytes)}"
    output.line(f"wrote {size} to {options.directory} in {seconds:.2f} s")
    return 0


def run_cat(options: Namespace, url: str, output: Output) -> int:
    """Write the bytes of one entry to standard output, each piece verified before it is written."""
    repo = open_to_read(url)
    with open_snapshot(repo, find_snapshot(repo.store, options.name, output)) as reader:
        for piece in reader.iter_entry(reader.find_entry(options.entry)):
            output.raw(piece)
    return 0


def _verify_no_tag(store: ObjectStore, name: str) -> None:
    """Refuse a new name that would hide a tag: names are looked up before tags."""
    tag = read_tag(store, name) if read_name(store, name).snapshot is None else None
    if tag:
        raise NameInUse(
            f"{name!r} is a tag for {tag.snapshot_name!r}, which a snapshot of that name would hide;"
            " choose another name, or delete the tag",
            name=name,
        )


def _parse_metadata(pairs: Iterable[str]) -> dict[str, Json]:
    metadata: dict[str, Json] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadName(f"--meta {pair!r} is not of the form KEY=VALUE")
        if key in metadata:
            raise BadName(f"--meta gives the key {key!r} twice")
        metadata[key] = value
    return metadata
