"""Copies snapshots from one repository to another: only what is missing moves, verified on both sides."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from holdfast.errors import NameInUse
from holdfast.progress import Progress, Silent
from holdfast.repo.holdings import Holdings, find_base, read_bases
from holdfast.repo.layout import SNAPSHOTS
from holdfast.repo.reader import SnapshotReader, is_readable
from holdfast.repo.record import canonical_json
from holdfast.repo.repository import Repository, count_threads
from holdfast.repo.settled import is_settled
from holdfast.repo.snapshots import Snapshot, read_name
from holdfast.repo.transaction import Draft, Transaction
from holdfast.repo.transfer import Transfer
from holdfast.repo.writer import SaveResult


def copy_snapshot(
    source: Repository,
    snapshot: Snapshot,
    target: Repository,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SaveResult:
    """Copy one snapshot under its name, with its commit time, metadata and content digest.

    A copy that was cut off is simply repeated: packs that it completed are found by their index and not moved again.
    Raises NameInUse if the target's name holds other content, unless `overwrite`.
    """
    started = time.monotonic()
    progress = progress or Silent()
    state = read_name(target.store, snapshot.name)
    held = state.snapshot
    is_same = held is not None and _is_same(held, snapshot)
    if held and is_same and is_settled(target.store, held) and is_readable(target, held):
        target.store.sync(SNAPSHOTS)
        seconds = time.monotonic() - started
        return SaveResult(snapshot.name, held.digest, held.generation, held.logical_bytes, 0, seconds, existed=True)
    if held and not is_same and not overwrite:
        raise NameInUse(
            f"{snapshot.name!r} is in use in {target.store.url} and holds other content; nothing was copied."
            " Overwrite it (--overwrite, overwrite=True) or delete it there first",
            name=snapshot.name,
        )
    target.verify_may_write()
    progress.begin(f"copy {snapshot.name}", snapshot.logical_bytes)
    try:
        with (
            Transaction(target, purpose=f"copy {snapshot.name!r} from {source.store.url}") as transaction,
            SnapshotReader(source, snapshot) as reader,
            ThreadPoolExecutor(count_threads(), "holdfast-copy") as pool,
        ):
            bases = read_bases(target.store, [held, find_base(target, snapshot.name)])
            transfer = Transfer(reader, Holdings(target, bases, avoid=transaction.avoid), transaction.packer, pool)
            entries = transfer.move(list(reader.manifest.iter_entries()), progress, keeps=lambda _: False)
            draft = Draft(state, reader.manifest.spec, snapshot.metadata, snapshot.time_s)
            copied = transaction.commit(draft, entries, rewrite=transfer.rewrite)
    finally:
        progress.end()
    seconds = time.monotonic() - started
    moved = transfer.moved_bytes
    return SaveResult(copied.name, copied.digest, copied.generation, copied.logical_bytes, moved, seconds)


def _is_same(held: Snapshot, snapshot: Snapshot) -> bool:
    return held.digest == snapshot.digest and canonical_json(held.metadata) == canonical_json(snapshot.metadata)
