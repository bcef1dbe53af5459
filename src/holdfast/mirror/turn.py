"""Who uploads: a file in the local store that one uploader at a time locks, and one that keeps the last error."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Final

from holdfast.digest import hash_bytes
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.protocol import ObjectStore

_POLL_S: Final = 0.2
_NOTE_BYTES: Final = 4096
_ERROR_CHARACTERS: Final = 1000


@dataclass(frozen=True, slots=True)
class UploadNote:
    """What the last uploader left: which process it was, and the error that ended it, if there was one."""

    host: str = ""
    pid: int = 0
    time_s: float = 0.0
    error: str = ""


class UploadTurn:
    """The right to upload to one mirror. Only a local store has one: without it, two uploaders may send chunks twice.

    That is harmless, because both commit the same content, and the second finds it there.
    """

    def __init__(self, store: ObjectStore, url: str) -> None:
        """Use two files in the directory of `store`; their names begin with a dot, so they are no objects of it."""
        self._path = ""
        if isinstance(store, LocalStore):
            self._path = os.path.join(os.path.abspath(store.url), f".mirror-{hash_bytes(url.encode()).hex()[:16]}")
            self._files = PosixFiles(os.path.dirname(self._path))

    @property
    def _note_path(self) -> str:
        # Not the lock file: to release the lock is to empty that.
        return f"{self._path}.note"

    @contextmanager
    def hold(self, *, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Wait until no other process uploads; yields False if `is_stopped` returned True before."""
        handle = None
        while self._path:
            try:
                handle = self._files.lock(self._path, exclusive=True)
            except OSError:
                break  # a filesystem without locks, or one that cannot be written to
            if handle is not None or is_stopped():
                break
            time.sleep(_POLL_S)
        try:
            yield not is_stopped()
        finally:
            if handle is not None:
                self._files.unlock(handle)

    def is_held(self) -> bool:
        """Return whether a process is uploading at this moment."""
        if not self._path or not os.path.exists(self._path):
            return False
        with suppress(OSError):
            handle = self._files.lock(self._path, exclusive=True)
            if handle is None:
                return True
            self._files.unlock(handle)
        return False

    def write_note(self, error: str) -> None:
        """Keep the error of this uploader for `holdfast mirror`, or note that it had none."""
        if not self._path:
            return
        note = UploadNote(socket.gethostname(), os.getpid(), time.time(), error[:_ERROR_CHARACTERS])
        data = json.dumps(asdict(note)).encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES)
        with suppress(OSError):  # a full disk: the state of the mirror does not depend on the note
            handle = os.open(self._note_path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(handle, data, 0)
            finally:
                os.close(handle)

    def read_note(self) -> UploadNote:
        """Return what the last uploader left; an empty note if there is none."""
        with suppress(OSError, ValueError, TypeError):
            handle = os.open(self._note_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return UploadNote(**json.loads(os.pread(handle, _NOTE_BYTES, 0)))
            finally:
                os.close(handle)
        return UploadNote()
