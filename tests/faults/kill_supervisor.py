"""The process that test_kill starts: forks a worker for each round, so that a kill costs no interpreter start.

Reads lines `<path or URL of a store> <first version>` from its input. For each it forks a worker, tells its process
id, and after the worker has been killed by the test says `dead`. Workers write straight to the same output.
"""

from __future__ import annotations

import os
import random
import signal
import sys

from holdfast.objects.url import is_url, open_store
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import read_snapshot, set_tag
from holdfast.repo.write.writer import Request, WriteOptions, save
from tests.filesystems.places import open_place

NAMES = ("run/a", "run/b", "elsewhere")
TAG = "latest"
_SHARED = random.Random("shared").randbytes(20_000)


def content(name: str, version: int) -> dict[str, bytes]:
    """Return what a worker saves: some of it shared by all versions, some of it its own."""
    own = random.Random(f"{name} {version}").randbytes(3_000)
    return {"version": str(version).encode(), "shared": _SHARED, "own": own, "empty": b""}


def name_of(version: int) -> str:
    """Return the name that a version is saved under."""
    return NAMES[version % len(NAMES)]


def work(root: str, version: int) -> None:
    """Save, overwrite and tag without end; report what has begun and what has returned."""
    store = open_store(root) if is_url(root) else open_place(root)
    while True:
        name = name_of(version)
        _tell(f"begin {name} {version}")
        sources = [BytesSource(entry, data) for entry, data in content(name, version).items()]
        request = Request(name, sources, options=WriteOptions(metadata={"version": version}, overwrite=True))
        save(open_repository(store, create=True), request)
        _tell(f"saved {name} {version}")
        snapshot = read_snapshot(store, name)
        _tell(f"begin tag {version}")
        set_tag(store, TAG, snapshot, move=True)
        _tell(f"saved tag {version}")
        version += 1


def _tell(line: str) -> None:
    # One call for a whole line: a worker that dies cannot leave half of it.
    os.write(1, f"{line}\n".encode())


def supervise() -> None:
    """Serve rounds until the input ends."""
    for line in sys.stdin:
        root, version = line.split()
        worker = os.fork()
        if worker == 0:
            work(root, int(version))
        _tell(f"worker {worker}")
        _, status = os.waitpid(worker, 0)
        assert os.WIFSIGNALED(status), status
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        _tell("dead")


if __name__ == "__main__":
    supervise()
