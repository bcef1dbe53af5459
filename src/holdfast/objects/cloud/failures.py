"""Turns errors of obstore into Holdfast's, each with a sentence that says what to do."""

from __future__ import annotations

import re
from typing import Final, Literal

from obstore import exceptions

from holdfast.errors import Fate, NotFound, ObjectExists, StoreError

FailureCause = Literal["exists", "absent", "bucket", "credentials", "permission", "range", "network", "busy", "other"]
"""What went wrong, as far as the answer of the server or its absence shows."""

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w{1,80})</Code>")
_CAUSES_BY_CODE: Final[dict[str, FailureCause]] = {
    "NoSuchBucket": "bucket",
    "ContainerNotFound": "bucket",
    "InvalidAccessKeyId": "credentials",
    "SignatureDoesNotMatch": "credentials",
    "ExpiredToken": "credentials",
    "InvalidToken": "credentials",
    "TokenRefreshRequired": "credentials",
    "AuthenticationFailed": "credentials",
    "InvalidAuthenticationInfo": "credentials",
    # Another request for the same key was under way; obstore takes these for an object that exists.
    "ConditionalRequestConflict": "busy",
    "OperationAborted": "busy",
}
_CAUSES_BY_KIND: Final[tuple[tuple[tuple[type[BaseException], ...], FailureCause], ...]] = (
    ((exceptions.AlreadyExistsError, exceptions.PreconditionError), "exists"),
    ((exceptions.UnauthenticatedError,), "credentials"),
    ((exceptions.PermissionDeniedError,), "permission"),
    ((FileNotFoundError,), "absent"),
)
_CAUSES_BY_STATUS: Final[dict[int, FailureCause]] = {401: "credentials", 403: "permission", 416: "range"}
_ROLE_ADDRESSES: Final = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "/metadata/identity")
"""Where obstore asks for the credentials of a machine if none are configured."""
_ADVICE: Final[dict[FailureCause, str]] = {
    "bucket": "the bucket does not exist: check the URL, or create the bucket",
    "credentials": "the credentials are missing, wrong or expired: set those of your provider, or pass storage_options",
    "permission": "the credentials do not allow this: the store needs to list, read, write and delete below its prefix",
    "network": "the server did not answer: check the network and the endpoint, then try again",
    "busy": "the server is overloaded or failing: try again later",
}


def translate(error: Exception, *, action: str, key: str, url: str, seconds: float, fate: Fate = "absent") -> Exception:
    """Return Holdfast's error for one of obstore; `fate` is that of an object whose creation got no clear answer."""
    cause = find_cause(error)
    if cause == "exists":
        return ObjectExists(f"{key} is already in {url}", key=key)
    if cause == "absent":
        return NotFound(f"no object {key} in {url}", name=key)
    reason = _ADVICE.get(cause, "the server refused the request")
    where = f"{url}/{key}" if key else url
    # A server that refuses a request has done nothing; without an answer, it may have done all of it.
    known = cause in ("bucket", "credentials", "permission", "other")
    return StoreError(
        f"cannot {action} {where}: {reason} (after {seconds:.1f} s; {_shorten(str(error))})",
        key=key,
        fate="absent" if known else fate,
    )


def find_cause(error: BaseException) -> FailureCause:
    """Return what an error of obstore means."""
    text = str(error)
    found = _CODE.search(text)
    code = found[1] if found else ""
    if any(address in text for address in _ROLE_ADDRESSES):
        return "credentials"
    return _CAUSES_BY_CODE.get(code) or _find_cause_by_kind(error) or _find_cause_by_status(_find_status(text))


def _find_cause_by_kind(error: BaseException) -> FailureCause | None:
    return next((cause for kinds, cause in _CAUSES_BY_KIND if isinstance(error, kinds)), None)


def _find_cause_by_status(status: int | None) -> FailureCause:
    if status is None:
        return "network"
    if status in (409, 429) or status >= 500:
        return "busy"
    return _CAUSES_BY_STATUS.get(status, "other")


def _find_status(text: str) -> int | None:
    found = _STATUS.search(text)
    return int(found[1]) if found else None


def _shorten(text: str) -> str:
    """Return the first line without what obstore adds for its own developers, and without query strings."""
    first = text.partition("\n\nDebug source")[0].split("<?xml")[0]
    return re.sub(r"\?[^\s]*", "", " ".join(first.split()))[:300].rstrip(" :")
