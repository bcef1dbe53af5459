"""Parses the URLs of object stores: scheme, bucket and prefix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, cast

from holdfast.errors import BadName
from holdfast.texts import mask_url

CloudScheme = Literal["s3", "gs", "az"]

_URL: Final = re.compile(r"(s3|gs|az)://([^/]*)(/.*)?\Z", re.IGNORECASE | re.DOTALL)
# What S3, GCS and Azure all accept, and underscores and upper case, which old buckets have.
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}\Z")
# Characters that every server keeps as they are, in an address and in a signature.
_COMPONENT: Final = re.compile(r"[A-Za-z0-9!_.*'()=@+,-]+\Z")
_MAX_PREFIX_BYTES: Final = 480


@dataclass(frozen=True, slots=True)
class CloudPlace:
    """Where in which service a store is."""

    scheme: CloudScheme
    bucket: str
    """The bucket; a container in Azure."""
    prefix: str
    """What all keys of the store start with, without slashes at its ends; empty for a whole bucket."""

    def __str__(self) -> str:
        """Return the URL."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def parse_place(url: str) -> CloudPlace:
    """Parse `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`; raises BadName."""
    found, shown = _URL.match(url), mask_url(url)[:200]
    if not found:
        raise BadName(f"{shown!r} is not the URL of an object store; one looks like s3://bucket/prefix")
    if not _BUCKET.match(found[2]):
        raise BadName(
            f"{shown!r} names no bucket that can exist: after '://' comes the name of the bucket, 3 to 222 letters,"
            " digits, dots, hyphens or underscores"
        )
    prefix = (found[3] or "").strip("/")
    if prefix and not _is_prefix(prefix):
        raise BadName(
            f"the prefix of {shown!r} is refused: components of letters, digits and ! _ . * ' ( ) = @ + , - joined"
            f" by single slashes, none of them '.' or '..', at most {_MAX_PREFIX_BYTES} bytes together"
        )
    return CloudPlace(cast("CloudScheme", found[1].lower()), found[2], prefix)


def _is_prefix(prefix: str) -> bool:
    parts = prefix.split("/")
    is_clean = all(_COMPONENT.match(part) and part not in (".", "..") for part in parts)
    return is_clean and len(prefix) <= _MAX_PREFIX_BYTES
