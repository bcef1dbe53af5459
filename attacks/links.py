"""Symbolic links in a store: where a hostile writer can plant them, and every verb that then must not follow them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from attacks.hostile import build
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.layout import PREFIXES, find_shelf
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.tags import set_tag
from tests.kit.saving import noise, save_bytes, snapshot_of

BAIT: Final = (f"{'b' * 24}-{'b' * 16}", ".tmp-bait", f"{'c' * 24}@00000000", "00000009", "d" * 64)
"""Names of files that a collector which follows a link deletes: unused packs, temporary files, old records."""
KINDS: Final = ("outside", "nowhere", "itself", "root", "self-links", "files")
"""What a directory becomes a link to; or links in it: to the directory itself, or in the place of its files."""
DIRECTORIES: Final = (*(prefix.rstrip("/") for prefix in PREFIXES), find_shelf("good").rstrip("/"))
"""Every directory of the format, and the one that holds the record of `good`."""
SELF_LINKS: Final = 12
"""Links from a directory to itself: who follows them finds every file about 12^40 times."""

VERBS: Final = (
    ("ls",), ("ls", "--json"), ("show", "good"), ("show", "good", "--chunks", "--json"),
    ("check",), ("check", "--read"), ("cat", "good", "config.json"), ("get", "good", "OUT"),
    ("du",), ("tag",), ("tag", "best"), ("doctor",),
    ("diff", "good", "old/1"), ("cache", "ls"), ("cache", "stat"), ("cache", "clear", "--yes"), ("run", "ls"),
    ("gc",), ("repair",), ("prune", "--keep-last", "1", "old/"), ("prune", "--keep-last", "1", "old/", "--yes"),
    ("put", "new", "FILE"), ("put", "old/2", "FILE", "--overwrite"), ("tag", "newest", "good"),
    ("tag", "--delete", "newest"), ("copy", "good", "--to", "ELSEWHERE"),
    ("-s", "SOUND", "copy", "good", "--to", "STORE", "--overwrite"), ("rm", "old/1", "--yes"), ("init",),
    ("repair", "--yes"), ("gc", "--repack", "--yes", "--min-age", "0s"), ("gc", "--yes", "--min-age", "0s"),
)  # fmt: skip
"""All verbs, the ones that only read first; words in capitals stand for places that the caller chooses."""


@dataclass(frozen=True)
class Trap:
    """A store with the snapshots `good`, `old/1` and `old/2`, and a directory `outside` that links can lead to."""

    folder: Path

    @property
    def root(self) -> Path:
        """Where the store is."""
        return self.folder / "store"

    @property
    def outside(self) -> Path:
        """What no verb may read, write or delete."""
        return self.folder / "outside"

    def plant(self, place: str, kind: str) -> list[str]:
        """Plant links of a kind at, or in, the directory `place`; return where they lie."""
        if kind == "self-links":
            links = [f"{place}/link-{number}" for number in range(SELF_LINKS)]
            for link in links:
                (self.root / link).symlink_to(".")
            return links
        if kind == "files":
            links = [f"{place}/{path.name}" for path in (self.root / place).iterdir() if path.is_file()]
            for link in links:
                self._move_out(link, self._outside(link))
            return links
        target = {"outside": self._outside(place), "nowhere": Path("nowhere"), "root": self.root}
        self._move_out(place, target.get(kind, self.root / place))
        for name in BAIT:
            (self._outside(place) / name).write_bytes(b"precious")
        return [place]

    def undo(self, links: list[str]) -> None:
        """Remove the links, and put back what was there; bait stays outside."""
        for link in links:
            (self.root / link).unlink()
            aside = self._outside(link)
            if aside.is_dir():
                for name in BAIT:
                    (aside / name).unlink()
            if aside.exists():
                aside.rename(self.root / link)

    def _outside(self, place: str) -> Path:
        return self.outside / place.replace("/", "-")

    def _move_out(self, place: str, target: Path) -> None:
        (self.root / place).rename(self._outside(place))
        (self.root / place).symlink_to(target)


def build_trap(folder: Path) -> Trap:
    """Make the store and the directory outside."""
    trap = Trap(folder)
    build(trap.root)
    trap.outside.mkdir()
    repo = open_repository(LocalStore(str(trap.root)))
    for number in (1, 2):
        save_bytes(repo, f"old/{number}", {"x": noise(3000, seed=number)})
    set_tag(repo.store, "best", snapshot_of(repo, "good"))
    return trap
