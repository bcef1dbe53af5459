"""The verbs `put`, `get` and `cat`: save files as a snapshot, and write entries as files or to standard output."""

from __future__ import annotations

import os
import re
import time
from argparse import ArgumentParser, Namespace
from base64 import b64encode
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from io import BytesIO
from typing import TYPE_CHECKING, Final

from holdfast.cli.lookup import open_to_read, open_to_write, read_named_snapshot
from holdfast.cli.output import Output, count, describe_saved, format_bytes
from holdfast.cli.verb import (
    add_compression,
    add_follow_links,
    add_json,
    add_metadata,
    document,
    parse_compression,
    parse_metadata,
)
from holdfast.digest import short_hex
from holdfast.errors import BadName, NotFound
from holdfast.files.keep import keep_files, plan_sources, restore_files, verify_target
from holdfast.json_text import Json
from holdfast.repo.format.chunk import UNIT_BYTES
from holdfast.repo.format.entry import NO_RANK
from holdfast.repo.format.layout import verify_user_name
from holdfast.repo.read.reader import SnapshotReader, open_snapshot
from holdfast.repo.read.stream import open_entry
from holdfast.repo.write.writer import WriteOptions
from holdfast.texts import list_some

if TYPE_CHECKING:
    from holdfast.trees.outline import Leaf

_RANGE: Final = re.compile(r"(-?[0-9]{1,18})?:(-?[0-9]{1,18})?")
_TREE: Final = "tree"
"""Key of the encoded tree in a manifest's spec; a snapshot of files has none."""
_TENSORS: Final = frozenset({"tensor", "array"})
_MAX_NAMED: Final = 3


def declare_put(parser: ArgumentParser) -> None:
    """Declare the verb `put`."""
    more = (
        "A file becomes an entry with the name of the file. A directory DIR becomes\n"
        "entries DIR/...; DIR/ and . add the files in them without the directory's name.\n"
        "Hidden files are included, empty directories are not. A PATH that is a link to a\n"
        "file is saved as the file; one to a directory is refused, unless written LINK/.\n"
        "Below DIR, links to files in DIR are followed; others are refused, unless\n"
        "--follow-links is given. Saving the same content again under the same name\n"
        "writes nothing. A file of safetensors or torch.save shares its bytes with\n"
        "snapshots that contain the same tensors."
    )
    examples = ["holdfast put run1/step-100 model.pt config.json", "holdfast put data/v1 corpus/ --meta source=web"]
    document(parser, more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="the snapshot's name")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a file or directory")
    parser.add_argument("--overwrite", action="store_true", help="replace the snapshot if the name exists, atomically")
    add_follow_links(parser)
    add_compression(parser)
    add_metadata(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run_put)


def run_put(options: Namespace, url: str, output: Output) -> int:
    """Save files as a snapshot."""
    metadata = parse_metadata(options.meta)
    verify_user_name(options.name)
    repo = open_to_write(url, output, compression=parse_compression(options.compression), delta=options.delta)
    _verify_order(options.name, options.paths)
    sources = plan_sources(repo, options.paths, follow_links=options.follow_links)
    chosen = WriteOptions(metadata=metadata, overwrite=options.overwrite)
    result = keep_files(repo, options.name, sources, chosen, progress=output.progress())
    if options.json:
        output.json({"store": repo.store.url, "files": len(sources), **describe_saved(result)})
        return 0
    what = f"{result.name}: {count(len(sources), 'file')}, {format_bytes(result.logical_bytes)}"
    if result.existed:
        output.line(f"{what}; already present, nothing was written")
        return 0
    sizes = f"{result.describe_new()}, {format_bytes(result.reused_bytes)} reused"
    output.line(f"saved {what} ({sizes}) in {result.seconds:.2f} s; digest {short_hex(result.digest)}")
    return 0


def _verify_order(name: str, paths: Sequence[str]) -> None:
    """Raise NotFound if name and paths seem to be swapped: the name is a file, and a path does not exist."""
    missing = next((path for path in paths if not os.path.lexists(path)), None)
    if missing is not None and os.path.exists(name):
        raise NotFound(f"no file {missing!r}; the name comes first: `holdfast put NAME PATH ...`", name=missing)


def declare_get(parser: ArgumentParser) -> None:
    """Declare the verb `get`."""
    more = (
        "Every byte is verified before it is written, and a file appears whole or not at\n"
        "all. If files exist already, all of them are named and nothing is written. Links\n"
        "below DIR are never followed. A tensor becomes a file of raw bytes without a\n"
        "header; `holdfast show` prints its dtype and shape. Plain values, such as\n"
        "numbers and short texts, are not written as files: they are counted and named\n"
        "on standard error, and the exit code is 0. For files that other libraries\n"
        "load, use `holdfast export`."
    )
    examples = ["holdfast get run1/step-100 out", "holdfast get best out --only '*.json'"]
    document(parser, more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("directory", metavar="DIR", help="the target directory; created if it does not exist")
    parser.add_argument("--only", metavar="GLOB", help="only entries whose names match; * matches / too")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist already")
    add_json(parser)
    parser.set_defaults(run_verb=run_get)


def run_get(options: Namespace, url: str, output: Output) -> int:
    """Write the entries of a snapshot as files, and name the values that are not written."""
    repo = open_to_read(url, output)
    verify_target(repo, options.directory)
    started = time.monotonic()
    swapped = (options.directory, "the name comes first, `holdfast get NAME DIR`")
    with open_snapshot(repo, read_named_snapshot(repo.store, options.name, output, swapped=swapped)) as reader:
        plain = _find_plain(reader, options.only)
        _verify_some_file(reader, plain, options.only)
        chosen = {"only": options.only, "overwrite": options.overwrite}
        done = restore_files(repo, reader, options.directory, raw=True, progress=output.progress(), **chosen)
        seconds = time.monotonic() - started
        size = f"{count(done.num_files, 'file')}, {format_bytes(done.num_bytes)}"
        if options.json:
            facts: dict[str, Json] = {"name": reader.snapshot.name, "directory": options.directory, "omitted": plain}
            output.json({**facts, "files": done.num_files, "bytes": done.num_bytes, "seconds": seconds})
        else:
            output.line(f"wrote {size} to {options.directory} in {seconds:.2f} s")
        _note_raw_and_omitted(reader, plain, options.only, output)
    return 0


def declare_cat(parser: ArgumentParser) -> None:
    """Declare the verb `cat`."""
    more = (
        "Each chunk is verified before it is written, so damaged bytes are never written.\n"
        "With --range, only the chunks of that range are read."
    )
    examples = ["holdfast cat run1/step-100 config.json", "holdfast cat run1/step-100 log.txt --range=-1000:"]
    document(parser, more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("entry", metavar="ENTRY", help="the entry's name, as `holdfast show` lists it")
    parser.add_argument("--range", metavar="START:STOP", help="only these bytes; negative numbers count from the end")
    add_json(parser, "print JSON: name, entry, range, and the bytes as base64")
    parser.set_defaults(run_verb=run_cat)


def run_cat(options: Namespace, url: str, output: Output) -> int:
    """Write the bytes of one entry to standard output, each piece verified before it is written."""
    repo = open_to_read(url, output)
    with open_snapshot(repo, read_named_snapshot(repo.store, options.name, output)) as reader:
        short = None if options.entry in reader.manifest.names else _find_short(reader, options.entry)
        size = reader.find_entry(options.entry).size_bytes if short is None else len(short)
        start, stop = _parse_range(options.range, size)
        with (
            open_entry(reader, options.entry, start=start, size_bytes=stop - start)
            if short is None
            else BytesIO(short[start:stop]) as stream
        ):
            if options.json:
                facts: dict[str, Json] = {"name": reader.snapshot.name, "entry": options.entry, "size": size}
                data = b64encode(stream.read()).decode()
                output.json({**facts, "start": start, "stop": stop, "base64": data})
                return 0
            while piece := stream.read(UNIT_BYTES):
                output.raw(memoryview(piece))
    return 0


def _parse_range(text: str | None, size_bytes: int) -> tuple[int, int]:
    """Return start and stop of a range in bytes, as of a Python slice."""
    if text is None:
        return 0, size_bytes
    found = _RANGE.fullmatch(text)
    if found is None:
        raise BadName(f"--range {text!r}: give two positions in bytes, either of which may be left out, as in 0:100")
    low, high = (int(each) if each else None for each in found.groups())
    start, stop, _ = slice(low, high).indices(size_bytes)
    return start, max(start, stop)


def _find_short(reader: SnapshotReader, name: str) -> bytes | None:
    """Return a text that the tree itself contains; None if there is no such value, NotFound if it is no text."""
    from holdfast.trees.outline import encode_short

    found = [leaf for leaf in _iter_plain(reader) if leaf.name == name]
    data = encode_short(found[0]) if found else None
    if found and data is None:
        raise NotFound(
            f"{name!r} in {reader.snapshot.name!r} is a plain value and not an entry;"
            f" `holdfast show {reader.snapshot.name} {name}` prints it",
            name=name,
        )
    return data


def _find_plain(reader: SnapshotReader, only: str | None) -> list[str]:
    """Return the names of the plain values of a tree that match the pattern."""
    names = [leaf.name or "(the tree)" for leaf in _iter_plain(reader)]
    return [name for name in names if only is None or fnmatchcase(name, only)]


def _iter_plain(reader: SnapshotReader) -> Iterator[Leaf]:
    """Yield the plain values of a tree."""
    spec = reader.manifest.spec
    if isinstance(spec, dict) and _TREE in spec:
        from holdfast.trees.outline import iter_leaves

        yield from (leaf for leaf in iter_leaves(spec[_TREE]) if not leaf.tag.startswith("@"))


def _verify_some_file(reader: SnapshotReader, plain: Sequence[str], only: str | None) -> None:
    """Raise NotFound if a pattern matches only plain values."""
    if only is None or not plain or any(fnmatchcase(name, only) for name in reader.manifest.names):
        return
    name = reader.snapshot.name
    raise NotFound(
        f"{only!r} matches only plain values in {name!r}, which are not written as files:"
        f" {list_some(plain, _MAX_NAMED)}; {_suggest_show_and_load(name, plain)}",
        name=only,
    )


def _note_raw_and_omitted(reader: SnapshotReader, plain: Sequence[str], only: str | None, output: Output) -> None:
    """Report how tensors were written, and which values were not."""
    name = reader.snapshot.name
    written = [entry for entry in reader.manifest.iter_entries() if only is None or fnmatchcase(entry.name, only)]
    if any(isinstance(entry.spec, dict) and entry.spec.get("type") in _TENSORS for entry in written):
        output.note(
            f"tensors were written as raw bytes without a header; `holdfast show {name}` prints dtype and shape,"
            f" `holdfast export {name} DST` writes files that other libraries load"
        )
    if plain:
        were = "was" if len(plain) == 1 else "were"
        values = f"{count(len(plain), 'plain value')} {were} not written"
        output.note(f"{values}: {list_some(plain, _MAX_NAMED)}; {_suggest_show_and_load(name, plain)}")
    varying = _find_varying(reader).intersection(entry.name for entry in written)
    if varying:
        differ = "differs" if len(varying) == 1 else "differ"
        output.note(
            f"{count(len(varying), 'entry')} {differ} between ranks, and the lowest rank's was written:"
            f" {list_some(sorted(varying), _MAX_NAMED)}; store.load_into on that many ranks loads each rank's own"
        )


def _find_varying(reader: SnapshotReader) -> set[str]:
    """Return the names of entries that more than one rank saved as its own."""
    ranks: dict[str, set[int]] = {}
    for entry in reader.manifests.iter_entries() if reader.manifests else ():
        if entry.rank != NO_RANK:
            ranks.setdefault(entry.name, set()).add(entry.rank)
    return {name for name, of in ranks.items() if len(of) > 1}


def _suggest_show_and_load(name: str, plain: Sequence[str]) -> str:
    them = "it" if len(plain) == 1 else "them"
    return f"`holdfast show {name}` prints {them}, store.load({name!r}) loads {them}"
