"""Creates objects although replies may be lost: reads back what is stored, and never guesses."""

from __future__ import annotations

from typing import Final

from holdfast.digest import Buffer
from holdfast.errors import NotFound, ObjectExists, StoreError
from holdfast.objects.protocol import ObjectStore, Upload

ATTEMPTS: Final = 3


def create_settled(store: ObjectStore, key: str, data: Buffer, *, durable: bool = True) -> None:
    """Create `key`; if an object with exactly these bytes exists, an earlier attempt of ours has created it.

    `data` must be unique to the caller: it contains a random write id, or the key is random. Raises ObjectExists if
    another writer's object is there, and StoreError with fate "unknown" if reading it back failed.
    """
    for attempt in range(ATTEMPTS):
        try:
            # Locked: a collector with the exclusive lock removes every temporary file.
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
                raise ObjectExists(f"{key} was created by another process", key=key) from error
            # Nothing is there: the create failed, or the object that it met was deleted. Try again.
            if attempt + 1 == ATTEMPTS:
                raise


def commit_settled(store: ObjectStore, upload: Upload, key: str, size_bytes: int) -> None:
    """Commit an upload under a random key; if an object of that size exists after an error, the commit succeeded."""
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
    """Return the bytes of `key`, None if it is absent, b"" if its size differs and so it is another writer's."""
    try:
        if store.stat(key).size_bytes != size_bytes:
            return b""
        return store.read(key, limit_bytes=size_bytes)
    except NotFound:
        return None
    except StoreError as error:
        raise StoreError(
            f"creating {key} failed, and so did reading it back: {error}", key=key, fate="unknown"
        ) from cause
