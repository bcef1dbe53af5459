"""Makes the zoo: small stores, each damaged in one way; for a new case run `python -m tests.compat.make_zoo`."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Final
from unittest import mock

from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import CONFIG, INDEX, PACKS, lease_stem, manifest_key, pack_key
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import create_generation
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot
from tests.compat.archive import HERE, TIME_S, add, pack
from tests.kit.saving import (
    keys,
    misplaced_keys,
    new_repo,
    pack_of,
    record_key,
    replace_object,
    rot,
    save_bytes,
)
from tests.kit.standing import put_mark

ZOO: Final = HERE / "zoo"


def _random_bytes(size_bytes: int, seed: int) -> bytes:
    """Return bytes that the stored zoo has: they never change."""
    return random.Random(seed).randbytes(size_bytes)


CONTENT: Final = {"x": _random_bytes(1500, 1), "tiny": b"inline"}
SOUND: Final = {"y": _random_bytes(1500, 2)}


def make_sound() -> Repository:
    """Return a store with `hit`, which will be damaged, and `sound`, which will not."""
    repo = new_repo(MemoryStore())
    save_bytes(repo, "hit", CONTENT)
    save_bytes(repo, "sound", SOUND)
    return repo


def _pack(repo: Repository) -> str:
    return pack_key(pack_of(repo, "hit", "x").pack_id)


def _manifest(repo: Repository) -> str:
    return manifest_key(read_snapshot(repo.store, "hit").manifest.manifest_id)


def _cut(repo: Repository, key: str, size: int) -> None:
    replace_object(repo.store, key, repo.store.read(key, limit_bytes=1 << 20)[:size])


def _move(repo: Repository, key: str, target: str) -> None:
    repo.store.create(target, repo.store.read(key, limit_bytes=1 << 20))
    repo.store.delete(key)


def _lose_config(repo: Repository) -> None:
    for key in keys(repo.store, CONFIG):
        repo.store.delete(key)


def _swap_packs(repo: Repository) -> None:
    one, other = keys(repo.store, PACKS)
    first, second = (repo.store.read(key, limit_bytes=1 << 20) for key in (one, other))
    replace_object(repo.store, one, second)
    replace_object(repo.store, other, first)


def _abandon(repo: Repository) -> None:
    fields = {
        "kind": "lease", "lease": "a" * 24, "state": "live", "write_id": "w", "purpose": "save 'x'", "host": "gone",
        "pid": 1, "time": TIME_S,
    }  # fmt: skip
    create_generation(repo.store, lease_stem("a" * 24), 0, fields)


def _state_version(repo: Repository, major: int, minor: int) -> None:
    fields = {"kind": "config", "store_id": "s", "write_id": "w", "format": {"major": major, "minor": minor}}
    features: dict[str, list[str]] = {"read": [], "write": [], "collect": []}
    create_generation(repo.store, CONFIG, 2, {**fields, "features": features, "confirms": 1})


def _overwrite(repo: Repository) -> None:
    save_bytes(repo, "hit", {"x": b"new"}, overwrite=True)


CASES: Final[dict[str, Callable[[Repository], object]]] = {
    "sound": lambda repo: None,
    "missing-pack": lambda repo: repo.store.delete(_pack(repo)),
    "truncated-pack": lambda repo: _cut(repo, _pack(repo), 900),
    "flipped-chunk": lambda repo: rot(repo.store, _pack(repo), pack_of(repo, "hit", "x").offset + 9),
    "flipped-footer": lambda repo: rot(repo.store, _pack(repo), -150),
    "flipped-header": lambda repo: rot(repo.store, _pack(repo), 3),
    "missing-manifest": lambda repo: repo.store.delete(_manifest(repo)),
    "flipped-manifest": lambda repo: rot(repo.store, _manifest(repo), 60),
    "torn-record": lambda repo: _cut(repo, record_key("hit"), 150),
    "flipped-record": lambda repo: rot(repo.store, record_key("hit"), 130),
    "misplaced-record": lambda repo: _move(repo, record_key("hit"), misplaced_keys("hit")[0]),
    "missing-config": _lose_config,
    "swapped-packs": _swap_packs,
    "index-garbage": lambda repo: replace_object(repo.store, keys(repo.store, INDEX)[0], _random_bytes(500, 3)),
    "abandoned-lease": _abandon,
    "pending-mark": lambda repo: put_mark(repo.store, [_pack(repo)]),
    "superseded": _overwrite,
    "tombstone": lambda repo: delete_snapshot(repo.store, "hit"),
    "unknown-prefix": lambda repo: repo.store.create("later/thing", b"?"),
    "newer-minor": lambda repo: _state_version(repo, 1, 99),
    "newer-major": lambda repo: _state_version(repo, 99, 0),
}


def make_case(name: str) -> bytes:
    """Return the store of one case as a compressed archive, the same bytes every time."""
    seeded = random.Random(name)
    with mock.patch("os.urandom", seeded.randbytes):
        repo = make_sound()
        CASES[name](repo)
    assert isinstance(repo.store, MemoryStore)
    contents = repo.store.contents()
    if name == "abandoned-lease":
        contents["packs/.tmp-left-behind"] = b"half a pack"
    return pack(contents)


if __name__ == "__main__":
    for case in CASES:
        add(ZOO / f"{case}.tar.gz", partial(make_case, case))
