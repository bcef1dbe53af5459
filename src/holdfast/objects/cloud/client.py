"""Makes obstore's client for a place: credentials from the usual sources, bounded retries."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from obstore.store import AzureStore, GCSStore, S3Store

from holdfast.errors import BadName, StoreError
from holdfast.objects.cloud.place import CloudPlace

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

RETRY_TIMEOUT_S: Final = 60.0
TIMEOUT_S: Final = 300.0
"""For one request: time enough for a pack over a slow line."""
_MAX_RETRIES: Final = 8
_KINDS: Final[dict[str, Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}


class _RuntimeUser:
    """The process that has used obstore; its threads do not exist in a child that is forked after that."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def verify_process(self, place: CloudPlace) -> None:
        """Record this process; raises StoreError in a child, where every request would wait for ever."""
        if self._pid is None:
            self._pid = os.getpid()
        if self._pid != os.getpid():
            raise StoreError(
                f"{place} cannot be used here: this process was forked by one that had used an object store, and the"
                " client library hangs in such a process; start it with the method 'spawn' or 'forkserver'"
            )


# One for the whole process, because obstore has one runtime for the whole process.
_RUNTIME: Final = _RuntimeUser()


class ClientOwner:
    """Makes the client of a store when it is first used."""

    def __init__(self, place: CloudPlace, options: Mapping[str, Any]) -> None:
        self._place = place
        self._options = dict(options)
        self._lock = threading.Lock()
        self._client: Client | None = None

    def find(self) -> Client:
        """Return the client; raises StoreError in a child that was forked after a client was used."""
        _RUNTIME.verify_process(self._place)
        with self._lock:
            if self._client is None:
                self._client = make_client(self._place, self._options)
            return self._client

    def __repr__(self) -> str:
        """Describe it without its options, which may contain secrets."""
        return f"ClientOwner({self._place})"

    def __reduce__(self) -> Any:
        """Refuse to be pickled with secrets: another process takes credentials from its own environment."""
        return ClientOwner, (self._place, {})


def make_client(place: CloudPlace, options: Mapping[str, Any]) -> Client:
    """Return a client; `options` are obstore's own settings, such as `endpoint` or `access_key_id`."""
    own = dict(options)
    # A user who gives an endpoint with http:// means it; obstore reads the endpoint from the environment by itself.
    client_options = {"timeout": timedelta(seconds=TIMEOUT_S), "allow_http": True, **own.pop("client_options", {})}
    retry = {"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S)}
    retry |= own.pop("retry_config", {})
    if place.scheme == "s3":
        own.setdefault("checksum_algorithm", "SHA256")
    try:
        client: Client = _KINDS[place.scheme](
            place.bucket, prefix=place.prefix or None, client_options=client_options, retry_config=retry, **own
        )
    except Exception as error:
        raise BadName(f"storage_options of {place} are refused: {str(error).splitlines()[0][:200]}") from error
    return client
