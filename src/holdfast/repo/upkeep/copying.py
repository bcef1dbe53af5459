"""Copies snapshots from one repository to another: only missing chunks are copied, verified on both sides."""

from __future__ import annotations

import time

from holdfast.errors import NameInUse
from holdfast.json_text import canonical_json
from holdfast.progress import Progress, Silent
from holdfast.repo.format.layout import find_shelf
from holdfast.repo.format.rank_manifests import read_manifests
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.rollback import is_settled
from holdfast.repo.names.snapshots import CommittedSnapshot, read_name
from holdfast.repo.read.reader import is_readable
from holdfast.repo.upkeep.transfer import Job, transfer_snapshot
from holdfast.repo.write.existing import read_base
from holdfast.repo.write.writer import SaveResult


def copy_snapshot(
    source: Repository,
    snapshot: CommittedSnapshot,
    target: Repository,
    *,
    name: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SaveResult:
    """Copy one snapshot, under its name or another, with its commit time, metadata and content digest.

    After an interruption, repeat the copy: packs that were completed are found by the index and not copied again.
    Raises NameInUse if the name has other content in the target, unless `overwrite`.
    """
    started = time.monotonic()
    name = snapshot.name if name is None else name
    state = read_name(target.verify_same(), name)
    held = state.snapshot
    is_same = held is not None and _is_same(held, snapshot)
    if held and is_same and is_settled(target.store, held) and is_readable(target, held):
        target.store.sync(find_shelf(name))
        reused = read_manifests(target.store, held.manifest).content_bytes
        seconds = time.monotonic() - started
        return SaveResult(name, held.digest, held.generation, held.logical_bytes, 0, reused, seconds, existed=True)
    if held and not is_same and not overwrite:
        raise NameInUse(
            f"{name!r} is in use in {target.store.url} and holds other content; nothing was copied."
            " Overwrite it (--overwrite, overwrite=True) or delete it there first",
            name=name,
        )
    target.verify_may_write()
    target.index.refresh()
    bases = (held, read_base(target, name))
    done = transfer_snapshot(Job("copy", source, snapshot, target, state, bases), progress or Silent())
    copied, seconds = done.snapshot, time.monotonic() - started
    sizes = (copied.logical_bytes, done.new_bytes, done.reused_bytes)
    return SaveResult(copied.name, copied.digest, copied.generation, *sizes, seconds)


def _is_same(held: CommittedSnapshot, snapshot: CommittedSnapshot) -> bool:
    return held.digest == snapshot.digest and canonical_json(held.metadata) == canonical_json(snapshot.metadata)
