"""Whatever was changed, exchanged or forged in an artifact, none of its bytes is returned."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.compile_cache.artifacts.artifact import describe_content, read_artifact
from holdfast.compile_cache.artifacts.catalog import (
    StoredVariant,
    artifact_name,
    iter_variants,
    list_signed,
    parse_variant,
)
from holdfast.compile_cache.artifacts.trust import Trust, sign
from holdfast.errors import Corrupt, HoldfastError, NotFound, Untrusted
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import read_snapshot
from tests.kit.compile_artifacts import (
    OTHER_SECRET,
    SECRET,
    forge,
    make_artifact,
    make_key,
    store_artifact,
)
from tests.kit.saving import load_bytes, new_repo, noise

SIGNED = Trust(secret=SECRET)


@pytest.fixture(autouse=True)
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no store of these tests be trusted for where it is."""
    monkeypatch.setattr(
        "holdfast.compile_cache.artifacts.trust.check_store_trust", lambda *_: "any user can write to the store"
    )


Metadata = dict[str, Json]
Entries = dict[str, bytes]


def _take_apart(repo: Repository, found: StoredVariant) -> tuple[Entries, Metadata]:
    assert found.snapshot is not None
    return load_bytes(repo, found.name), dict(found.snapshot.metadata)


def _flip(data: bytes, position: int) -> bytes:
    position %= 8 * len(data)
    changed = bytearray(data)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.target,)


def _restate(key_digest: str, entries: Entries, metadata: Metadata, secret: bytes | None) -> Metadata:
    """Make a record consistent again, as a forger would, with the secret that he has."""
    statement, content = describe_content(key_digest, list_signed(metadata), entries)
    return metadata | {"content": content, "mac": sign(statement, secret) if secret else ""}


@pytest.mark.parametrize("secret", [None, OTHER_SECRET, "keep the mac"])
def test_a_forged_graph_is_never_unpickled(tmp_path: Path, secret: bytes | str | None) -> None:
    repo = new_repo()
    found = store_artifact(repo, secret=SECRET)
    target = tmp_path / "written"
    entries, metadata = _take_apart(repo, found)
    entries["graph"] = pickle.dumps(Bomb(target))
    forged = _restate(found.key_digest, entries, metadata, secret if isinstance(secret, bytes) else None)
    if isinstance(secret, str):
        forged["mac"] = metadata["mac"]
    planted = forge(repo, found.name, entries, forged)

    with pytest.raises(Untrusted, match="is refused, because loading it runs its code"):
        pickle.loads(read_artifact(repo, planted, trust=SIGNED).graph)

    assert not target.exists()


def test_unpickling_the_forged_graph_would_run_its_code(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "written")))

    assert (tmp_path / "written").exists()


@pytest.fixture(scope="module")
def signed() -> tuple[Entries, Metadata]:
    """A signed artifact, taken apart."""
    repo = new_repo()
    artifact = make_artifact(guards="s0 > 8", graph=noise(999), kernels={"k1": noise(400, 1), "k2": noise(400, 2)})
    return _take_apart(repo, store_artifact(repo, artifact, secret=SECRET))


NAME = artifact_name(make_key().digest, 0)


def _read(entries: Entries, metadata: Metadata, name: str = NAME) -> object:
    repo = new_repo()
    return read_artifact(repo, forge(repo, name, entries, metadata), trust=SIGNED)


def test_an_unchanged_copy_is_accepted(signed: tuple[Entries, Metadata]) -> None:
    assert _read(*signed)


@given(entry=st.sampled_from(["graph", "key.json", "kernels/k1", "kernels/k2"]), position=st.integers(0, 1 << 16))
def test_a_flipped_bit_in_any_entry_is_refused(signed: tuple[Entries, Metadata], entry: str, position: int) -> None:
    entries, metadata = signed
    changed = entries | {entry: _flip(entries[entry], position)}

    with pytest.raises(Corrupt):
        _read(changed, metadata)
    with pytest.raises(Untrusted):
        _read(changed, _restate(make_key().digest, changed, metadata, None) | {"mac": metadata["mac"]})


CHANGES: dict[str, st.SearchStrategy[Json]] = {
    "guards": st.text(max_size=20),
    "seconds": st.floats(0, 1e6),
    "torch": st.text(max_size=8),
    "producer": st.text(max_size=8),
    "digests": st.dictionaries(st.sampled_from(["graph", "flags"]), st.text(max_size=8)),
    "another": st.integers(),
    "artifact": st.integers(0, 0),
}


@given(data=st.data())
def test_any_change_of_the_record_is_refused(signed: tuple[Entries, Metadata], data: st.DataObject) -> None:
    entries, metadata = signed
    field = data.draw(st.sampled_from(sorted(CHANGES)))
    value = data.draw(CHANGES[field].filter(lambda value: value != metadata.get(field)))
    changed = metadata | {field: value}

    with pytest.raises(Corrupt):
        _read(entries, changed)
    with pytest.raises(Untrusted):
        _read(entries, _restate(make_key().digest, entries, changed, None) | {"mac": metadata["mac"]})


@given(position=st.integers(0, 255))
def test_a_flipped_bit_of_the_signature_is_refused(signed: tuple[Entries, Metadata], position: int) -> None:
    entries, metadata = signed
    mac = _flip(bytes.fromhex(metadata["mac"]), position).hex()

    with pytest.raises(Untrusted, match="its signature does not match the key"):
        _read(entries, metadata | {"mac": mac})


@pytest.mark.parametrize("mac", ["", "00", "zz", "00" * 32, None, 7, ["x"], "0" * 65])
def test_a_malformed_signature_is_refused(signed: tuple[Entries, Metadata], mac: Json) -> None:
    entries, metadata = signed

    with pytest.raises((Untrusted, Corrupt)):
        _read(entries, metadata | {"mac": mac})


def test_an_artifact_under_the_name_of_another_key_is_refused(signed: tuple[Entries, Metadata]) -> None:
    entries, metadata = signed
    other = make_key("b").digest

    with pytest.raises(Corrupt, match="does not contain the artifact that its record describes"):
        _read(entries, metadata, artifact_name(other, 0))
    with pytest.raises(Untrusted):
        _read(entries, _restate(other, entries, metadata, None) | {"mac": metadata["mac"]}, artifact_name(other, 0))


def test_two_artifacts_with_their_names_exchanged_are_refused() -> None:
    repo = new_repo()
    held = {seed: _take_apart(repo, store_artifact(repo, make_artifact(seed), secret=SECRET)) for seed in "ab"}
    for seed, other in ("ab", "ba"):
        forge(repo, artifact_name(make_key(seed).digest, 0), *held[other])

    for seed in "ab":
        (found,) = iter_variants(repo.store, make_key(seed).digest)
        with pytest.raises(Corrupt):
            read_artifact(repo, found, trust=SIGNED)


def test_an_artifact_under_another_number_of_its_key_is_accepted(signed: tuple[Entries, Metadata]) -> None:
    assert _read(*signed, artifact_name(make_key().digest, 7))


def test_kernels_that_were_exchanged_left_out_or_added_are_refused(signed: tuple[Entries, Metadata]) -> None:
    entries, metadata = signed
    one, two = entries["kernels/k1"], entries["kernels/k2"]
    without = {name: data for name, data in entries.items() if name != "kernels/k2"}

    for changed in (entries | {"kernels/k1": two, "kernels/k2": one}, without, entries | {"kernels/k3": one}):
        with pytest.raises(Corrupt):
            _read(changed, metadata)
        with pytest.raises(Untrusted):
            _read(changed, _restate(make_key().digest, changed, metadata, None) | {"mac": metadata["mac"]})


@given(file=st.integers(0, 99), position=st.integers(0, 1 << 20))
def test_a_flipped_bit_in_any_file_of_the_store_gives_the_artifact_or_none_of_it(file: int, position: int) -> None:
    store = MemoryStore()
    repo = new_repo(store)
    artifact = make_artifact(graph=noise(9000, 5))
    name = store_artifact(repo, artifact, secret=SECRET).name
    listed = store.list("")
    key = listed[file % len(listed)].key
    held = store.read(key, limit_bytes=1 << 20)
    store.delete(key)
    store.create(key, _flip(held, position))

    try:
        fresh = open_repository(store)
        read = read_artifact(fresh, parse_variant(read_snapshot(store, name)), trust=SIGNED)
    except (HoldfastError, NotFound):
        return
    assert read == artifact
