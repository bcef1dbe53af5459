"""Segments: the snapshots that a recording consists of; how they are named, written and listed.

The events of a segment are a table of columns: numbers in one array, each text once. Equal recordings give equal bytes.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from holdfast.capture.stored.events import KINDS, PHASES, Event, EventFacts, ObservedEvents, Site, Stats
from holdfast.digest import hash_kind
from holdfast.errors import BadName, Corrupt, NameInUse, NewerFormat
from holdfast.json_text import Json
from holdfast.repo.format.layout import verify_name
from holdfast.repo.format.record import Fields
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, delete_if_unchanged, iter_names, read_name
from holdfast.repo.write.writer import SaveResult
from holdfast.snapshot.save import SaveOptions, save_tree
from holdfast.trees.registered import Types

PREFIX: Final = "@runs/"
TABLE: Final = "table"
TENSORS: Final = "tensors"
_VERSION: Final = 2
"""Segments without BLAKE3 digests have version 1, which older versions of Holdfast read."""
_KEY: Final = "run"
"""Key of a snapshot's metadata under which the facts of a segment are stored."""
DIGEST_BYTES: Final = 16
BLAKE3_BYTES: Final = 32
_HASHES: Final = "hashes"
_STRONG: Final = "blake3"
"""Columns of a table in which an event has a BLAKE3 digest: which digests each event has, and those of BLAKE3."""
_XXH3: Final = 1
_BLAKE3: Final = 2
NO_ROOT: Final = b""
"""The root of a step without events."""
Columns = Mapping[str, np.ndarray[Any, Any]]
_NUMBERS: Final = (
    *("seq", "step", "phase", "kind", "fqn", "call", "path", "dtype", "module", "parent", "recompute", "source"),
    *("alias", "placement", "leaf_segment", "leaf_number", "dims", "global_dims", "has_offsets", "has_stats", "bins"),
    "form",
)
"""The rows of the array of numbers; a text is an index into the list of texts."""
_SHAPES: Final = {"numbers": 2, "ragged": 1, "digests": 2, "values": 2, "counts": 2, "texts": 1}
_PHASE: Final = {phase: index for index, phase in enumerate(PHASES)}
_KIND: Final = {kind: index for index, kind in enumerate(KINDS)}
_TEXTS: Final = ("fqn", "path", "dtype", "module", "parent", "source", "placement", "form")
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
    recording: str = ""
    """A random id that all segments of one rank's recording have; "" in segments of earlier versions."""
    job: str = ""
    """A random id that is the same on all ranks of a job; "" if the ranks had no store to agree on one."""
    lost_step: int | None = None
    """The first step of which a part is missing, because other code had removed hooks; None if there is none."""

    @property
    def name(self) -> str:
        """The snapshot's name."""
        return self.find_name(self.number)

    def find_name(self, number: int) -> str:
        """Return the name of another segment of this rank."""
        return f"{PREFIX}{self.run}/@r{self.rank}/{number:08d}"

    @property
    def age(self) -> tuple[float, str]:
        """Identifies the recording of this rank; a later recording has a greater one."""
        return (self.started_s, self.recording)


def verify_run_name(name: str) -> str:
    """Return a run's name in NFC; raises BadName that says which rule it breaks."""
    name = verify_name(name, what="run")
    if any(part.startswith("@") for part in name.split("/")):
        raise BadName(f"run name {name[:80]!r} is refused: no part of it may begin with '@'")
    return name


def write_segment(
    repo: Repository, segment: Segment, events: ObservedEvents, tensors: Mapping[int, torch.Tensor]
) -> SaveResult:
    """Commit a segment; the tensors must not change until this returns."""
    table = encode_events(events)
    tree: dict[str, Any] = {
        TABLE: table,
        TENSORS: {str(number): tensor for number, tensor in tensors.items()},
    }
    # Most chunks that are reused were written by this run a moment ago; reading them again to verify them would take
    # longer than writing them. `check` and `scrub` find bit rot.
    metadata = {_KEY: _encode(segment, has_blake3=_HASHES in table)}
    options = SaveOptions(metadata=metadata, verify_reuse=False)
    return save_tree(repo, segment.name, tree, options, types=Types())


def _encode(segment: Segment, *, has_blake3: bool) -> dict[str, Json]:
    return {
        "version": _VERSION if has_blake3 else 1,
        "world": segment.world,
        "started": segment.started_s,
        "environment": dict(segment.environment),
        "notes": list(segment.notes),
        "roots": {str(step): root.hex() for step, root in segment.roots.items()},
        "last": segment.is_last,
        "recording": segment.recording,
        "job": segment.job,
        **({} if segment.lost_step is None else {"lost_step": segment.lost_step}),
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
        recording=str(metadata.get("recording", "")),
        job=str(metadata.get("job", "")),
        lost_step=fields.integer("lost_step") if "lost_step" in metadata else None,
    )


def pick_recording(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments of a run without those of other recordings under its name.

    A recording that replaces another one deletes its segments. One that has not noticed yet that it was replaced may
    still commit a segment, but none with a low number: so of each rank, the lowest number belongs to the run.
    """
    ordered = sorted(segments, key=lambda segment: (segment.rank, segment.number))
    owners: dict[int, Segment] = {}
    for segment in ordered:
        owners.setdefault(segment.rank, segment)
    first = ordered[0]

    def is_of_run(segment: Segment) -> bool:
        is_job_known = bool(segment.job and first.job)
        is_same_job = segment.job == first.job if is_job_known else segment.world == first.world
        return is_same_job and segment.age == owners[segment.rank].age

    return [segment for segment in ordered if is_of_run(segment)]


def read_replacement(
    repo: Repository, segment: Segment, *, first: int | None, overwrite: bool, is_taken: bool = False
) -> str:
    """Return why a recording must not commit a segment: its name belongs to another one by now; "" if it does not.

    Deletes segments of older recordings that are in the way, if `overwrite` allows it.

    Args:
        repo: the repository.
        segment: the segment to commit.
        first: number of the first segment that the recording has committed; None if there is none yet.
        overwrite: whether the recording may replace others.
        is_taken: whether a segment with this number exists.
    """
    if first is None:
        others = [other for other, _ in iter_segments(repo, segment.run) if other.rank == segment.rank]
    else:
        numbers = [*range(first + 1), *([segment.number] if is_taken else [])]
        others = [other for number in numbers if (other := _read_segment(repo, segment, number)) is not None]
        if not any(other.number == first and other.age == segment.age for other in others):
            return "another recording has deleted its segments"
    for other in others:
        if other.age == segment.age:
            continue
        if other.age > segment.age or not overwrite:
            return "another recording has written segments under its name"
        delete_segment(repo, other)
    return ""


def _read_segment(repo: Repository, segment: Segment, number: int) -> Segment | None:
    """Return the current segment with a number of a segment's run and rank; None if there is none."""
    record = read_name(repo.store, segment.find_name(number), likely=0).snapshot
    return None if record is None else _decode(record, segment.run, segment.rank, number)


def delete_segment(repo: Repository, segment: Segment) -> None:
    """Delete a segment, unless another process has deleted or replaced it."""
    state = read_name(repo.store, segment.name)
    if state.snapshot and _decode(state.snapshot, segment.run, segment.rank, segment.number).age == segment.age:
        with suppress(NameInUse):
            delete_if_unchanged(repo.store, state)


def format_leaf(segment: int, number: int) -> str:
    """Return the name by which events refer to the n-th tensor of a segment."""
    return f"{segment:08d}/{number}"


def parse_leaf(leaf: str) -> tuple[int, int]:
    """Return the segment and the tensor number in a leaf's name."""
    segment, _, number = leaf.partition("/")
    return int(segment), int(number)


def advance_root(root: bytes, step: int, text: str, digest: bytes) -> bytes:
    """Return the root of a step after one more event. Roots are equal only if all events are, in the same order.

    `text` is that of `EventFacts`.
    """
    return hash_kind("run step", (root, f"({step}, {text}".encode(), digest))


def advance_roots(roots: dict[int, bytes], events: ObservedEvents) -> set[int]:
    """Advance the root of each step by its events; returns the steps that have any."""
    found: dict[int, bytes] = {}
    last, root = -1, NO_ROOT
    for _, step, facts, digest, _, _, _, _, blake3 in events:
        assert isinstance(blake3, bytes), "it is known before events are written"
        if step != last:
            last, root = step, found.get(step) or roots.get(step, NO_ROOT)
        root = found[step] = advance_root(root, step, facts.text, blake3 or digest)
    roots.update(found)
    return set(found)


def compute_root(events: Iterable[Event]) -> bytes:
    """Return the root of all events of a step."""
    root = NO_ROOT
    for event in events:
        step, *place = event.site
        root = advance_root(root, step, ascii((*place, event.dtype, event.shape))[1:], event.identity)
    return root


class _Texts:
    """Numbers texts in the order in which they are added."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}

    def add(self, text: str) -> int:
        return self._indices.setdefault(text, len(self._indices))

    def encode(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(json.dumps(list(self._indices)).encode(), dtype=np.uint8)


def encode_events(events: ObservedEvents) -> dict[str, np.ndarray[Any, Any]]:
    """Return the columns of a table of events; the rank is not stored in it."""
    seqs, steps, facts, digests, aliases, measured, leaves, forms, blake3 = events.iter_columns()
    texts = _Texts()
    rows: dict[EventFacts, int] = {}
    # Numpy converts lists of Python numbers several times slower than arrays of Python.
    facts_numbers, form_numbers = array("q"), array("q")
    for each, form in zip(facts, forms, strict=True):
        if each not in rows:
            rows[each] = len(rows)
            facts_numbers.extend(_encode_facts(each, texts))
        form_numbers.append(texts.add(form))
    stats = [None if each is None else each.stats for each in measured]
    found = [each for each in stats if each is not None]
    parsed = [parse_leaf(leaf) if leaf else (-1, -1) for leaf in leaves]
    own = {
        "seq": array("q", seqs),
        "step": array("q", steps),
        "alias": array("q", aliases),
        "leaf_segment": array("q", [segment for segment, _ in parsed]),
        "leaf_number": array("q", [number for _, number in parsed]),
        "has_stats": array("q", [each is not None for each in stats]),
        "bins": array("q", [0 if each is None else len(each.histogram) for each in stats]),
        "form": form_numbers,
    }
    values = array("d", [x for each in found for x in (each.minimum, each.maximum, each.mean, each.norm)])
    counts = array("q", [x for each in found for x in (each.nan, each.inf, each.zero)])
    return {
        "numbers": _join_numbers(facts_numbers, array("q", map(rows.__getitem__, facts)), own),
        "ragged": np.array(_join_ragged(facts, stats), dtype=np.int64),
        **_encode_digests(digests, blake3),
        "values": np.array(values, dtype=np.float64).reshape(-1, 4),
        "counts": np.array(counts, dtype=np.int64).reshape(-1, 3),
        "texts": texts.encode(),
    }


def _encode_digests(digests: Sequence[bytes], blake3: Sequence[bytes]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the columns of digests; those of BLAKE3 only if an event has one."""
    if not any(blake3):
        return {"digests": _stack_digests(digests, DIGEST_BYTES)}
    kinds = [bool(weak) * _XXH3 | bool(strong) * _BLAKE3 for weak, strong in zip(digests, blake3, strict=True)]
    return {
        "digests": _stack_digests([each or bytes(DIGEST_BYTES) for each in digests], DIGEST_BYTES),
        _HASHES: np.array(kinds, dtype=np.uint8),
        _STRONG: _stack_digests([each for each in blake3 if each], BLAKE3_BYTES),
    }


def _stack_digests(digests: Sequence[bytes], size_bytes: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(digests), size_bytes)


def _join_ragged(facts: Sequence[EventFacts], stats: Sequence[Stats | None]) -> array[int]:
    """Return the shapes, global shapes, offsets and histograms of events, one event after the other."""
    ragged = array("q")
    for each, found in zip(facts, stats, strict=True):
        ragged.extend(each.shape)
        if each.global_shape:
            ragged.extend((*each.global_shape, *each.offsets))
        if found is not None:
            ragged.extend(found.histogram)
    return ragged


def _join_numbers(facts_numbers: array[int], rows: array[int], own: Mapping[str, array[int]]) -> np.ndarray[Any, Any]:
    """Return the numbers of all events, a row for each name in `_NUMBERS`; `rows` has the facts of each event."""
    numbers = np.array(facts_numbers, dtype=np.int64).reshape(-1, len(_NUMBERS)).T[:, np.array(rows, dtype=np.int64)]
    for name, found in own.items():
        numbers[_NUMBERS.index(name)] = found
    return np.ascontiguousarray(numbers)


def _encode_facts(facts: EventFacts, texts: _Texts) -> tuple[int, ...]:
    """Return the numbers of an event in the order of `_NUMBERS`; those that differ from step to step are 0."""
    add = texts.add
    return (
        *(0, 0, _PHASE[facts.phase], _KIND[facts.kind], add(facts.fqn), facts.call, add(facts.path), add(facts.dtype)),
        *(add(facts.module), add(facts.parent), facts.recompute, add(facts.source), 0, add(facts.placement), 0, 0),
        *(len(facts.shape), len(facts.global_shape), bool(facts.offsets), 0, 0, 0),
    )


def decode_events(columns: Columns, *, rank: int, what: str) -> list[Event]:
    """Return the events of a table; raises Corrupt, naming `what`, if the table is invalid."""
    try:
        return list(_iter_events(_verify_shapes(columns), rank))
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError, RuntimeError) as error:
        raise Corrupt(f"{what}: its table of events is invalid: {error!r}; run `holdfast check`") from error


def _verify_shapes(columns: Columns) -> Columns:
    for name, dims in _SHAPES.items():
        if columns[name].ndim != dims:
            raise ValueError(f"{name} has {columns[name].ndim} dimensions")
    count = columns["numbers"].shape[1]
    if columns["numbers"].shape[0] != len(_NUMBERS) or columns["digests"].shape != (count, DIGEST_BYTES):
        raise ValueError(f"the columns of {count} events have different lengths")
    if _HASHES in columns:
        strong = int(np.count_nonzero(columns[_HASHES] & _BLAKE3))
        if columns[_HASHES].shape != (count,) or columns[_STRONG].shape != (strong, BLAKE3_BYTES):
            raise ValueError(f"{count} events have {columns[_STRONG].shape} digests of BLAKE3")
    return columns


def _iter_digests(columns: Columns) -> Iterator[tuple[bytes, bytes]]:
    """Yield the XXH3 and the BLAKE3 of each event; b"" for one that it does not have."""
    digests = map(bytes, columns["digests"])
    if _HASHES not in columns:
        yield from ((digest, b"") for digest in digests)
        return
    strong = map(bytes, columns[_STRONG])
    for digest, kinds in zip(digests, columns[_HASHES].tolist(), strict=True):
        yield digest if kinds & _XXH3 else b"", next(strong) if kinds & _BLAKE3 else b""


def _iter_events(columns: Columns, rank: int) -> Iterable[Event]:
    texts = json.loads(columns["texts"].tobytes())
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a text is a value of another type")
    ragged = _Ragged(columns["ragged"].tolist())
    stats = zip(columns["values"].tolist(), columns["counts"].tolist(), strict=True)
    rows = columns["numbers"].T.tolist()
    for row, (digest, blake3) in zip(rows, _iter_digests(columns), strict=True):
        fact = dict(zip(_NUMBERS, row, strict=True))
        text = {name: texts[fact[name]] for name in _TEXTS}
        site = Site(
            *(fact["step"], PHASES[fact["phase"]], KINDS[fact["kind"]], text["fqn"], fact["call"], text["path"])
        )
        shape, global_shape = ragged.take(fact["dims"]), ragged.take(fact["global_dims"])
        offsets = ragged.take(fact["global_dims"] if fact["has_offsets"] else 0)
        yield Event(
            seq=fact["seq"],
            site=site,
            rank=rank,
            dtype=text["dtype"],
            shape=shape,
            digest=digest,
            module=text["module"],
            parent=text["parent"],
            recompute=bool(fact["recompute"]),
            source=text["source"],
            alias=fact["alias"],
            placement=text["placement"],
            global_shape=global_shape,
            offsets=offsets,
            stats=_make_stats(*next(stats), ragged.take(fact["bins"])) if fact["has_stats"] else None,
            leaf=format_leaf(fact["leaf_segment"], fact["leaf_number"]) if fact["leaf_segment"] >= 0 else "",
            form=text["form"],
            blake3=blake3,
        )


class _Ragged:
    """Reads a varying count of numbers for each event, in order."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._at = 0

    def take(self, count: int) -> tuple[int, ...]:
        taken = self._numbers[self._at : self._at + count]
        if len(taken) != count:
            raise ValueError("the ragged column is too short")
        self._at += count
        return tuple(taken)


def _make_stats(values: Sequence[float], counts: Sequence[int], histogram: tuple[int, ...]) -> Stats:
    minimum, maximum, mean, norm = values
    nan, inf, zero = counts
    return Stats(minimum, maximum, mean, norm, nan, inf, zero, histogram)
