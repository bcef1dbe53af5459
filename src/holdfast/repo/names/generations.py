"""Names that change by create-only puts: each change creates the next generation; the highest valid one counts."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from holdfast.errors import CommitUnknown, Corrupt, HoldfastError, NameInUse, NotFound, ObjectExists, StoreError
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.objects.settle import create_settled
from holdfast.objects.together import EagerCall
from holdfast.repo.format.layout import SHELVES, SNAPSHOTS, generation_key, split_generation
from holdfast.repo.format.record import MAX_RECORD_BYTES, Fields, decode_record, encode_record

RELISTS: Final = 8
"""How often a listing is repeated because a listed record was deleted before it was read."""
USUAL_BYTES: Final = 4096
"""Of a record: what is counted for one that is read ahead."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The value of a stem: its highest valid generation, and the next free number."""

    stem: str
    fields: Fields | None
    generation: int
    """The generation of `fields`; -1 if there are none."""
    next_generation: int


def list_generations(store: ObjectStore, stem: str) -> list[int]:
    """Return the generations present under `stem`, lowest first."""
    found = (split_generation(info.key) for info in store.iter_objects(stem if stem.endswith("/") else stem + "@"))
    return [split[1] for split in found if split and split[0] == stem]


def iter_stems(store: ObjectStore, prefix: str) -> Iterator[tuple[str, list[int]]]:
    """Yield each stem whose key starts with `prefix`, with its generations, lowest first."""
    for stem, infos in iter_stem_objects(store, prefix):
        yield stem, list(infos)


def iter_stem_objects(
    store: ObjectStore, prefix: str, *, in_sequence: bool = False
) -> Iterator[tuple[str, dict[int, ObjectInfo]]]:
    """Yield each stem whose key starts with `prefix`, with its objects by generation, lowest first.

    Snapshots are listed by shelf, at once if the store wants that; `in_sequence`, with one request for 1,000 objects.
    """
    by_shelf = prefix == SNAPSHOTS and not in_sequence
    found = store.iter_folders(SNAPSHOTS, SHELVES) if by_shelf else store.iter_objects(prefix)
    splits = ((split, info) for info in found if (split := split_generation(info.key)))
    # Keys are ordered and the generation is last, so the generations of one stem are neighbours.
    for stem, group in itertools.groupby(splits, key=lambda pair: pair[0][0]):
        yield stem, {generation: info for (_, generation), info in group}


def read_newest(store: ObjectStore, stem: str, *, likely: Sequence[int] = ()) -> Newest:
    """Read the value of `stem`; raises Corrupt if its newest record is damaged: an older one would be outdated.

    The generations `likely` are read while the generations are listed, if the store answers many requests at once.
    """
    with ExitStack() as stack:
        works = {generation: partial(try_record, store, generation_key(stem, generation)) for generation in likely}
        begun = {generation: stack.enter_context(store.begin(work)) for generation, work in works.items()}
        for _ in range(RELISTS):
            newest = _read_highest(store, stem, list_generations(store, stem), begun)
            if newest:
                return newest
            begun = {}
    raise Corrupt(f"{stem}: records keep disappearing while they are read; are files being deleted by hand?", key=stem)


def read_listed(store: ObjectStore, stem: str, generations: list[int]) -> Newest:
    """Read the value of `stem` from an earlier listing; list again if a listed record is gone."""
    return _read_highest(store, stem, generations, {}) or read_newest(store, stem)


def _read_highest(
    store: ObjectStore, stem: str, generations: list[int], begun: Mapping[int, EagerCall[ReadRecord]]
) -> Newest | None:
    """Read the highest generation that is not torn; None if one was deleted since it was listed."""
    next_generation = generations[-1] + 1 if generations else 0
    for generation in reversed(generations):
        early = begun.get(generation)
        read = early.result() if early else try_record(store, generation_key(stem, generation))
        if isinstance(read.error, NotFound):
            return None
        fields = read.take_fields()
        if fields:
            fields.expect(generation=generation)
            return Newest(stem, fields, generation, next_generation)
    return Newest(stem, None, -1, next_generation)


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """What reading one record gave: its fields, None if it is torn, or an error."""

    fields: Fields | None = None
    error: HoldfastError | None = None

    def take_fields(self) -> Fields | None:
        """Return the fields, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.fields


def iter_records(store: ObjectStore, keys: Iterable[str]) -> Generator[ReadRecord, None, None]:
    """Yield what reading each record gives, in order; later ones are read meanwhile if the store wants that."""
    return store.iter_together((partial(try_record, store, key), USUAL_BYTES) for key in keys)


def try_record(store: ObjectStore, key: str) -> ReadRecord:
    """Read and decode one record, without raising."""
    try:
        return ReadRecord(read_record(store, key))
    except HoldfastError as error:
        return ReadRecord(error=error)


def read_record(store: ObjectStore, key: str) -> Fields | None:
    """Read and decode one record; None if it is torn."""
    return decode_record(store.read(key, limit_bytes=MAX_RECORD_BYTES + 4096), key=key)


def create_generation(
    store: ObjectStore, stem: str, generation: int, fields: Mapping[str, Json], *, durable: bool = True
) -> None:
    """Create `generation` of `stem`; raises ObjectExists if another process was first.

    `fields` must contain a random write id. If a higher generation exists afterwards, our listing was stale and our
    record does not count, so that raises ObjectExists as well.
    """
    key = generation_key(stem, generation)
    create_unlisted(store, stem, generation, fields, durable=durable)
    try:
        highest = list_generations(store, stem)[-1:]
    except StoreError as error:
        text = f"{key} was created, but it is unknown whether it counts: {error}"
        raise StoreError(text, key=key, fate="unknown") from error
    if highest != [generation]:
        raise ObjectExists(f"{key} was overtaken by a higher generation", key=key)


def create_unlisted(
    store: ObjectStore, stem: str, generation: int, fields: Mapping[str, Json], *, durable: bool = True
) -> None:
    """Create `generation` of `stem` like `create_generation`, for a caller whose number comes from no listing.

    If the caller created every generation below itself, a higher one can exist only after this one.
    """
    data = encode_record({**fields, "generation": generation})
    create_settled(store, generation_key(stem, generation), data, durable=durable)


def change_name(store: ObjectStore, stem: str, generation: int, fields: Mapping[str, Json], *, name: str) -> None:
    """Create the next generation of a user's name; raises NameInUse if another was first, CommitUnknown if unclear."""
    try:
        create_generation(store, stem, generation, fields)
    except ObjectExists as error:
        raise NameInUse(
            f"{name!r} was changed by another process at the same time; check its state, then try again", name=name
        ) from error
    except StoreError as error:
        if error.fate == "absent":
            raise
        raise CommitUnknown(
            f"the store failed while {name!r} was being changed, so it has the old or the new state: {error}."
            " Check with `holdfast show`, then try again",
            name=name,
        ) from error
