"""Makes obstore's clients for a place: credentials from the usual sources, time limits, bounded retries."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal

from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from holdfast.errors import BadName, StoreError
from holdfast.objects.cloud.place import CloudPlace
from holdfast.objects.storage_options import StorageOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

_GIVEN: Final = ("access_key_id", "aws_access_key_id", "credential_provider", "skip_signature", "aws_skip_signature")
"""Options after which no other credentials are of use."""
_NATIVE: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Variables for which obstore finds the credentials by itself."""


def find_provider(options: Mapping[str, Any]) -> Any:
    """Return obstore's provider for the AWS profile of the user, or None if obstore finds the credentials by itself.

    The profile is `profile` of the options, else that of AWS_PROFILE, else the default one. Raises BadName if the
    options name a profile that cannot be used.
    """
    profile = options.get("profile")
    if profile is None and (any(name in options for name in _GIVEN) or any(map(os.environ.get, _NATIVE))):
        return None
    if find_spec("boto3") is None:
        if profile is not None:
            raise BadName(f"the AWS profile {profile!r} needs boto3: install it with `pip install boto3`")
        return None
    return _make_provider(profile)


def _make_provider(profile: str | None) -> Any:
    import boto3
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(boto3.Session(profile_name=profile))
    except BotoCoreError as error:  # a profile that does not exist, or cannot be parsed
        raise BadName(f"the AWS profile cannot be used: {error}") from None
    except ValueError:  # boto3 found no credentials at all
        if profile is None:
            return None
        raise BadName(f"the AWS profile {profile!r} has no credentials") from None


Load = Literal["small", "large"]
"""How much a request moves: a record or a listing, or a large part of a pack."""

LARGE_BYTES: Final = 1 << 20
"""From this size on a request is large."""
RETRY_TIMEOUT_S: Final = 60.0
"""No request is repeated later than this after it began."""
TIMEOUTS_S: Final[dict[Load, float]] = {"small": 30.0, "large": 300.0}
"""How long one attempt may take; a pack of 64 MiB within 300 s is 1.8 Mbit/s."""
_CONNECT_TIMEOUT_S: Final = 10.0
_FIRST_RETRIES: Final[dict[str, Any]] = {"max_retries": 8}
"""For a server that has not answered yet: a few seconds, because its address may be wrong."""
_LATER_RETRIES: Final[dict[str, Any]] = {
    "max_retries": 12,
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=8), "base": 3.0},
}
"""For a server that has answered before: about half a minute, because it may be restarting or overloaded."""
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
    """Makes the clients of a store when they are first used."""

    def __init__(self, place: CloudPlace, options: StorageOptions) -> None:
        self._place = place
        self.options = options
        self._lock = threading.Lock()
        self._clients: dict[tuple[Load, bool], Client] = {}
        self.has_answered = False
        """Whether the server has answered a request; from then on, failing requests are repeated for longer."""

    def find(self, load: Load = "small") -> Client:
        """Return the client for requests of a size; raises StoreError in a child of a process that used one."""
        _RUNTIME.verify_process(self._place)
        kind = (load, self.has_answered)
        with self._lock:
            if kind not in self._clients:
                self._clients[kind] = make_client(
                    self._place, self.options, timeout_s=TIMEOUTS_S[load], is_known=self.has_answered
                )
            return self._clients[kind]

    def __repr__(self) -> str:
        """Show the place and the names of the options."""
        return f"ClientOwner({self._place}, {self.options!r})"

    def __reduce__(self) -> Any:
        """Pickle the place and the options without secrets: another process has its own credentials."""
        return ClientOwner, (self._place, self.options)


def make_client(
    place: CloudPlace,
    options: StorageOptions,
    *,
    timeout_s: float,
    is_known: bool = False,
    headers: dict[str, str] | None = None,
) -> Client:
    """Return a client, which repeats requests for longer if the server `is_known`.

    Raises BadName for options that obstore does not have.
    """
    own = dict(options)
    client_options: dict[str, Any] = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S),
        # A user who gives an endpoint with http:// means it; obstore reads the endpoint from the environment by itself.
        "allow_http": True,
        **own.pop("client_options", {}),
    }
    if headers:
        client_options["default_headers"] = {**client_options.get("default_headers", {}), **headers}
    retry = {"retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S), **(_LATER_RETRIES if is_known else _FIRST_RETRIES)}
    retry |= own.pop("retry_config", {})
    if place.scheme == "s3":
        own.setdefault("checksum_algorithm", "SHA256")
        own["credential_provider"] = find_provider(own) or own.pop("credential_provider", None)
        own.pop("profile", None)
    try:
        client: Client = _KINDS[place.scheme](
            place.bucket, prefix=place.prefix or None, client_options=client_options, retry_config=retry, **own
        )
        return client
    except (exceptions.BaseError, TypeError, ValueError) as error:
        why = _explain(error, options)
    # Raised here, so that the error of obstore is not its context: that may quote a secret.
    raise BadName(f"storage_options of {place} are refused: {why}")


def _explain(error: Exception, options: StorageOptions) -> str:
    text = (str(error).splitlines() or [""])[0][:200]
    for secret in options.find_secrets():
        text = text.replace(secret, "***") if secret else text
    return text
