"""A real process is killed at random moments, many times: what it said was saved is there, and nothing is half done."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from holdfast.digest import Digest, hash_bytes
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.url import open_store
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import Entry, digest_snapshot
from holdfast.repo.handle.config import read_config
from holdfast.repo.names.snapshots import CommittedSnapshot, iter_names, read_tag
from tests.faults import kill_supervisor
from tests.faults.scenario import check_store, read_content
from tests.faults.soak_supervisor import read_cpu_s
from tests.kit.patience import PATIENCE_S
from tests.kit.thinning import keep

_PER_STORE: Final = 20
_MAX_LINES: Final = 7
_MAX_WAIT_CPU_S: Final = 0.012


class Supervisor:
    """Talks to the process that forks the workers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", kill_supervisor.__name__],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        self._output = os.dup(self._process.stdout.fileno())
        self._process.stdout.close()
        self._unread = b""
        self._worker: int | None = None

    def begin(self, root: str, version: int) -> None:
        """Start a worker."""
        self._input.write(f"{root} {version}\n".encode())
        self._input.flush()
        # The worker may speak first; what it said stays to be read.
        while (found := self._find("worker ")) is None:
            self._receive(PATIENCE_S)
        self._worker = int(found)

    def kill(self) -> list[str]:
        """Kill the worker and return what it had said until it was found dead."""
        assert self._worker is not None
        os.kill(self._worker, signal.SIGKILL)
        lines: list[str] = []
        while "dead" not in lines:
            self._receive(PATIENCE_S)
            lines += self._take()
        self._worker = None
        return lines

    def read_lines(self, count: int, wait_cpu_s: float) -> list[str]:
        """Return what was said once `count` lines have come, and the worker has worked for `wait_cpu_s` since."""
        assert self._worker is not None
        while self._unread.count(b"\n") < count:
            self._receive(PATIENCE_S)
        # CPU time, so that a worker comes as far on a busy machine.
        end_cpu_s, end_s = read_cpu_s(self._worker) + wait_cpu_s, time.monotonic() + PATIENCE_S
        while read_cpu_s(self._worker) < end_cpu_s and time.monotonic() < end_s:
            time.sleep(0.0005)
        return self._take()

    def close(self) -> None:
        if self._worker is not None:
            self.kill()
        self._input.close()
        assert self._process.wait(PATIENCE_S) == 0
        os.close(self._output)

    def _receive(self, timeout_s: float) -> None:
        assert select.select([self._output], [], [], timeout_s)[0], "the worker has stopped"
        said = os.read(self._output, 1 << 16)
        assert said, "the supervisor has ended"
        self._unread += said

    def _take(self) -> list[str]:
        whole, newline, self._unread = self._unread.rpartition(b"\n")
        return (whole + newline).decode().splitlines()

    def _find(self, start: str) -> str | None:
        lines = self._unread.decode().splitlines(keepends=True)
        for line in lines:
            if line.startswith(start) and line.endswith("\n"):
                lines.remove(line)
                self._unread = "".join(lines).encode()
                return line[len(start) :]
        return None


@dataclass
class Told:
    """What a store showed after the last kill, and what the worker has said since; versions by name."""

    shown: dict[str, int | None] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    next_version: int = 0
    num_saved: int = 0

    def hear(self, lines: list[str]) -> None:
        for line in lines:
            match line.split():
                case ["begin", name, version]:
                    self.begun[name] = int(version)
                    self.next_version = int(version) + 1
                case ["saved", name, version]:
                    self.shown[name] = int(version)
                    del self.begun[name]
                    self.num_saved += 1

    @property
    def tagged(self) -> set[int]:
        """What the tag may point to."""
        return {version for version in (self.shown.get("tag"), self.begun.get("tag")) if version is not None}

    def settle(self, found: dict[str, int | None]) -> list[str]:
        """Return what is found that is neither old nor new; from now on, what was found is old."""
        wrong = [
            f"{name} shows {found.get(name)}, neither {self.shown.get(name)} nor {self.begun.get(name)}"
            for name in (*kill_supervisor.NAMES, "tag")
            if found.get(name) not in (self.shown.get(name), self.begun.get(name, self.shown.get(name)))
        ]
        self.shown, self.begun = dict(found), {}
        return wrong


def digest_of(version: int) -> Digest:
    """Return the content digest of what a worker saves as `version`."""
    content = kill_supervisor.content(kill_supervisor.name_of(version), version)
    return digest_snapshot(
        None,
        [
            Entry(name, len(data), (ChunkRef(hash_bytes(data), len(data), None),) if data else ())
            for name, data in content.items()
        ],
    )


def read_versions(store: ObjectStore, tagged: set[int]) -> dict[str, int | None]:
    """Read every name, and which of the versions `tagged` the tag means; raises if any holds something else."""
    if read_config(store) is None:
        return {}
    versions: dict[str, int | None] = {}
    for snapshot in iter_names(store):
        assert isinstance(snapshot, CommittedSnapshot), snapshot
        versions[snapshot.name] = snapshot.metadata["version"]
        assert read_content(store, snapshot) == kill_supervisor.content(snapshot.name, snapshot.metadata["version"])
    tag = read_tag(store, kill_supervisor.TAG)
    if tag:
        versions["tag"] = next((version for version in tagged if tag.digest == digest_of(version)), -1)
    return versions


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


def kill_often(supervisor: Supervisor, folder: str, *, kills: int, chance: random.Random) -> tuple[int, int]:
    """Kill workers on stores below a path or URL, and look at what each leaves; return how many saves and cuts."""
    num_saved = num_cut_short = 0
    for start in range(0, kills, _PER_STORE):
        root, told = f"{folder}/{start}", Told()
        for _ in range(min(_PER_STORE, kills)):
            supervisor.begin(root, told.next_version)
            told.hear(supervisor.read_lines(chance.randint(0, _MAX_LINES), chance.uniform(0, _MAX_WAIT_CPU_S)))
            told.hear(supervisor.kill())
            num_cut_short += bool(told.begun)
            assert told.settle(read_versions(open_store(root), told.tagged)) == []
        num_saved += told.num_saved
        assert [finding for finding in check_store(open_store(root)) if finding.severity != "note"] == []
    return num_saved, num_cut_short


@pytest.mark.parametrize("kills", keep([60, 400], 60))
def test_whatever_a_killed_process_said_was_saved_is_there(supervisor: Supervisor, tmp_path: Path, kills: int) -> None:
    num_saved, num_cut_short = kill_often(supervisor, str(tmp_path), kills=kills, chance=random.Random(20))

    # The kills came at all moments: most within something, and not all before anything was done.
    assert num_cut_short > kills // 2
    assert num_saved > kills // 2
