"""What the fault tests do to a store, and how they look at it afterwards: verbs, states and what is wrong with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.digest import Digest, hash_bytes
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.compression import Compression
from holdfast.repo.handle.config import read_config
from holdfast.repo.handle.repository import init_repository, open_repository
from holdfast.repo.names.snapshots import (
    CommittedSnapshot,
    Tag,
    delete_snapshot,
    delete_tag,
    iter_names,
    iter_tags,
    read_snapshot,
    set_tag,
)
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.upkeep.check import Checker, Finding
from holdfast.repo.write.writer import Request, SaveResult, WriteOptions, save
from tests.kit.deltas import trained
from tests.kit.encoded import halves

Content = Mapping[str, bytes]
"""Entries by name."""
Names = Mapping[str, tuple[Digest, Mapping[str, Digest]]]
"""Of each snapshot, the content digest and the digest of each entry's bytes as they were read."""

# One chunk and a bit: the smallest entry that has two chunks.
TWO_CHUNKS_BYTES: Final = (1 << 20) + 5_000


def random_bytes(seed: str, size_bytes: int) -> bytes:
    """Return bytes that depend on `seed` only."""
    return random.Random(seed).randbytes(size_bytes)


SHARED: Final[Content] = {
    "empty": b"",
    "inline": random_bytes("inline", 100),
    "packed": random_bytes("packed", 5_000),
    "two chunks": random_bytes("two chunks", TWO_CHUNKS_BYTES),
}
FIRST: Final[Content] = {"inline": b"first", "packed": SHARED["packed"], "own": random_bytes("first", 3_000)}
SECOND: Final[Content] = {**SHARED, "own": random_bytes("second", 70_000), "own inline": b"second"}
ENCODED: Final[Content] = {
    "weights": halves(9_000),
    "packed": SHARED["packed"],
    "more": halves(70_000, 1),
    "inline": b"x",
}
THIRD: Final[Content] = {"packed": SHARED["packed"], "own": random_bytes("third", 4_000), "empty": b""}


@dataclass(frozen=True, slots=True)
class State:
    """All that a user can see of a store."""

    is_store: bool = False
    names: Names = field(default_factory=dict)
    tags: Mapping[str, tuple[str, Digest]] = field(default_factory=dict)


def read_content(store: ObjectStore, snapshot: CommittedSnapshot) -> dict[str, bytes]:
    """Read every entry of a snapshot."""
    with open_snapshot(open_repository(store), snapshot) as reader:
        return {name: bytes(reader.read_entry(name)) for name in reader.manifest.names}


def read_state(store: ObjectStore) -> State:
    """Read everything; raises whatever cannot be read."""
    if read_config(store) is None:
        return State()
    names = {}
    for snapshot in iter_names(store):
        assert isinstance(snapshot, CommittedSnapshot), snapshot
        content = read_content(store, snapshot)
        names[snapshot.name] = snapshot.digest, {name: hash_bytes(data) for name, data in content.items()}
    tags = {}
    for tag in iter_tags(store):
        assert isinstance(tag, Tag), tag
        tags[tag.name] = tag.snapshot_name, tag.digest
    return State(True, names, tags)


def holds(state: State, name: str, content: Content) -> bool:
    """Tell whether `name` shows exactly `content`."""
    found = state.names.get(name)
    return found is not None and found[1] == {entry: hash_bytes(data) for entry, data in content.items()}


def check_store(store: ObjectStore, *, read: bool = True) -> list[Finding]:
    """Return all findings of a check."""
    return list(Checker(store, read=read).iter_findings())


def save_content(
    store: ObjectStore, name: str, content: Content, *, overwrite: bool = False, compression: Compression = None
) -> SaveResult:
    """Open the store as a user would, and save."""
    sources = [BytesSource(entry, data, item_bytes=2) for entry, data in content.items()]
    repo = open_repository(store, create=True, compression=compression)
    return save(repo, Request(name, sources, options=WriteOptions(overwrite=overwrite)))


Act = Callable[[ObjectStore], None]


@dataclass(frozen=True, slots=True)
class Verb:
    """Something a user does, and the store that it is done to."""

    name: str
    prepare: Act
    act: Act

    def __str__(self) -> str:
        return self.name


def _prepare_nothing(_store: ObjectStore) -> None:
    return


def _prepare_two(store: ObjectStore) -> None:
    save_content(store, "run/step-1", FIRST)
    save_content(store, "run/step-2", SECOND)
    set_tag(store, "best", read_snapshot(store, "run/step-1"))


def _prepare_small(store: ObjectStore) -> None:
    """Names and a tag, for verbs that touch no bytes."""
    save_content(store, "run/step-1", {"own": FIRST["own"]})
    save_content(store, "run/step-2", THIRD)
    set_tag(store, "best", read_snapshot(store, "run/step-1"))


def _prepare_seven(store: ObjectStore) -> None:
    """Save seven times, so that the next save finds eight fragments of the index and merges them."""
    for number in range(7):
        save_content(store, "run/step-1", {"own": random_bytes(f"number {number}", 700)}, overwrite=True)


def _save_eighth(store: ObjectStore) -> None:
    save_content(store, "run/step-2", {"own": random_bytes("number 7", 700), "again": random_bytes("number 0", 700)})


def _save_first(store: ObjectStore) -> None:
    save_content(store, "run/step-1", SECOND)


def _save_beside(store: ObjectStore) -> None:
    save_content(store, "run/step-3", {**THIRD, "two chunks": SHARED["two chunks"], "inline": b"third"})


def _overwrite(store: ObjectStore) -> None:
    save_content(store, "run/step-2", THIRD, overwrite=True)


def _save_again(store: ObjectStore) -> None:
    save_content(store, "run/step-2", SECOND)


def _delete(store: ObjectStore) -> None:
    delete_snapshot(store, "run/step-2")


def _set_tag(store: ObjectStore) -> None:
    set_tag(store, "latest", read_snapshot(store, "run/step-2"))


def _move_tag(store: ObjectStore) -> None:
    set_tag(store, "best", read_snapshot(store, "run/step-2"), move=True)


def _delete_tag(store: ObjectStore) -> None:
    delete_tag(store, "best")


def _save_encoded(store: ObjectStore) -> None:
    """Save compressed chunks, for the first time in this store: it declares them."""
    save_content(store, "run/step-3", ENCODED, compression="fast")


def _prepare_encoded(store: ObjectStore) -> None:
    save_content(store, "run/step-1", {"weights": ENCODED["weights"], "own": halves(5_000, 2)}, compression="small")


def _overwrite_encoded(store: ObjectStore) -> None:
    save_content(store, "run/step-1", ENCODED, overwrite=True, compression="fast")


def _prepare_base(store: ObjectStore) -> None:
    save_content(store, "run/step-1", {"weights": trained(0, 6_000)}, compression="small")


def _save_delta(store: ObjectStore) -> None:
    """Save the first delta of this store: it declares that."""
    save_content(store, "run/step-2", {"weights": trained(1, 6_000)}, compression="small")


def _init(store: ObjectStore) -> None:
    init_repository(store)


FIRST_SAVE: Final = Verb("first save", _prepare_nothing, _save_first)
SAVE_BESIDE: Final = Verb("save beside others", _prepare_two, _save_beside)
OVERWRITE: Final = Verb("overwrite", _prepare_two, _overwrite)
SAVE_AGAIN: Final = Verb("repeated save", _prepare_two, _save_again)
DELETE: Final = Verb("delete", _prepare_small, _delete)
SET_TAG: Final = Verb("set tag", _prepare_small, _set_tag)
MOVE_TAG: Final = Verb("move tag", _prepare_small, _move_tag)
DELETE_TAG: Final = Verb("delete tag", _prepare_small, _delete_tag)
SAVE_AND_MERGE: Final = Verb("save that merges the index", _prepare_seven, _save_eighth)
SAVE_ENCODED: Final = Verb("first compressed save", _prepare_small, _save_encoded)
OVERWRITE_ENCODED: Final = Verb("overwrite with compressed chunks", _prepare_encoded, _overwrite_encoded)
SAVE_DELTA: Final = Verb("first delta", _prepare_base, _save_delta)
INIT: Final = Verb("init", _prepare_nothing, _init)

VERBS: Final = (
    FIRST_SAVE,
    SAVE_BESIDE,
    SAVE_AND_MERGE,
    OVERWRITE,
    SAVE_ENCODED,
    OVERWRITE_ENCODED,
    SAVE_DELTA,
    SAVE_AGAIN,
    DELETE,
    SET_TAG,
    MOVE_TAG,
    DELETE_TAG,
    INIT,
)
SAVES: Final = (FIRST_SAVE, SAVE_BESIDE, OVERWRITE)
