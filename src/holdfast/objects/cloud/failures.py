"""Turns errors of obstore into Holdfast's, each with a sentence that says what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from obstore import exceptions

from holdfast.errors import Fate, NotFound, ObjectExists, StoreError, StoreFull
from holdfast.texts import mask_urls

CloudAction = Literal["create", "read", "list", "delete"]
FailureCause = Literal[
    "exists",
    "absent",
    "bucket",
    "credentials",
    "permission",
    "region",
    "skew",
    "archived",
    "full",
    "foreign",
    "checksum",
    "range",
    "garbled",
    "network",
    "busy",
    "other",
]
"""What went wrong, as far as the answer of the server or its absence shows."""

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w{1,80})</Code>")
_RETRIES: Final = re.compile(r"after (\d{1,6}) retries")
_RANGE_ERROR: Final = "InvalidRangeRequest"
"""In obstore's own error for a range that begins after the end of an object."""
_GARBLED: Final = re.compile(
    r"Got invalid [\w ]*response|non-partial response|Content-Range|metadata from headers|Requested [\d.]+, got"
)
"""In obstore's texts for answers that it cannot use."""
_CAUSES_BY_CODE: Final[dict[str, FailureCause]] = {
    "NoSuchBucket": "bucket",
    "ContainerNotFound": "bucket",
    "ContainerBeingDeleted": "bucket",
    "InvalidAccessKeyId": "credentials",
    "SignatureDoesNotMatch": "credentials",
    "ExpiredToken": "credentials",
    "InvalidToken": "credentials",
    "TokenRefreshRequired": "credentials",
    "AuthenticationFailed": "credentials",
    "InvalidAuthenticationInfo": "credentials",
    "NoAuthenticationInformation": "credentials",
    "AuthorizationHeaderMalformed": "region",
    "PermanentRedirect": "region",
    "IllegalLocationConstraintException": "region",
    "RequestTimeTooSkewed": "skew",
    "InvalidObjectState": "archived",
    "BlobArchived": "archived",
    "QuotaExceeded": "full",
    "InsufficientStorage": "full",
    "XMinioStorageFull": "full",
    "BadDigest": "checksum",
    "Md5Mismatch": "checksum",
    "InvalidDigest": "checksum",
    "XAmzContentSHA256Mismatch": "checksum",
    # Another request for the same key was under way; obstore takes these for an object that exists.
    "ConditionalRequestConflict": "busy",
    "OperationAborted": "busy",
}
_CAUSES_BY_KIND: Final[tuple[tuple[tuple[type[BaseException], ...], FailureCause], ...]] = (
    ((exceptions.AlreadyExistsError, exceptions.PreconditionError), "exists"),
    ((exceptions.UnauthenticatedError,), "credentials"),
    ((exceptions.PermissionDeniedError,), "permission"),
    ((exceptions.InvalidPathError,), "foreign"),
    ((FileNotFoundError,), "absent"),
)
_CAUSES_BY_STATUS: Final[dict[int, FailureCause]] = {
    301: "region",
    401: "credentials",
    403: "permission",
    409: "busy",
    416: "range",
    429: "busy",
    507: "full",
}
_ROLE_ADDRESSES: Final = (
    "169.254.169.254",
    "169.254.170.2",
    "metadata.google.internal",
    "/computeMetadata/",
    "/latest/api/token",
    "/latest/meta-data/",
    "/metadata/identity",
)
"""Where obstore asks for the credentials of a machine if none are configured."""
_REDIRECT: Final = "without LOCATION"
"""Part of obstore's text for an answer that names another region."""
_ADVICE: Final[dict[FailureCause, str]] = {
    "bucket": "the bucket does not exist: check the URL, or create the bucket",
    "credentials": (
        "the credentials are missing, wrong or expired: set those of your provider in the environment (an AWS profile"
        " needs boto3), or pass storage_options"
    ),
    "permission": "the credentials do not allow this: the store needs to list, read, write and delete below its prefix",
    "network": "the server did not answer: check the network and the endpoint, then try again",
    "busy": "the server is overloaded or failing: try again later",
    "region": "the bucket is in another region: set AWS_REGION, or pass storage_options={'region': ...}",
    "skew": "the clock of this host is wrong by many minutes, so the server refuses its signatures: set the clock",
    "archived": "a lifecycle rule has moved the object to an archive: restore it, and exclude the store from the rule",
    "foreign": "another program has put an object there whose name no store can have: remove that object",
    "checksum": "the bytes were changed on their way to the server: try again, and test the network",
    "garbled": "the answer is not that of an object store: check the endpoint, and what is between it and this host",
    "full": "the server has no room left, or a quota is used up",
}
_REFUSED: Final[frozenset[FailureCause]] = frozenset(
    {"bucket", "credentials", "permission", "region", "skew", "checksum", "full", "other"}
)
"""The server has answered that it did nothing."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request that failed."""

    action: CloudAction
    key: str
    """The key, or the prefix of a listing."""
    url: str
    seconds: float
    withheld: Sequence[str] = ()
    """Names of options that the process that opened the store first did not pass on."""


def translate(error: Exception, attempt: Attempt) -> Exception:
    """Return Holdfast's error for one of obstore."""
    cause = find_cause(error)
    if cause == "exists":
        return ObjectExists(f"{attempt.key} is already in {attempt.url}", key=attempt.key)
    if cause == "absent":
        return NotFound(f"no object {attempt.key} in {attempt.url}", name=attempt.key)
    text = _describe(error, cause, attempt)
    failure = StoreFull(text, key=attempt.key) if cause == "full" else StoreError(text, key=attempt.key)
    failure.fate = _find_fate(error, cause, attempt)
    return failure


def is_cut(error: BaseException) -> bool:
    """Return whether the connection of a request was cut, and obstore has not made the request again."""
    return find_cause(error) == "network" and _count_tries(str(error)) == 1


def find_cause(error: BaseException) -> FailureCause:
    """Return what an error of obstore means."""
    text = str(error)
    if _RANGE_ERROR in text:
        return "range"
    if any(address in text for address in _ROLE_ADDRESSES):
        return "credentials"
    by_code = _CAUSES_BY_CODE.get(_find_code(text))
    return by_code or _find_cause_by_kind(error) or _find_cause_by_status(text)


def _describe(error: Exception, cause: FailureCause, attempt: Attempt) -> str:
    where = f"{attempt.url}/{attempt.key}" if attempt.key else attempt.url
    reason = _ADVICE.get(cause, "the server refused the request")
    if cause == "credentials" and attempt.withheld:
        reason += f"; {', '.join(attempt.withheld)} of storage_options are not sent to other processes"
    tries = _count_tries(str(error))
    spent = f"{tries} {'try' if tries == 1 else 'tries'} in {attempt.seconds:.1f} s"
    return f"cannot {attempt.action} {where}: {reason} ({spent}; {_shorten(str(error))})"


def _find_fate(error: Exception, cause: FailureCause, attempt: Attempt) -> Fate:
    """Return what is known about the object: only the answer to a first try tells that nothing was written."""
    is_known = cause in _REFUSED and _count_tries(str(error)) == 1
    return "absent" if attempt.action != "create" or is_known else "unknown"


def _find_cause_by_kind(error: BaseException) -> FailureCause | None:
    return next((cause for kinds, cause in _CAUSES_BY_KIND if isinstance(error, kinds)), None)


def _find_cause_by_status(text: str) -> FailureCause:
    found = _STATUS.search(text)
    if found is None:
        return "region" if _REDIRECT in text else "garbled" if _GARBLED.search(text) else "network"
    status = int(found[1])
    return _CAUSES_BY_STATUS.get(status) or ("busy" if status >= 500 else "other")


def _find_code(text: str) -> str:
    found = _CODE.search(text)
    return found[1] if found else ""


def _count_tries(text: str) -> int:
    found = _RETRIES.search(text)
    return int(found[1]) + 1 if found else 1


def _shorten(text: str) -> str:
    """Return the status and code of the answer, or the first line of obstore without passwords and query strings.

    A query string may have a signature in it, and what obstore adds for its own developers may, too.
    """
    status, code = _STATUS.search(text), _find_code(text)
    if status:
        return f"HTTP {status[1]} {code}".rstrip()
    first = text.partition("\n\nDebug source")[0].split("<?xml")[0]
    plain = re.sub(r"\?[^\s]*", "", mask_urls(" ".join(first.split())))[:300].rstrip(" :")
    # A name in a listing may contain anything, also what commands a terminal.
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in plain)
