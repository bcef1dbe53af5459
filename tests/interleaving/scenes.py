"""The casts whose orders are explored: what is there at first, who acts, and what each of them wants to come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.handle.compression import Compression
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot, delete_snapshot, iter_names, read_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.upkeep.transfer import apply_repack, copy_snapshot, plan_repack
from tests.faults.scenario import Content, random_bytes, save_content
from tests.interleaving.schedule import Act
from tests.kit.deltas import trained
from tests.kit.encoded import halves

EAGER: Final = Rules(min_age_s=0.0, expire_s=0.0)
"""Takes everybody for dead at once: no clock is needed for a fence at any moment."""
PATIENT: Final = Rules(min_age_s=0.0, expire_s=1e9)
"""Never fences; leaves to the next collection what it would have to wait for."""


def piece(seed: str) -> bytes:
    return random_bytes(seed, 900)


DEAD: Final[Content] = {"dead": piece("dead")}
OLD: Final[Content] = {"old": piece("old"), "inline": b"old"}
NEW: Final[Content] = {"dead": piece("dead"), "new": piece("new"), "inline": b"new"}
REUSING: Final[Content] = {"dead": piece("dead")}
OTHER: Final[Content] = {"dead": piece("dead"), "other": piece("other")}


@dataclass(frozen=True, slots=True)
class Part:
    """One actor, and the states that it takes names through if it does what it was asked."""

    title: str
    act: Act
    effects: Mapping[str, tuple[Content | None, ...]] = field(default_factory=dict)
    """By name; None: deleted."""
    restates: bool = False
    """It gives a name anew what it holds, whatever that is."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What is there at first, and who acts."""

    title: str
    prepare: Callable[[ObjectStore], None]
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return self.title


def prepare_dead(store: ObjectStore) -> None:
    """Keep `old`, and a pack that nothing needs, but that the index knows."""
    save_content(store, "gone", DEAD)
    save_content(store, "old", OLD)
    delete_snapshot(store, "gone")


def _prepare_mostly_dead(store: ObjectStore) -> None:
    """Keep one small entry of a pack that was large."""
    save_content(store, "large", {"old": piece("old"), "ballast": random_bytes("ballast", 9_000)})
    save_content(store, "old", OLD)
    delete_snapshot(store, "large")


def _prepare_base(store: ObjectStore) -> None:
    """Keep `old`, whose weights the next save takes as the base of its deltas, and a delta on them."""
    save_content(store, "old", {"w": trained(0, 6_000)}, compression="small")
    save_content(store, "kept", {"w": trained(1, 6_000)}, compression="small")


def _prepare_free_base(store: ObjectStore) -> None:
    """Keep a delta whose base no snapshot contains any more, in a pack that is mostly dead."""
    save_content(
        store, "gone", {"w": trained(0, 6_000), "ballast": random_bytes("ballast", 30_000)}, compression="small"
    )
    save_content(store, "old", {"w": trained(1, 6_000)}, compression="small")
    delete_snapshot(store, "gone")


def save_part(name: str, content: Content, *, overwrite: bool = False, compression: Compression = None) -> Part:
    def act(store: ObjectStore) -> object:
        return save_content(store, name, content, overwrite=overwrite, compression=compression)

    return Part(f"{'overwrite' if overwrite else 'save'} {name}", act, {name: (content,)})


def collect_part(rules: Rules, *, times: int = 1) -> Part:
    def act(store: ObjectStore) -> object:
        return [collect(store, rules) for _ in range(times)]

    return Part("eager collector" if rules is EAGER else "patient collector", act)


def delete_part(name: str) -> Part:
    return Part(f"delete {name}", lambda store: delete_snapshot(store, name), {name: (None,)})


def _delete_and_save() -> Part:
    def act(store: ObjectStore) -> object:
        delete_snapshot(store, "old")
        return save_content(store, "old", OLD)

    return Part("delete and save", act, {"old": (None, OLD)})


def _list_current(store: ObjectStore) -> list[CommittedSnapshot]:
    return [found for found in iter_names(store) if isinstance(found, CommittedSnapshot)]


def _repack() -> Part:
    def act(store: ObjectStore) -> object:
        repo = open_repository(store)
        try:
            plan = plan_repack(repo, _list_current(store))
        except NotFound:
            # What was listed was replaced and collected meanwhile: planning does not pass it over, applying does.
            plan = plan_repack(repo, _list_current(store))
        return apply_repack(repo, plan)

    return Part("repack", act, restates=True)


def _copy_part() -> Part:
    source = MemoryStore("memory://source")
    save_content(source, "new", NEW)

    def act(store: ObjectStore) -> object:
        return copy_snapshot(open_repository(source), read_snapshot(source, "new"), open_repository(store, create=True))

    return Part("copy", act, {"new": (NEW,)})


SAVE: Final = save_part("new", NEW)
REUSE: Final = save_part("new", REUSING)
OVERWRITE: Final = save_part("old", NEW, overwrite=True)
OVERWRITE_TOO: Final = save_part("old", OTHER, overwrite=True)
ENCODE: Final = save_part("new", {**REUSING, "weights": halves(5_000)}, compression="fast")
ENCODE_TOO: Final = save_part("other", {"weights": halves(5_000), "more": halves(6_000, 1)}, compression="small")
"""Neither finds the codec declared at first."""
DELTA: Final = save_part("new", {"w": trained(2, 6_000)}, compression="small")
REUSE_DELTA: Final = save_part("new", {"w": trained(1, 6_000)}, compression="small")
COLLECT: Final = collect_part(EAGER)
WAIT: Final = collect_part(PATIENT, times=2)
DELETE: Final = delete_part("old")

SCENES: Final = (
    Scene("compressed save, eager collector", prepare_dead, (ENCODE, COLLECT)),
    Scene("two compressed saves", prepare_dead, (ENCODE, ENCODE_TOO)),
    Scene("delta on a base without a snapshot, eager collector", _prepare_free_base, (DELTA, COLLECT)),
    Scene("repack of a base, eager collector", _prepare_free_base, (_repack(), COLLECT)),
    Scene("save, eager collector", prepare_dead, (SAVE, COLLECT)),
    Scene("save, patient collector", prepare_dead, (SAVE, WAIT)),
    Scene("overwrite, eager collector", prepare_dead, (OVERWRITE, COLLECT)),
    Scene("overwrite, patient collector", prepare_dead, (OVERWRITE, WAIT)),
    Scene("delete and save, eager collector", prepare_dead, (_delete_and_save(), COLLECT)),
    Scene("delete and save, patient collector", prepare_dead, (_delete_and_save(), WAIT)),
    Scene("repack, eager collector", _prepare_mostly_dead, (_repack(), COLLECT)),
    Scene("repack, patient collector", _prepare_mostly_dead, (_repack(), WAIT)),
    Scene("copy, eager collector", prepare_dead, (_copy_part(), COLLECT)),
    Scene("eager collector, patient collector", prepare_dead, (COLLECT, collect_part(PATIENT))),
    Scene("repack, overwrite", _prepare_mostly_dead, (_repack(), OVERWRITE)),
)
CROWDS: Final = (
    Scene("save that reuses, two collectors", prepare_dead, (REUSE, COLLECT, collect_part(PATIENT))),
    Scene("overwrite, two collectors", prepare_dead, (OVERWRITE, COLLECT, collect_part(EAGER))),
    Scene("save, the same again, collector", prepare_dead, (SAVE, save_part("new", NEW), COLLECT)),
    Scene("copy, the same again, collector", prepare_dead, (_copy_part(), _copy_part(), COLLECT)),
    Scene("two overwrites, collector", prepare_dead, (OVERWRITE, OVERWRITE_TOO, COLLECT)),
    Scene("repack, overwrite, collector", _prepare_mostly_dead, (_repack(), OVERWRITE, COLLECT)),
    Scene("delete, save elsewhere, collector", prepare_dead, (DELETE, save_part("new", OLD), COLLECT)),
    Scene("repack, delete, collector", _prepare_mostly_dead, (_repack(), DELETE, COLLECT)),
    Scene("delta, its base is deleted, collector", _prepare_base, (DELTA, delete_part("old"), COLLECT)),
    Scene("delta that is reused, delete of both, collector", _prepare_free_base, (REUSE_DELTA, DELETE, COLLECT)),
)
