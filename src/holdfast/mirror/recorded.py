"""Which mirrors a store has: recorded in the store itself, so that `prune` and the command line know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from holdfast.errors import Corrupt, NameInUse
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import RESERVED
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import read_name
from holdfast.repo.write.writer import Request, save

MIRRORS: Final = f"{RESERVED}mirrors"
"""The name of the snapshot without entries whose metadata lists the mirrors."""
_FIELD: Final = "mirrors"
_ATTEMPTS: Final = 8
"""How often a writer tries again after another process has changed the list first."""

MirrorScope = Literal["all", "named"]
"""What a mirror receives: every snapshot, or those that were saved with `mirror=`."""


def read_mirrors(store: ObjectStore) -> dict[str, MirrorScope]:
    """Return the URLs of the recorded mirrors and what each receives; raises Corrupt if the list cannot be read."""
    snapshot = read_name(store, MIRRORS).snapshot
    if snapshot is None:
        return {}
    found = snapshot.metadata.get(_FIELD)
    if not isinstance(found, dict):
        raise Corrupt(f"the list of mirrors in {store.url} is not one; delete it with `holdfast rm {MIRRORS}`")
    return {url: "named" if scope == "named" else "all" for url, scope in found.items()}


def record_mirror(repo: Repository, url: str, scope: MirrorScope) -> bool:
    """Add a mirror to the list, or widen what it receives; return whether the list was changed."""
    for _ in range(_ATTEMPTS):
        known = read_mirrors(repo.store)
        if known.get(url) in (scope, "all"):
            return False
        try:
            _write(repo, {**known, url: scope})
        except NameInUse:
            continue  # another process has changed the list: read it again
        return True
    raise NameInUse(f"other processes keep changing the mirrors of {repo.store.url}; try again", name=MIRRORS)


def forget_mirror(repo: Repository, url: str) -> bool:
    """Remove a mirror from the list; return whether it was there. The mirror itself is kept."""
    for _ in range(_ATTEMPTS):
        known = read_mirrors(repo.store)
        if url not in known:
            return False
        try:
            _write(repo, {each: scope for each, scope in known.items() if each != url})
        except NameInUse:
            continue
        return True
    raise NameInUse(f"other processes keep changing the mirrors of {repo.store.url}; try again", name=MIRRORS)


def _write(repo: Repository, mirrors: Mapping[str, MirrorScope]) -> None:
    save(repo, Request(MIRRORS, [], metadata={_FIELD: dict(mirrors)}, overwrite=True))
