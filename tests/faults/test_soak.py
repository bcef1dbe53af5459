"""Writers and collectors are killed beside each other: what returned loads, and gc brings the disk down to it."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.layout import MANIFESTS, PACKS
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import CommittedSnapshot, iter_names
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.upkeep.transfer import apply_repack, plan_repack
from holdfast.repo.upkeep.usage import read_usage
from tests.faults.scenario import check_store, read_content
from tests.faults.soak_supervisor import Plan, content, describe

NOW: Final = Rules(min_age_s=0.0)
# What `gc --repack` leaves alone is up to half dead; to come within a tenth of the live bytes takes more.
DEAD_SHARE: Final = 0.05
REPOSITORY: Final = Path(__file__).parents[2]


@dataclass
class Told:
    """What the workers have said: by name, what it may show."""

    allowed: dict[str, set[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, logs: Path) -> Told:
        told = cls()
        for path in sorted(logs.glob("*.log")):
            for line in path.read_text().splitlines():
                told.hear(line)
        return told

    def hear(self, line: str) -> None:
        kind, *words = line.split()
        self.counts[kind if kind not in ("did", "gave") else " ".join([kind, *words[:2]]).rstrip("0123456789 ")] += 1
        if kind == "error":
            self.errors.append(line)
        elif kind == "begin":
            self.allowed.setdefault(words[0], {"deleted"}).add(words[1])
        elif kind == "done":
            self.allowed[words[0]] = {words[1]}
        elif kind == "undone":
            self.allowed[words[0]].discard(words[1])
            if words[2] == "NotFound":
                self.allowed[words[0]] = {"deleted"}


def run(plan: Plan) -> tuple[Told, int]:
    subprocess.run(describe(plan), cwd=REPOSITORY, check=True)
    return Told.read(Path(plan.logs)), int(Path(plan.logs, "killed").read_text())


def find_wrong(store: LocalStore, told: Told) -> list[str]:
    """Return every name that does not show, bit by bit, what it may."""
    shown = {}
    for snapshot in iter_names(store):
        assert isinstance(snapshot, CommittedSnapshot), snapshot
        version = snapshot.metadata["version"]
        shown[snapshot.name] = str(version)
        assert read_content(store, snapshot) == content(snapshot.name, version)
    return [
        f"{name} shows {shown.get(name, 'deleted')}, not one of {sorted(allowed)}"
        for name, allowed in told.allowed.items()
        if shown.get(name, "deleted") not in allowed
    ]


def count_bytes(root: Path) -> int:
    """Return what all files take, temporary ones included."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def verify_disk(root: Path) -> dict[str, int]:
    """Collect, then repack and collect: the disk holds the live packs, then the live bytes and a tenth."""
    store = LocalStore(root)
    figures = {"before": count_bytes(root)}
    collect(store, NOW)
    live = read_live(store)
    on_disk = {info.key for prefix in (PACKS, MANIFESTS) for info in store.list(prefix)}
    assert on_disk == set(live.needs)
    assert [path.name for path in root.rglob(".tmp-*")] == []
    figures["after gc"] = count_bytes(root)
    repo = open_repository(store)
    while (plan := plan_repack(repo, read_live(store).current, dead_share=DEAD_SHARE)).victims:
        assert len(apply_repack(repo, plan)) == len(plan.snapshots)
        collect(store, NOW)
    usage = read_usage(store, read_live(store).current)
    figures["live"] = usage.live_bytes
    figures["after repack"] = count_bytes(root)
    assert figures["after repack"] <= 1.1 * usage.live_bytes, figures
    return figures


def verify_clean(root: Path) -> None:
    findings = check_store(LocalStore(root))
    assert [finding for finding in findings if finding.severity != "note"] == []


def judge(plan: Plan, told: Told) -> dict[str, int]:
    root = Path(plan.root)
    assert told.errors == []
    assert find_wrong(LocalStore(root), told) == []
    verify_clean(root)
    figures = verify_disk(root)
    assert find_wrong(LocalStore(root), told) == []
    verify_clean(root)
    return figures


@pytest.mark.slow
def test_after_many_kills_of_whoever_does_everything_gc_brings_the_disk_down(tmp_path: Path) -> None:
    places = str(tmp_path / "store"), str(tmp_path / "logs")
    plan = Plan(*places, ["mixed"], acts=300, kills=60, collections=10, pause_acts=(0, 4), seed=7)
    told, killed = run(plan)
    assert killed >= 60
    assert told.counts["done"] > 100, told.counts
    figures = judge(plan, told)
    assert figures["after gc"] <= figures["before"]


@pytest.mark.parametrize("acts", [100, pytest.param(4000, marks=pytest.mark.slow)])
def test_two_collectors_and_four_writers_under_fire_lose_nothing(acts: int, tmp_path: Path) -> None:
    roles = ["write"] * 4 + ["collect"] * 2
    places = str(tmp_path / "store"), str(tmp_path / "logs")
    plan = Plan(*places, roles, acts=acts, kills=acts // 20, collections=1 + acts // 400, pause_acts=(2, 12), seed=11)
    told, killed = run(plan)
    assert killed >= acts // 20
    assert told.counts["done"] > acts / 2, told.counts
    assert told.counts["did collect"] > acts // 400, told.counts
    figures = judge(plan, told)
    assert figures["after gc"] < figures["before"]
