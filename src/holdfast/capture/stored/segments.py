"""Segments: the snapshots that a recording consists of; how they are named, written and listed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.capture.stored.events import Event
from holdfast.capture.stored.table import encode_events
from holdfast.errors import BadName, Corrupt, NewerFormat
from holdfast.json_text import Json
from holdfast.repo.format.layout import verify_name
from holdfast.repo.format.record import Fields
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, iter_names
from holdfast.repo.write.writer import SaveResult
from holdfast.snapshot.save.save import SaveOptions, save_tree
from holdfast.trees.registered import Types

PREFIX: Final = "@runs/"
TABLE: Final = "table"
TENSORS: Final = "tensors"
_VERSION: Final = 1
_KEY: Final = "run"
"""Key of a snapshot's metadata under which the facts of a segment are stored."""
_NAME: Final = re.compile(rf"{PREFIX}(?P<run>.+)/@r(?P<rank>[0-9]{{1,9}})/(?P<number>[0-9]{{8}})\Z")


@dataclass(frozen=True, slots=True)
class Segment:
    """The facts of one segment, without its events."""

    run: str
    rank: int
    number: int
    world: int
    started_s: float
    environment: Mapping[str, Json]
    notes: tuple[str, ...]
    """What this rank could not record up to here."""
    roots: Mapping[int, bytes]
    """For each step with events in this segment, the root of these and of the step's events in earlier segments."""
    is_last: bool

    @property
    def name(self) -> str:
        """The snapshot's name."""
        return f"{PREFIX}{self.run}/@r{self.rank}/{self.number:08d}"


def verify_run_name(name: str) -> str:
    """Return a run's name in NFC; raises BadName that says which rule it breaks."""
    name = verify_name(name, what="run")
    if any(part.startswith("@") for part in name.split("/")):
        raise BadName(f"run name {name[:80]!r} is refused: no part of it may begin with '@'")
    return name


def write_segment(
    repo: Repository, segment: Segment, events: Sequence[Event], tensors: Mapping[int, torch.Tensor]
) -> SaveResult:
    """Commit a segment; the tensors must not change until this returns."""
    tree: dict[str, Any] = {
        TABLE: encode_events(events),
        TENSORS: {str(number): tensor for number, tensor in tensors.items()},
    }
    # Most chunks that are reused were written by this run a moment ago; reading them again to verify them would take
    # longer than writing them. `check` and `scrub` find bit rot.
    options = SaveOptions(metadata={_KEY: _encode(segment)}, environment=False, verify_reuse=False)
    return save_tree(repo, segment.name, tree, options, types=Types())


def _encode(segment: Segment) -> dict[str, Json]:
    return {
        "version": _VERSION,
        "world": segment.world,
        "started": segment.started_s,
        "environment": dict(segment.environment),
        "notes": list(segment.notes),
        "roots": {str(step): root.hex() for step, root in segment.roots.items()},
        "last": segment.is_last,
    }


def iter_segments(repo: Repository, run: str | None = None) -> Iterator[tuple[Segment, CommittedSnapshot]]:
    """Yield the committed segments of one run, or of all runs, in no particular order."""
    prefix = PREFIX if run is None else f"{PREFIX}{run}/"
    for record in iter_names(repo.store, prefix):
        if isinstance(record, DamagedName):
            continue
        found = _NAME.match(record.name)
        if found is not None and run in (None, found["run"]):
            yield _decode(record, found["run"], int(found["rank"]), int(found["number"])), record


def _decode(record: CommittedSnapshot, run: str, rank: int, number: int) -> Segment:
    metadata = record.metadata.get(_KEY)
    if not isinstance(metadata, dict):
        raise Corrupt(f"{record.name!r} has no metadata of a run segment; run `holdfast check`")
    fields = Fields(record.name, metadata)
    if fields.integer("version") > _VERSION:
        raise NewerFormat(f"run {run!r} was recorded by a newer version of Holdfast; upgrade to read it")
    try:
        roots = {int(step): bytes.fromhex(root) for step, root in fields.mapping("roots").items()}
    except (TypeError, ValueError) as error:
        raise Corrupt(f"{record.name!r}: its roots are invalid: {error}", key=record.name) from error
    return Segment(
        run=run,
        rank=rank,
        number=number,
        world=fields.integer("world"),
        started_s=fields.number("started"),
        environment=fields.mapping("environment"),
        notes=fields.texts("notes"),
        roots=roots,
        is_last=metadata.get("last") is True,
    )
