"""Servers of object stores on loopback, each with one empty bucket, as places where a store can be opened."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.cloud.place import parse_place
from tests.kit.gcs_server import serve_gcs
from tests.kit.patience import PATIENCE_S
from tests.kit.s3_server import BUCKET, serve_s3
from tests.servers.programs import ServerProcess, find_free_ports, require_program, running
from tests.unit.objects.cloud.servers import QUICK

_POLL_S: Final = 0.05
_ACCOUNT: Final = "devstoreaccount1"
# Published by Microsoft, and the same in every Azurite.
_ACCOUNT_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_AZURE_VERSION: Final = "2023-11-03"
_VARIABLES: Final = {
    "endpoint": "AWS_ENDPOINT_URL",
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "region": "AWS_REGION",
    "base_url": "GOOGLE_BASE_URL",
    "bearer_token": "GOOGLE_BEARER_TOKEN",
    "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
}
"""Where each option is found by a program that gets no options."""


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """The bucket of a server."""

    scheme: str
    options: dict[str, Any]
    """The storage options for it."""
    process: ServerProcess | None = None
    """The server, if it has a process of its own."""

    @property
    def environment(self) -> dict[str, str]:
        """The storage options as variables of the environment."""
        names = {**_VARIABLES, "endpoint": "AZURE_STORAGE_ENDPOINT"} if self.scheme == "az" else _VARIABLES
        return {names[name]: str(value) for name, value in self.options.items()}

    def url(self, prefix: str) -> str:
        """Return the URL of a store below a prefix."""
        return f"{self.scheme}://{BUCKET}/{prefix}"

    def open(self, prefix: str, *, read_only: bool = False, **options: Any) -> CloudStore:
        """Open an object store below a prefix, with short pauses between retries."""
        options = {**self.options, "retry_config": QUICK, **options}
        return CloudStore(parse_place(self.url(prefix)), read_only=read_only, options=options)


def make_prefix(place: Path) -> str:
    """Return a prefix for the store of the test that owns the directory `place`."""
    return "".join(c if c.isalnum() else "-" for c in f"{place.parent.name}-{place.name}")


def s3_options(endpoint: str) -> dict[str, Any]:
    """Return the storage options for an S3 server that accepts these keys."""
    return {"endpoint": endpoint, "access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}


@contextmanager
def serve_small(_folder: Path) -> Iterator[ServerPlace]:
    """Run the small S3 server."""
    with serve_s3() as server:
        yield ServerPlace("s3", server.options)


@contextmanager
def serve_small_gcs(_folder: Path) -> Iterator[ServerPlace]:
    """Run the small server for Google Cloud Storage."""
    with serve_gcs() as server:
        yield ServerPlace("gs", server.options)


@contextmanager
def serve_moto(_folder: Path) -> Iterator[ServerPlace]:
    """Run moto's S3 server in a thread."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        create_bucket(endpoint)
        yield ServerPlace("s3", s3_options(endpoint))
    finally:
        server.stop()


@contextmanager
def serve_seaweedfs(folder: Path) -> Iterator[ServerPlace]:
    """Run SeaweedFS: master, volumes, filer and S3 in one process."""
    weed = require_program("weed")
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = find_free_ports(2 * len(names))
    options = [f"-{name}={port}" for name, port in zip(names, ports, strict=False)]
    options += [f"-{name}.grpc={port}" for name, port in zip(names, ports[len(names) :], strict=True)]
    command = [
        weed, "-v=0", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", *options,
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-master.volumeSizeLimitMB=1024",
        "-volume.max=64",
    ]  # fmt: skip
    endpoint = f"http://127.0.0.1:{ports[3]}"
    with running(command, folder, endpoint) as process:
        create_bucket(endpoint)
        yield ServerPlace("s3", s3_options(endpoint), process)


@contextmanager
def serve_rclone(folder: Path) -> Iterator[ServerPlace]:
    """Run rclone's S3 server, which ignores conditions; its buckets are directories."""
    rclone = require_program("rclone")
    (port,) = find_free_ports(1)
    (folder / "buckets" / BUCKET).mkdir(parents=True)
    command = [rclone, "serve", "s3", str(folder / "buckets"), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", "key,secret", "--config", ""]
    endpoint = f"http://127.0.0.1:{port}"
    with running(command, folder, endpoint) as process:
        yield ServerPlace("s3", s3_options(endpoint), process)


@contextmanager
def serve_azurite(folder: Path) -> Iterator[ServerPlace]:
    """Run Azurite, the emulator of Azure Blob Storage."""
    azurite = require_program("azurite-blob")
    (port,) = find_free_ports(1)
    command = [azurite, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder / "blobs")]
    command += ["--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    with running(command, folder, endpoint) as process:
        _create_container(endpoint)
        options = {"account_name": _ACCOUNT, "account_key": _ACCOUNT_KEY, "endpoint": endpoint}
        yield ServerPlace("az", options, process)


Serve = Callable[[Path], AbstractContextManager[ServerPlace]]
QUICK_SERVERS: Final[dict[str, Serve]] = {"small S3": serve_small, "small GCS": serve_small_gcs, "moto": serve_moto}
"""Servers that `make test` starts."""
REAL_SERVERS: Final[dict[str, Serve]] = {"SeaweedFS": serve_seaweedfs, "Azurite": serve_azurite}
"""Servers that `make servers` installs."""
SERVERS: Final = {**QUICK_SERVERS, **REAL_SERVERS}


def create_bucket(endpoint: str) -> None:
    """Create the bucket, as soon as the server is ready for it."""
    end_s = time.monotonic() + PATIENCE_S
    # A server that has just started may not know its own disks yet.
    while (status := _put(f"{endpoint}/{BUCKET}", {})) >= 500 and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    assert status == 200, status


def _put(url: str, headers: dict[str, str]) -> int:
    try:
        with urlopen(Request(url, method="PUT", headers=headers), timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def _create_container(endpoint: str) -> None:
    """Create the container of Azurite, with a request signed by the account's key."""
    sent = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _AZURE_VERSION}
    lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in sent.items())]
    lines += [f"/{_ACCOUNT}/{_ACCOUNT}/{BUCKET}", "restype:container"]
    digest = hmac.new(base64.b64decode(_ACCOUNT_KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
    sent["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    assert _put(f"{endpoint}/{BUCKET}?restype=container", sent) == 201
