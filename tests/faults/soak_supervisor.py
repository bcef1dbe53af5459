"""The process that the soak tests start: forks writers and collectors on one store, and kills them at random moments.

Its arguments are a `Plan` as JSON. Each worker appends what it begins and what has returned to its own log.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from holdfast.errors import CommitUnknown, HoldfastError, LeaseLost, NameInUse, NotFound
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import init_repository, open_repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.upkeep.transfer import apply_repack, copy_snapshot, plan_repack
from holdfast.repo.write.writer import Request, WriteOptions, save
from tests.faults.unsynced import UnsyncedFiles

NAMES: Final = 4
# Longer than any stall of a worker that lives: one that is fenced, commits and is killed before it can withdraw
# leaves a name that cannot be read (see docs/design/0007). Multiplied by how slow the machine is.
EXPIRE_S: Final = 5.0
_STALL_S: Final = 60.0
_SHARED: Final = [random.Random(f"shared {number}").randbytes(60_000) for number in range(6)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, and until when."""

    root: str
    logs: str
    roles: list[str]
    acts: int
    """How many acts have to be acknowledged in the logs, at least."""
    kills: int
    """How many workers have to be killed, at least."""
    collections: int
    """How many collections have to be acknowledged, at least. The run ends when all three numbers are reached."""
    pause_acts: tuple[int, int]
    """How many are acknowledged between two kills, at least and at most; the load of the machine changes nothing."""
    pause_cpu_s: float = 0.1
    """After that, up to so much CPU time passes, so that a kill may come at any moment of an act."""
    seed: int = 0
    expire_s: float = EXPIRE_S


def content(name: str, version: int) -> dict[str, bytes]:
    """Return what a worker saves: some of it shared with other versions and names, some of it its own."""
    chance = random.Random(f"{name} {version}")
    parts = {f"shared {number}": _SHARED[number] for number in chance.sample(range(len(_SHARED)), 3)}
    return {**parts, "own": chance.randbytes(chance.randrange(20_000, 90_000)), "version": str(version).encode()}


class Worker:
    """One life of a worker: does things without end, and writes down what it does."""

    def __init__(self, plan: Plan, slot: int, life: int) -> None:
        self._store = LocalStore(plan.root, files=UnsyncedFiles())
        self._source = LocalStore(plan.root + "-source", files=UnsyncedFiles())
        self._log = os.open(os.path.join(plan.logs, f"{slot}.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._slot = slot
        self._version = life * 100_000
        self._chance = random.Random(f"{plan.seed} {slot} {life}")
        self._rules = Rules(min_age_s=0.0, expire_s=plan.expire_s, wait_s=0.02)
        self._acts: dict[str, list[Callable[[], None]]] = {
            "write": [self._save, self._save, self._save, self._delete],
            "collect": [self._collect, self._collect, self._repack],
            "mixed": [self._save, self._save, self._delete, self._collect, self._repack, self._copy],
        }

    def run(self, role: str) -> None:
        while True:
            self._chance.choice(self._acts[role])()

    def _tell(self, line: str) -> None:
        # One call for a whole line: a worker that dies cannot leave half of it.
        os.write(self._log, f"{line}\n".encode())

    def _change(self, name: str, state: str, act: Callable[[], object]) -> None:
        self._tell(f"begin {name} {state}")
        try:
            act()
        except (NameInUse, LeaseLost, NotFound) as error:
            self._tell(f"undone {name} {state} {type(error).__name__}")
        except CommitUnknown:
            self._tell(f"unknown {name} {state}")
        except HoldfastError as error:
            self._tell(f"error {type(error).__name__}: {error}")
        else:
            self._tell(f"done {name} {state}")

    def _name(self) -> str:
        return f"w{self._slot}/{self._chance.randrange(NAMES)}"

    def _save(self) -> None:
        name, version = self._name(), self._version
        self._version += 1
        sources = [BytesSource(entry, data) for entry, data in content(name, version).items()]
        request = Request(name, sources, options=WriteOptions(metadata={"version": version}, overwrite=True))
        self._change(name, str(version), lambda: save(open_repository(self._store, create=True), request))

    def _delete(self) -> None:
        name = self._name()
        self._change(name, "deleted", lambda: delete_snapshot(self._store, name))

    def _copy(self) -> None:
        """Save into another store, and copy from there."""
        name, version = self._name(), self._version
        self._version += 1
        sources = [BytesSource(entry, data) for entry, data in content(name, version).items()]
        source = open_repository(self._source, create=True)
        save(source, Request(name, sources, options=WriteOptions(metadata={"version": version}, overwrite=True)))
        target = open_repository(self._store, create=True)
        held = read_snapshot(self._source, name)
        self._change(name, str(version), lambda: copy_snapshot(source, held, target, overwrite=True))

    def _collect(self) -> None:
        self._look_after("collect", lambda: collect(self._store, self._rules).freed_bytes)

    def _repack(self) -> None:
        self._look_after("repack", lambda: len(self._repack_all()))

    def _repack_all(self) -> list[object]:
        repo = open_repository(self._store)
        return list(apply_repack(repo, plan_repack(repo, read_live(self._store).current)))

    def _look_after(self, what: str, act: Callable[[], int]) -> None:
        try:
            self._tell(f"did {what} {act()}")
        except (NotFound, LeaseLost, CommitUnknown) as error:
            self._tell(f"gave up {what}: {type(error).__name__}")
        except HoldfastError as error:
            self._tell(f"error {what}: {type(error).__name__}: {error}")


def fork(plan: Plan, slot: int, life: int) -> int:
    """Start a life of a worker; returns its process id."""
    worker = os.fork()
    if worker == 0:
        try:
            Worker(plan, slot, life).run(plan.roles[slot])
        finally:
            os._exit(3)
    return worker


class Logs:
    """Counts the acts, and the collections among them, that are acknowledged in the logs of all workers."""

    def __init__(self, folder: str, workers: int) -> None:
        self._paths = [Path(folder, f"{slot}.log") for slot in range(workers)]
        self._read_bytes = [0] * workers
        self.acts = 0
        self.collections = 0

    def read(self) -> None:
        """Count what was acknowledged since the last call."""
        for slot, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read_bytes[slot])
                lines, newline, _ = file.read().rpartition(b"\n")
            self._read_bytes[slot] += len(lines + newline)
            self.acts += sum(line.startswith((b"done", b"did")) for line in lines.splitlines())
            self.collections += sum(line.startswith(b"did collect") for line in lines.splitlines())


class Workers:
    """Processes that work until they are killed, and what they have done so far."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ended_cpu_s = 0.0
        self._logs = Logs(plan.logs, len(plan.roles))
        self._lives = [0] * len(plan.roles)
        self._pids = [fork(plan, slot, 0) for slot in range(len(plan.roles))]

    def __len__(self) -> int:
        return len(self._pids)

    def count_cpu_s(self) -> float:
        """Return the CPU time of all workers, those that were killed included."""
        return self._ended_cpu_s + sum(map(read_cpu_s, self._pids))

    def count_acts(self) -> int:
        """Return how many acts all workers have acknowledged."""
        self._logs.read()
        return self._logs.acts

    def has_done(self, acts: int, collections: int) -> bool:
        """Return whether the workers have acknowledged so many acts, and so many collections among them."""
        return self.count_acts() >= acts and self._logs.collections >= collections

    def wait(self, acts: int, cpu_s: float) -> None:
        """Let them do so many acts, then work for so long; not for ever, for all of them may wait for something."""
        goal, deadline_s = self.count_acts() + acts, time.monotonic() + _STALL_S
        while self.count_acts() < goal and time.monotonic() < deadline_s:
            time.sleep(0.001)
        goal_s = self.count_cpu_s() + cpu_s
        while self.count_cpu_s() < goal_s and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def replace(self, slot: int) -> None:
        """Kill one, and start another life of it."""
        self._end(self._pids[slot])
        self._lives[slot] += 1
        self._pids[slot] = fork(self._plan, slot, self._lives[slot])

    def end(self) -> None:
        """Kill all."""
        for pid in self._pids:
            self._end(pid)
        self._pids = []

    def _end(self, pid: int) -> None:
        self._ended_cpu_s += read_cpu_s(pid)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), status  # it must have been alive


def read_cpu_s(pid: int) -> float:
    """Return the CPU time of another process."""
    # The clock id of another process, as clock_getcpuclockid(3) makes it.
    return time.clock_gettime((~pid << 3) | 2)


def measure_slowness() -> float:
    """Return how many seconds it takes to get one second of CPU time; 1.0 on a quiet machine."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    while time.process_time() - began_cpu_s < 0.1:
        pass
    return max(1.0, (time.monotonic() - began_s) / (time.process_time() - began_cpu_s))


def supervise(plan: Plan) -> int:
    """Run the plan; returns how many were killed while at work."""
    chance = random.Random(plan.seed)
    init_repository(LocalStore(plan.root, files=UnsyncedFiles()))
    os.makedirs(plan.logs, exist_ok=True)
    workers = Workers(replace(plan, expire_s=plan.expire_s * measure_slowness()))
    killed = 0
    while killed < plan.kills or not workers.has_done(plan.acts, plan.collections):
        workers.wait(chance.randint(*plan.pause_acts), chance.uniform(0, plan.pause_cpu_s))
        workers.replace(chance.randrange(len(workers)))
        killed += 1
    workers.end()
    return killed


def describe(plan: Plan) -> list[str]:
    """Return the command that runs a plan."""
    return [sys.executable, "-m", __name__, json.dumps(asdict(plan))]


if __name__ == "__main__":
    given = Plan(**json.loads(sys.argv[1]))
    Path(given.logs).mkdir(parents=True, exist_ok=True)
    Path(given.logs, "killed").write_text(str(supervise(given)))
