"""What is known about an upload while it runs: what waits, what is being sent, and what went wrong."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.display.readable import readable_repr
from holdfast.mirror.plan import MirrorPlan
from holdfast.progress import Progress, Silent
from holdfast.repo.names.snapshots import CommittedSnapshot


@dataclass(frozen=True, slots=True)
class MirrorState:
    """What a mirror has, and what is waiting to be uploaded."""

    url: str
    present: int
    """How many snapshots of the store the mirror has, as far as they were looked up."""
    waiting: tuple[str, ...]
    """The names of the snapshots that the mirror lacks, in the order of the uploads."""
    waiting_bytes: int
    """Their size; chunks that the mirror already has are not sent."""
    refused: Mapping[str, str]
    """Snapshots that will not be uploaded, and why: the mirror has later content, or they were deleted there."""
    uploading: str = ""
    """What is being uploaded at this moment; empty if nothing is."""
    done_bytes: int = 0
    total_bytes: int = 0
    sent_bytes: int = 0
    """Bytes of chunks that this process has sent."""
    last_error: str = ""
    """Why the last upload failed; empty if it has succeeded."""

    __repr__ = readable_repr

    @property
    def is_complete(self) -> bool:
        """Whether the mirror has everything that it is meant to have."""
        return not self.waiting


class UploadNews:
    """Collects the reports of uploads, from a thread of this process or a child. Safe in any thread."""

    def __init__(self, url: str, *, progress: Progress | None = None) -> None:
        """Know nothing about the mirror at `url` yet; `progress` receives the bytes of each snapshot as well."""
        self.url = url
        self._progress = progress or Silent()
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._waiting: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._fresh: dict[str, CommittedSnapshot] = {}
        """Committed since the last look at both stores."""
        self._task = ""
        self._done_bytes = self._total_bytes = self._sent_bytes = 0
        self.last_error = ""
        """Why the last upload failed; empty if it has succeeded."""
        self.store_id = ""
        """The id of the store that the last upload found or created there: what is known, is known of that one."""
        self._doubts = 0

    @property
    def known(self) -> frozenset[tuple[str, str]]:
        """Name and write id of the local snapshots that the mirror has; empty while that is in doubt."""
        with self._lock:
            return frozenset() if self._doubts else frozenset(self._known.items())

    @property
    def doubts(self) -> int:
        """How often the mirror was found to have lost something since an upload last compared all names."""
        return self._doubts

    def add_doubts(self, count: int) -> None:
        """Add a doubt, or subtract those from before an upload that has compared all names."""
        with self._lock:
            self._doubts += count

    def read(self) -> MirrorState:
        """Return the state as far as it is known; asks neither store."""
        with self._lock:
            waiting = self._waiting | {name: each.logical_bytes for name, each in self._fresh.items()}
            return MirrorState(
                self.url,
                len(self._known),
                tuple(waiting),
                sum(waiting.values()),
                dict(self._refused),
                self._task,
                self._done_bytes,
                self._total_bytes,
                self._sent_bytes,
                self.last_error,
            )

    def add_waiting(self, snapshot: CommittedSnapshot) -> None:
        """Note a snapshot that was committed just now."""
        with self._lock:
            self._known.pop(snapshot.name, None)
            self._fresh[snapshot.name] = snapshot

    def forget_fresh(self) -> None:
        """Note that an upload has ended that began after the last commit: what it did not list is gone."""
        with self._lock:
            self._fresh.clear()

    def begin(self, task: str, total_bytes: int) -> None:
        """Note which snapshot is being sent."""
        self._task, self._done_bytes, self._total_bytes = task, 0, total_bytes
        self._progress.begin(task, total_bytes)

    def advance(self, num_bytes: int) -> None:
        """Count bytes as done."""
        self._done_bytes += num_bytes
        self._progress.advance(num_bytes)

    def end(self) -> None:
        """Note that nothing is being sent."""
        self._task = ""
        self._progress.end()

    def opened(self, store_id: str) -> None:
        """Note which store is there."""
        self.store_id = store_id

    def planned(self, plan: MirrorPlan) -> None:
        """Note what the mirror has, and what is waiting."""
        self._note_plan(
            {each.name: each.write_id for each in plan.present},
            {each.name: each.logical_bytes for each in plan.waiting},
            {each.snapshot.name: each.reason for each in plan.refused},
        )

    def copied(self, snapshot: CommittedSnapshot, sent_bytes: int) -> None:
        """Note that the mirror has a snapshot now."""
        self._note_copied(snapshot.name, snapshot.write_id, sent_bytes)

    def failed(self, snapshot: CommittedSnapshot, error: Exception) -> None:
        """Note that a snapshot could not be uploaded."""
        self.last_error = f"{snapshot.name}: {error}"

    def read_line(self, line: dict[str, Any]) -> None:
        """Note one line of the child, which has the same facts as the calls above."""
        if "waiting" in line:
            self._note_plan(dict(line["present"]), dict(line["waiting"]), dict(line["refused"]))
        elif "copied" in line:
            name, write_id = line["copied"]
            self._note_copied(name, write_id, line["sent"])
        elif "store" in line:
            self.opened(line["store"])
        elif "failed" in line:
            self.last_error = f"{line['failed']}: {line['reason']}"
        elif "total" in line:
            self.begin(line["task"], line["total"])
        elif "done" in line:
            self._done_bytes = line["done"]

    def _note_plan(self, present: dict[str, str], waiting: dict[str, int], refused: dict[str, str]) -> None:
        with self._lock:
            self._known, self._waiting, self._refused = present, waiting, refused
            listed = {*waiting, *refused}
            self._fresh = {
                name: each
                for name, each in self._fresh.items()
                if name not in listed and present.get(name) != each.write_id
            }

    def _note_copied(self, name: str, write_id: str, sent_bytes: int) -> None:
        with self._lock:
            self._known[name] = write_id
            self._waiting.pop(name, None)
            if name in self._fresh and self._fresh[name].write_id == write_id:
                del self._fresh[name]
            self._sent_bytes += sent_bytes
            self._task = ""
