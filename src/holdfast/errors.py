"""The whole exception tree, and nothing else.

Grouped by what a handler does next::

    HoldfastError
      NotFound (KeyError)           no such name, entry or object: check the spelling, list the names
        TensorNotFound (FileNotFoundError)   the same in a content store; PyTorch raises FileNotFoundError
        ShardNotFound (ValueError)           the same for a value or shard in a state dict; PyTorch raises ValueError
        SnapshotGone                it was deleted or overwritten, and its bytes were collected: take a newer one
      BadName (ValueError)          a name or key that no store accepts: choose another
      BadExpression (ValueError)    a condition, sort key or column that cannot be parsed: correct it at `position`
      NotBisectable (ValueError)    a series without a good start and a bad end: choose another series
      TooLarge (ValueError)         more than the format allows in one snapshot or record: split it
      BadFile (ValueError)          a file to import, or a receipt, is not what it claims to be: nothing was changed
      Unsupported (TypeError)       a value that the format cannot store: convert it
      Mismatch (ValueError)         the snapshot does not fit the tree it is loaded into: nothing was changed
      OutOfMemory (MemoryError)     no memory for a second copy of the target: load without atomic=True
      AmbiguousName (LookupError)   two leaves or snapshots match: use a path, or a whole name
      SourceChanged                 the source changed while it was saved: save again
      NameInUse                     the name has other content: choose another, or overwrite=True
      NotAStore                     nothing here that Holdfast wrote: check the path, or init
        NewerFormat                 a later Holdfast wrote this: upgrade
        StoreGone                   not the store that was opened here: mount it or move it back, or open it again
      Corrupt                       bytes are not what was saved: run check, restore from a copy
        DigestMismatch              they are present and differ
        MissingChunk                they are missing
      DeviceFault (RuntimeError)    a device computed a wrong digest: restart, check the device
      Untrusted                     stored code is not trusted: sign it, or pass trust=True
      CompileCacheError             with strict: a graph could not be loaded or stored: see the text
      StoreError (OSError)          the object store refused or failed: the cause is in the text
        StoreFull                   not enough space: free some
        ReadOnlyStore (PermissionError)   writing is not allowed: use another store, or change the permissions
        ObjectExists (FileExistsError)    the object to create exists: another writer was first
      LeaseLost                     a collector ended this save: save again
      CommitUnknown                 it is not known whether the commit succeeded: check, then save again
      NotShared                     the ranks use different stores: give all of them a shared one
      RankError                     a rank failed or was lost, and all ranks raise: see `failures`

Texts name the thing and the next step; facts are attributes.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Fate = Literal["absent", "unknown", "volatile"]
"""The object after a create that raised: certainly not there; perhaps there; there, but perhaps not durable."""


class HoldfastError(Exception):
    """Base class of all errors that Holdfast raises on purpose."""

    overwritten: tuple[str, ...] = ()
    """After `load_into`: the leaves and objects of the target that the failed call has changed."""
    partly_written: tuple[str, ...] = ()
    """Those of `overwritten` that may mix old and new values."""


class NotFound(HoldfastError, KeyError):
    """No such snapshot, entry, tag or object."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name

    # KeyError shows the repr of its argument; a sentence should be shown as one.
    __str__ = Exception.__str__


class TensorNotFound(NotFound, FileNotFoundError):
    """No tensor of that name, or storage of that digest, in a content store."""


class ShardNotFound(NotFound, ValueError):
    """No value of that name, or no shard of it at that offset, in a state dict of this rank."""


class SnapshotGone(NotFound):
    """A snapshot was deleted or overwritten since it was found, and its bytes were collected."""


class BadName(HoldfastError, ValueError):
    """A name or key that is not allowed; nothing was read or written."""


class BadExpression(HoldfastError, ValueError):
    """An expression that cannot be parsed; nothing was read. The text shows the place below its first line."""

    def __init__(self, message: str, *, expression: str = "", position: int = 0) -> None:
        super().__init__(message)
        self.expression = expression
        """The whole expression; empty if the mistake has no place in it."""
        self.position = position
        """Where the mistake is: the number of characters before it."""

    @property
    def sentence(self) -> str:
        """The first line of the text: what is wrong, without the expression."""
        return str(self).partition("\n")[0]


class NotBisectable(HoldfastError, ValueError):
    """The first snapshot of a series already fails, the last one passes, or too few could be tested."""


class TooLarge(HoldfastError, ValueError):
    """More than the format allows in one snapshot or record; nothing was written."""


class BadFile(HoldfastError, ValueError):
    """A file to be imported, or a receipt, is damaged or not what it claims to be; nothing was changed."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class Unsupported(HoldfastError, TypeError):
    """A value that cannot be saved as it is; nothing was written."""


class Mismatch(HoldfastError, ValueError):
    """A snapshot does not fit the tree it is loaded into; nothing was changed, except the leaves in `overwritten`."""

    def __init__(self, message: str, *, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems
        """One line for each mismatch."""


class OutOfMemory(HoldfastError, MemoryError):
    """There is not enough memory for a load with `atomic=True`; nothing was changed."""

    def __init__(self, message: str, *, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class AmbiguousName(HoldfastError, LookupError):
    """Two leaves of a tree have the same name: use one of `paths`, a tuple of keys. Or a glob matches two snapshots."""

    def __init__(self, message: str, *, paths: tuple[tuple[object, ...], ...] = ()) -> None:
        super().__init__(message)
        self.paths = paths


class SourceChanged(HoldfastError):
    """A source, such as a file, changed while it was being saved; nothing was committed."""


class NameInUse(HoldfastError):
    """The name already has other content, perhaps saved by another process in the meantime."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class NotAStore(HoldfastError):
    """There is no Holdfast store at this path."""


class NewerFormat(NotAStore):
    """The store uses a format or feature that this version of Holdfast does not support."""


class StoreGone(NotAStore):
    """The store that was opened is no longer at its path: nothing is there, or another store."""

    def __init__(self, message: str, *, expected_id: str = "", found_id: str = "") -> None:
        super().__init__(message)
        self.expected_id = expected_id
        self.found_id = found_id
        """The id of the store that is at the path now; empty if there is none."""


class Corrupt(HoldfastError):
    """Stored bytes are damaged; none of them was returned."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class DigestMismatch(Corrupt):
    """Stored bytes are present and differ from what was saved."""


class MissingChunk(Corrupt):
    """No intact copy of a chunk is left in the store."""


class DeviceFault(HoldfastError, RuntimeError):
    """A device returned a wrong digest of bytes that are known, so none of its digests can be trusted."""


class Untrusted(HoldfastError):
    """Stored bytes would run as code and are not trusted; none of them was loaded."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class CompileCacheError(HoldfastError):
    """The compile cache is strict and could not load or store a graph."""


class StoreError(HoldfastError, OSError):
    """The object store failed. After a failed create, `fate` says whether the object exists."""

    def __init__(self, message: str, *, key: str = "", fate: Fate = "absent", code: int | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.fate: Fate = fate
        self.errno = code

    __str__ = Exception.__str__


class StoreFull(StoreError):
    """There is not enough free space for the bytes to be written."""

    def __init__(self, message: str, *, key: str = "", needed_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message, key=key, code=errno.ENOSPC)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class ReadOnlyStore(StoreError, PermissionError):
    """The store was opened read-only, or the filesystem denies writing."""


class ObjectExists(StoreError, FileExistsError):
    """An object with that key exists already; nothing was changed."""


class LeaseLost(HoldfastError):
    """A garbage collection ended the lease of this save; nothing of it is visible."""


class CommitUnknown(HoldfastError):
    """It is not known whether the commit succeeded: the name has the old content or the new."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class NotShared(HoldfastError):
    """The ranks of one save use different stores, for example a node-local path instead of a shared one."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The error of one rank, as text: a rank never unpickles what another rank raised."""

    rank: int
    type_name: str
    message: str
    traceback_text: str = ""


class RankError(HoldfastError):
    """A collective step failed, and all ranks raise this error; `failures` has the causes.

    If `failures` is empty, this rank has lost its connection to the others.
    """

    def __init__(self, message: str, *, step: str = "", failures: Mapping[int, RankFailure] | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.failures: Mapping[int, RankFailure] = dict(failures or {})
        """The failures by rank within the group; empty if the connection between the ranks was lost."""
