"""The verbs `get` and `cat`: write entries as files, or to standard output."""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

from holdfast.cli.lookup import open_to_read, read_named_snapshot
from holdfast.cli.output import Output, count, format_bytes
from holdfast.errors import BadName, NotFound
from holdfast.repo.files import is_below, restore
from holdfast.repo.format.chunk import UNIT_BYTES
from holdfast.repo.format.entry import NO_RANK
from holdfast.repo.read.reader import SnapshotReader, open_snapshot
from holdfast.repo.read.stream import open_entry

_RANGE: Final = re.compile(r"(-?[0-9]{1,18})?:(-?[0-9]{1,18})?")
_TREE: Final = "tree"
"""Key of the encoded tree in a manifest's spec; a snapshot of files has none."""
_TENSORS: Final = frozenset({"tensor", "array"})
_NAMED: Final = 3


def run_get(options: Namespace, url: str, output: Output) -> int:
    """Write the entries of a snapshot as files, and name the values that are not written."""
    repo = open_to_read(url, output)
    if is_below(options.directory, repo.store.url):
        raise BadName(f"{options.directory} is inside the store {repo.store.url}; choose a directory outside of it")
    started = time.monotonic()
    beside = (options.directory, "the name comes first, `holdfast get NAME DIR`")
    with open_snapshot(repo, read_named_snapshot(repo.store, options.name, output, beside=beside)) as reader:
        plain = _find_plain(options, reader, options.only)
        _verify_some_file(reader, plain, options.only)
        done = restore(
            reader, options.directory, only=options.only, overwrite=options.overwrite, progress=output.progress()
        )
        seconds = time.monotonic() - started
        size = f"{count(done.num_files, 'file')}, {format_bytes(done.num_bytes)}"
        output.line(f"wrote {size} to {options.directory} in {seconds:.2f} s")
        _note_form(reader, plain, options.only, output)
    return 0


def run_cat(options: Namespace, url: str, output: Output) -> int:
    """Write the bytes of one entry to standard output, each piece verified before it is written."""
    repo = open_to_read(url, output)
    with open_snapshot(repo, read_named_snapshot(repo.store, options.name, output)) as reader:
        if options.entry not in reader.manifest.names and options.entry in _find_plain(options, reader, None):
            name = reader.snapshot.name
            raise NotFound(
                f"{options.entry!r} in {name!r} is a plain value and not an entry;"
                f" `holdfast show {name} {options.entry}` prints it",
                name=options.entry,
            )
        size = reader.find_entry(options.entry).size_bytes
        start, stop = _parse_range(options.range, size)
        with open_entry(reader, options.entry, start=start, size_bytes=stop - start) as stream:
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


def _find_plain(options: Namespace, reader: SnapshotReader, only: str | None) -> list[str]:
    """Return the names of the plain values of a tree that match the pattern."""
    spec = reader.manifest.spec
    if not isinstance(spec, dict) or _TREE not in spec:
        return []
    leaves = options.load("holdfast.trees.outline").iter_leaves(spec[_TREE])
    names = [leaf.name or "(the tree)" for leaf in leaves if not leaf.tag.startswith("@")]
    return [name for name in names if only is None or fnmatchcase(name, only)]


def _verify_some_file(reader: SnapshotReader, plain: Sequence[str], only: str | None) -> None:
    """Raise NotFound if a pattern matches only plain values."""
    if only is None or not plain or any(fnmatchcase(name, only) for name in reader.manifest.names):
        return
    name = reader.snapshot.name
    raise NotFound(
        f"{only!r} matches only plain values in {name!r}, which are not written as files:"
        f" {_enumerate(plain)}; {_point_to(name, plain)}",
        name=only,
    )


def _note_form(reader: SnapshotReader, plain: Sequence[str], only: str | None, output: Output) -> None:
    """Report how tensors were written, and which values were not."""
    name = reader.snapshot.name
    written = [entry for entry in reader.manifest.iter_entries() if only is None or fnmatchcase(entry.name, only)]
    if any(isinstance(entry.spec, dict) and entry.spec.get("type") in _TENSORS for entry in written):
        output.note(
            f"tensors were written as raw bytes without a header; `holdfast show {name}` prints dtype and shape"
        )
    if plain:
        were = "was" if len(plain) == 1 else "were"
        values = f"{count(len(plain), 'plain value')} {were} not written"
        output.note(f"{values}: {_enumerate(plain)}; {_point_to(name, plain)}")
    varying = _find_varying(reader).intersection(entry.name for entry in written)
    if varying:
        differ = "differs" if len(varying) == 1 else "differ"
        output.note(
            f"{count(len(varying), 'entry')} {differ} between ranks, and the lowest rank's was written:"
            f" {_enumerate(sorted(varying))}; store.load_into on that many ranks loads each rank's own"
        )


def _find_varying(reader: SnapshotReader) -> set[str]:
    """Return the names of entries that more than one rank saved as its own."""
    ranks: dict[str, set[int]] = {}
    for entry in reader.manifests.iter_entries() if reader.manifests else ():
        if entry.rank != NO_RANK:
            ranks.setdefault(entry.name, set()).add(entry.rank)
    return {name for name, of in ranks.items() if len(of) > 1}


def _point_to(name: str, plain: Sequence[str]) -> str:
    them = "it" if len(plain) == 1 else "them"
    return f"`holdfast show {name}` prints {them}, store.load({name!r}) loads {them}"


def _enumerate(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
