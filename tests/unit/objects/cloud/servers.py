"""Stores on the small S3 server, with retries that do not slow a test down."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.cloud.place import parse_place
from holdfast.objects.disk_cache import DiskCache
from tests.kit.s3_server import BUCKET, S3Server

QUICK: Final[dict[str, Any]] = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2), "base": 2},
}


def open_cloud(server: S3Server, prefix: str = "store", *, cache: DiskCache | None = None, **more: Any) -> CloudStore:
    """Open a store below a prefix of the server's bucket, as if it were far; an option that is None is left out."""
    options = {**server.options, "retry_config": QUICK, **more.pop("options", {})}
    options = {name: value for name, value in options.items() if value is not None}
    store = CloudStore(parse_place(f"s3://{BUCKET}/{prefix}"), options=options, **more)
    store.near_s = 0.0
    store.use_cache(cache)
    return store
