"""The verb `put`: saves files as a snapshot."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable, Sequence

from holdfast.cli.lookup import open_to_write
from holdfast.cli.output import Output, count, format_bytes
from holdfast.digest import short_hex
from holdfast.errors import BadName, NameInUse, NotFound
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.files import plan_files
from holdfast.repo.format.layout import verify_user_name
from holdfast.repo.names.snapshots import read_name
from holdfast.repo.names.tags import read_tag
from holdfast.repo.write.writer import Request, save


def run_put(options: Namespace, url: str, output: Output) -> int:
    """Save files as a snapshot."""
    metadata = _parse_metadata(options.meta)
    verify_user_name(options.name)
    repo = open_to_write(url, output)
    _verify_no_tag(repo.store, options.name)
    _verify_order(options.name, options.paths)
    sources = plan_files(options.paths, outside=repo.store.url)
    if not sources:
        raise NotFound(f"there are no files in {', '.join(options.paths)}; nothing was saved")
    request = Request(options.name, sources, metadata=metadata, overwrite=options.overwrite)
    result = save(repo, request, progress=output.progress())
    what = f"{result.name}: {count(len(sources), 'file')}, {format_bytes(result.logical_bytes)}"
    if result.existed:
        output.line(f"{what}; already present, nothing was written")
        return 0
    sizes = f"{format_bytes(result.new_bytes)} new, {format_bytes(result.reused_bytes)} reused"
    output.line(f"saved {what} ({sizes}) in {result.seconds:.2f} s; digest {short_hex(result.digest)}")
    return 0


def _verify_order(name: str, paths: Sequence[str]) -> None:
    """Raise NotFound if name and paths seem to be swapped: the name is a file, and a path does not exist."""
    missing = next((path for path in paths if not os.path.lexists(path)), None)
    if missing is not None and os.path.exists(name):
        raise NotFound(f"no file {missing!r}; the name comes first: `holdfast put NAME PATH ...`", name=missing)


def _verify_no_tag(store: ObjectStore, name: str) -> None:
    """Raise NameInUse if a new name would hide a tag: names are looked up before tags."""
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
