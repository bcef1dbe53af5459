"""Learn the fate of a create whose reply was lost: look at what is there, and never guess."""

from __future__ import annotations

from typing import Final

from holdfast.digest import Buffer
from holdfast.errors import NotFound, ObjectExists, StoreError
from holdfast.objects.protocol import ObjectStore, Upload

ATTEMPTS: Final = 3


def create_settled(store: ObjectStore, key: str, data: Buffer, *, durable: bool = True) -> None:
    """Create `key`, counting an object of exactly our bytes as our own success.

    `data` must be unlike anybody else's (it holds a random write id, or the key is random). Raises
    ObjectExists if another's object is there, StoreError with fate "unknown" if that could not be learnt.
    """
    for attempt in range(ATTEMPTS):
        try:
            # Held: a collector that finds itself alone removes every temporary file.
            with store.hold(exclusive=False):
                store.create(key, data, durable=durable)
            return
        except StoreError as error:
            if not isinstance(error, ObjectExists) and error.fate != "unknown":
                raise
            found = _read_back(store, key, len(data), error)
            if found == data:
                return
            if found is not None:
                raise ObjectExists(f"{key} was created by somebody else", key=key) from error
            # Nothing is there: a create that "exists" but does not was refused in passing. Try again.
            if attempt + 1 == ATTEMPTS:
                raise


def commit_settled(store: ObjectStore, upload: Upload, key: str, size_bytes: int) -> None:
    """Commit an upload under a random key: if an object of that size is there, it is ours."""
    try:
        upload.commit()
    except StoreError as error:
        if not isinstance(error, ObjectExists) and error.fate != "unknown":
            raise
        try:
            info = store.stat(key)
        except NotFound:
            raise error from None
        if info.size_bytes != size_bytes:
            raise


def _read_back(store: ObjectStore, key: str, size_bytes: int, cause: StoreError) -> bytes | None:
    """Return what is under `key`, None if nothing; an object of another size stands for another's."""
    try:
        if store.stat(key).size_bytes != size_bytes:
            return b""
        return store.read(key, limit_bytes=size_bytes)
    except NotFound:
        return None
    except StoreError as error:
        raise StoreError(
            f"creating {key} failed and so did looking for it: {error}", key=key, fate="unknown"
        ) from cause
