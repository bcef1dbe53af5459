"""Plants symbolic links into a store wherever a hostile writer could, and lists the verbs that must not follow them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from attacks.hostile import build
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.layout import PREFIXES, find_shelf
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import set_tag
from tests.kit.saving import noise, save_bytes, snapshot_of

BAIT: Final = (f"{'b' * 24}-{'b' * 16}", ".tmp-bait", f"{'c' * 24}@00000000", "00000009", "d" * 64)
"""Names of files that a collector would delete if it followed a link: unused packs, temporary files, old records."""
KINDS: Final = ("outside", "nowhere", "itself", "root", "self-links", "files")
"""The target of a link that replaces a directory; or links inside it: to itself, or replacing its files."""
DIRECTORIES: Final = (*(prefix.rstrip("/") for prefix in PREFIXES), find_shelf("good").rstrip("/"))
"""Every directory of the format, and the shelf with the record of `good`."""
SELF_LINKS: Final = 12
"""The number of links from a directory to itself: code that follows them finds every file about 12^40 times."""

VERBS: Final = (
    ("ls",), ("ls", "--json"), ("show", "good"), ("show", "good", "--chunks", "--json"),
    ("check",), ("check", "--read"), ("cat", "good", "config.json"), ("get", "good", "OUT"),
    ("du",), ("tag",), ("tag", "best"), ("doctor",),
    ("follow", "old/", "--timeout", "0s"), ("serve", "--no-browser", "--timeout", "0s"),
    ("help", "ls"), ("completion", "bash"),
    ("log",), ("bisect", "old/", "--", "true"),
    ("export", "good", "OUT"), ("verify-export", "FILE", "--against", "good"),
    ("diff", "good", "old/1"), ("cache", "ls"), ("cache", "stat"), ("cache", "clear", "--yes"), ("run", "ls"),
    ("gc",), ("repair",), ("prune", "--keep-last", "1", "old/"), ("prune", "--keep-last", "1", "old/", "--yes"),
    ("import", "FILE", "imported"), ("verify-import", "FILE", "--against", "good"),
    ("put", "new", "FILE"), ("put", "old/2", "FILE", "--overwrite"), ("tag", "newest", "good"),
    ("tag", "--delete", "newest"), ("copy", "good", "--to", "ELSEWHERE"), ("mirror",), ("mirror", "ELSEWHERE", "--yes"),
    ("-s", "SOUND", "copy", "good", "--to", "STORE", "--overwrite"), ("rm", "old/1", "--yes"), ("init",),
    ("repair", "--yes"), ("repair", "--from", "SOUND", "--yes"),
    ("gc", "--repack", "--yes", "--min-age", "0s"), ("gc", "--yes", "--min-age", "0s"),
)  # fmt: skip
"""All verbs, reading ones first; words in capitals are placeholders for paths that the caller chooses."""


@dataclass(frozen=True)
class Trap:
    """A store with the snapshots `good`, `old/1` and `old/2`, and a directory `outside` that links can lead to."""

    folder: Path

    @property
    def root(self) -> Path:
        """The directory of the store."""
        return self.folder / "store"

    @property
    def outside(self) -> Path:
        """The directory in which no verb may read, write or delete anything."""
        return self.folder / "outside"

    def plant(self, directory: str, kind: str) -> list[str]:
        """Plant links of a kind that replace `directory`, or inside it; return their paths."""
        if kind == "self-links":
            links = [f"{directory}/link-{number}" for number in range(SELF_LINKS)]
            for link in links:
                (self.root / link).symlink_to(".")
            return links
        if kind == "files":
            links = [f"{directory}/{path.name}" for path in (self.root / directory).iterdir() if path.is_file()]
            for link in links:
                self._move_out(link, self._outside(link))
            return links
        target = {"outside": self._outside(directory), "nowhere": Path("nowhere"), "root": self.root}
        self._move_out(directory, target.get(kind, self.root / directory))
        for name in BAIT:
            (self._outside(directory) / name).write_bytes(b"precious")
        return [directory]

    def undo(self, links: list[str]) -> None:
        """Remove the links and the bait, and restore the original directories and files."""
        for link in links:
            (self.root / link).unlink()
            aside = self._outside(link)
            if aside.is_dir():
                for name in BAIT:
                    (aside / name).unlink()
            if aside.exists():
                aside.rename(self.root / link)

    def _outside(self, directory: str) -> Path:
        return self.outside / directory.replace("/", "-")

    def _move_out(self, directory: str, target: Path) -> None:
        (self.root / directory).rename(self._outside(directory))
        (self.root / directory).symlink_to(target)


def build_trap(folder: Path) -> Trap:
    """Create the store and the directory `outside`."""
    trap = Trap(folder)
    build(trap.root)
    trap.outside.mkdir()
    repo = open_repository(LocalStore(str(trap.root)))
    for number in (1, 2):
        save_bytes(repo, f"old/{number}", {"x": noise(3000, seed=number)})
    set_tag(repo.store, "best", snapshot_of(repo, "good"))
    return trap
