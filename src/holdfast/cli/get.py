"""The verbs `get` and `cat`: entries become files again, or bytes on standard output."""

from __future__ import annotations

import time
from argparse import Namespace

from holdfast.cli.lookup import find_snapshot, open_to_read
from holdfast.cli.output import Output, count, format_bytes
from holdfast.errors import BadName
from holdfast.repo.filetree import is_below, restore
from holdfast.repo.reader import open_snapshot


def run_get(options: Namespace, url: str, output: Output) -> int:
    """Write the entries of a snapshot as files."""
    repo = open_to_read(url, output)
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
    repo = open_to_read(url, output)
    with open_snapshot(repo, find_snapshot(repo.store, options.name, output)) as reader:
        for piece in reader.iter_entry(reader.find_entry(options.entry)):
            output.raw(piece)
    return 0
