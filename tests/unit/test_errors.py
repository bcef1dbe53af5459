"""Errors read as sentences, carry facts as attributes, are caught as builtins, and cross processes."""

from __future__ import annotations

import errno
import pickle

import pytest

from holdfast import errors
from holdfast.errors import (
    AmbiguousName,
    BadExpression,
    BadFile,
    BadName,
    CommitUnknown,
    CompileCacheError,
    Corrupt,
    DeviceFault,
    DigestMismatch,
    HoldfastError,
    LeaseLost,
    Mismatch,
    MissingChunk,
    NameInUse,
    NewerFormat,
    NotAStore,
    NotBisectable,
    NotFound,
    NotShared,
    ObjectExists,
    OutOfMemory,
    RankError,
    RankFailure,
    ReadOnlyStore,
    ShardNotFound,
    SnapshotGone,
    SourceChanged,
    StoreError,
    StoreFull,
    StoreGone,
    TensorNotFound,
    TooLarge,
    Unsupported,
    Untrusted,
)

SENTENCE = "no snapshot 'a' in memory://; `holdfast ls` lists the snapshots"

EXAMPLES: list[HoldfastError] = [
    HoldfastError(SENTENCE),
    NotFound(SENTENCE, name="a"),
    TensorNotFound(SENTENCE, name="a"),
    ShardNotFound(SENTENCE, name="a"),
    SnapshotGone(SENTENCE, name="a"),
    BadName(SENTENCE),
    BadExpression(SENTENCE, expression="loss <", position=6),
    NotBisectable(SENTENCE),
    BadFile(SENTENCE, path="x"),
    TooLarge(SENTENCE),
    Unsupported(SENTENCE),
    Mismatch(SENTENCE, problems=("'w' has shape [2], not [3]",)),
    OutOfMemory(SENTENCE, needed_bytes=5),
    AmbiguousName(SENTENCE, paths=(("a", "b.c"), ("a.b", "c"))),
    SourceChanged(SENTENCE),
    NameInUse(SENTENCE, name="a"),
    NotAStore(SENTENCE),
    StoreGone(SENTENCE, expected_id="a", found_id="b"),
    NewerFormat(SENTENCE),
    Corrupt(SENTENCE, key="packs/x"),
    DigestMismatch(SENTENCE, key="packs/x"),
    MissingChunk(SENTENCE, key="packs/x"),
    Untrusted(SENTENCE, name="@compiled/x"),
    CompileCacheError(SENTENCE),
    StoreError(SENTENCE, key="packs/x", fate="unknown", code=errno.EIO),
    StoreFull(SENTENCE, key="packs/x", needed_bytes=5, free_bytes=3),
    ReadOnlyStore(SENTENCE, key="packs/x", code=errno.EROFS),
    ObjectExists(SENTENCE, key="packs/x"),
    LeaseLost(SENTENCE),
    DeviceFault(SENTENCE),
    CommitUnknown(SENTENCE, name="a"),
    NotShared(SENTENCE),
    RankError(SENTENCE, step="write", failures={1: RankFailure(1, "OSError", "disk full", "Traceback ...")}),
]


def name_of(error: HoldfastError) -> str:
    return type(error).__name__


def test_there_is_an_example_of_every_error() -> None:
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, HoldfastError)}
    assert {type(error) for error in EXAMPLES} == classes


@pytest.mark.parametrize("error", EXAMPLES, ids=name_of)
def test_every_error_shows_its_sentence(error: HoldfastError) -> None:
    assert str(error) == SENTENCE


@pytest.mark.parametrize("error", EXAMPLES, ids=name_of)
def test_every_error_crosses_processes_with_its_facts(error: HoldfastError) -> None:
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), str(received), vars(received)) == (type(error), SENTENCE, vars(error))


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (NotFound, KeyError),
        (TensorNotFound, FileNotFoundError),
        (ShardNotFound, ValueError),
        (BadFile, ValueError),
        (BadName, ValueError),
        (TooLarge, ValueError),
        (Unsupported, TypeError),
        (Mismatch, ValueError),
        (AmbiguousName, LookupError),
        (StoreError, OSError),
        (StoreFull, OSError),
        (ReadOnlyStore, PermissionError),
        (ObjectExists, FileExistsError),
    ],
)
def test_errors_are_caught_as_the_builtin_that_they_are(cls: type, builtin: type) -> None:
    assert issubclass(cls, builtin)


def test_facts_are_attributes() -> None:
    full = StoreFull("full", key="packs/x", needed_bytes=5, free_bytes=3)
    assert (full.key, full.needed_bytes, full.free_bytes, full.errno, full.fate) == (
        "packs/x",
        5,
        3,
        errno.ENOSPC,
        "absent",
    )
    assert StoreError("lost", fate="unknown").fate == "unknown"
    assert (NotFound("no", name="a").name, NameInUse("no", name="b").name, CommitUnknown("?", name="c").name) == tuple(
        "abc"
    )
    assert MissingChunk("gone", key="packs/y").key == "packs/y"
    assert Mismatch("no", problems=("one", "two")).problems == ("one", "two")
    failure = RankFailure(1, "OSError", "disk full")
    rank_error = RankError("no", step="write", failures={1: failure})
    assert (rank_error.step, rank_error.failures) == ("write", {1: failure})
    assert AmbiguousName("which", paths=(("a", "b"),)).paths == (("a", "b"),)


def test_a_missing_object_is_no_store_failure() -> None:
    assert not issubclass(NotFound, OSError)
    assert not issubclass(Corrupt, OSError)
    assert not issubclass(NewerFormat, Corrupt)
