"""A bucket on loopback (SeaweedFS), and the contestants that save a state in it and load it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, util
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.request import Request, urlopen

import obstore
import torch
from obstore.store import S3Store
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from bench.kit.states import State, make_empty
from holdfast.digest import hash_bytes
from holdfast.objects.blocks import copy_bytes
from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.cloud.place import parse_place
from holdfast.objects.disk_cache import DiskCache
from holdfast.store import Store

BUCKET: Final = "bucket"
SNAPSHOT: Final = "run/step-0"
RAW: Final = "raw obstore"
VERIFIED: Final = "raw obstore, BLAKE3 and a copy into tensors"
_PEERS: Final = Path(sys.prefix, "bucket-peers")
"""Where `make bench` installs s3fs and s3torchconnector: s3fs needs another botocore than boto3 has here."""
_REGION: Final = "us-east-1"
_THREADS: Final = 32
_PUTS: Final = 4
_CHUNK_BYTES: Final = 1 << 20
_START_S: Final = 120.0
_POLL_S: Final = 0.1
# DCP warns that it saves in a single process, which is intended.
_ONE_PROCESS: Final = "torch.distributed is disabled"


@dataclass(frozen=True, slots=True)
class BucketPeer:
    """One contestant: how it saves a state below an unused prefix, and how it loads it into new memory."""

    name: str
    save: Callable[[str, State], object]
    load: Callable[[str, State], State]
    open: Callable[[str], None] = field(default=lambda prefix: None)
    """What happens before the clock starts."""


def find_weed() -> str | None:
    """Return the path of SeaweedFS's program, or None."""
    folders = [str(Path(sys.executable).parent), str(_PEERS / "bin"), os.environ.get("PATH", "")]
    return shutil.which("weed", path=os.pathsep.join(folders))


@contextmanager
def serve_bucket(weed: str, folder: Path) -> Iterator[str]:
    """Run SeaweedFS with an empty bucket; yield its endpoint."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(8)]
        ports = [int(each.getsockname()[1]) for each in sockets]
    names = ("s3.port", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port")
    settings = dict(zip((*names, "filer.port.grpc", "s3.port.grpc"), ports, strict=True))
    settings |= {"master.volumeSizeLimitMB": 1024, "volume.max": 64}
    options = [f"-{name}={value}" for name, value in settings.items()]
    command = [weed, "-v=0", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", *options]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        endpoint = f"http://127.0.0.1:{ports[0]}"
        _wait_for_bucket(endpoint, process)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def _wait_for_bucket(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end_s:
        try:
            urlopen(Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=_START_S).close()
            return
        except (URLError, OSError):
            time.sleep(_POLL_S)
    raise RuntimeError("SeaweedFS did not start; its log is beside its files")


def make_options(endpoint: str) -> dict[str, Any]:
    """Return the settings of a client for the server."""
    return {"endpoint": endpoint, "access_key_id": "key", "secret_access_key": "secret", "region": _REGION}


def open_bucket_store(endpoint: str, prefix: str, *, cache: Path | None = None) -> Store:
    """Open a Holdfast store below a prefix of the bucket."""
    objects = CloudStore(parse_place(f"s3://{BUCKET}/{prefix}"), options=make_options(endpoint))
    objects.use_cache(None if cache is None else DiskCache(str(cache)))
    return Store(objects)


class OpenStores:
    """Opens a store before the clock starts, as the clients of the other contestants are."""

    def __init__(self, endpoint: str, *, cache: Path | None = None) -> None:
        self._endpoint = endpoint
        self._cache = cache
        self._opened: dict[str, Store] = {}

    def open(self, prefix: str) -> None:
        """Open the store below a prefix, again if it is open: a handle that has saved knows more than a new one."""
        store = open_bucket_store(self._endpoint, prefix, cache=self._cache)
        store.latest()  # the first request opens connections
        self._opened[prefix] = store

    def save(self, prefix: str, state: State) -> object:
        """Save a state."""
        return self._opened[prefix].save(SNAPSHOT, dict(state))

    def load(self, prefix: str, like: State) -> State:
        """Load what was saved."""
        found: State = self._opened[prefix].load(SNAPSHOT)
        return found


def make_holdfast(endpoint: str, *, cache: Path | None = None) -> BucketPeer:
    """Return Holdfast, with or without a local cache."""
    stores = OpenStores(endpoint, cache=cache)
    name = "Holdfast" if cache is None else "Holdfast, cached"
    return BucketPeer(name, stores.save, stores.load, stores.open)


class RawObjects:
    """The bytes of a state in objects of one size, put and read by threads of obstore alone."""

    def __init__(self, endpoint: str, data: memoryview, *, object_bytes: int, range_bytes: int) -> None:
        self.name = f"{RAW}, {object_bytes >> 20} MiB objects, {range_bytes >> 20} MiB ranges"
        self._client = S3Store(
            BUCKET, virtual_hosted_style_request=False, client_options={"allow_http": True}, **make_options(endpoint)
        )
        self._data = data
        self._parts = [(start, data[start : start + object_bytes]) for start in range(0, data.nbytes, object_bytes)]
        self._range_bytes = range_bytes

    def save(self, prefix: str) -> None:
        """Put all objects."""
        with ThreadPoolExecutor(_PUTS) as threads:
            list(threads.map(partial(self._put, prefix), self._parts))

    def load(self, prefix: str) -> list[object]:
        """Read all objects, in ranges; returns them in order."""
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(partial(self._read, prefix), self._list_ranges()))

    def load_verified(self, prefix: str) -> list[memoryview]:
        """Read all objects, hash each mebibyte and copy it into new memory: what no verified load can avoid."""
        memory = memoryview(torch.empty(self._data.nbytes, dtype=torch.uint8).numpy().data)

        def read(wanted: tuple[int, int, int]) -> None:
            start, low, size_bytes = wanted
            found = memoryview(self._read(prefix, wanted))  # type: ignore[arg-type]  # obstore's bytes
            for at in range(0, size_bytes, _CHUNK_BYTES):
                hash_bytes(found[at : at + _CHUNK_BYTES])
            copy_bytes(memory[start + low : start + low + size_bytes], found)

        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(read, self._list_ranges()))
        return [memory]

    def _list_ranges(self) -> list[tuple[int, int, int]]:
        return [
            (start, low, min(self._range_bytes, part.nbytes - low))
            for start, part in self._parts
            for low in range(0, part.nbytes, self._range_bytes)
        ]

    def _put(self, prefix: str, part: tuple[int, memoryview]) -> None:
        start, data = part
        obstore.put(self._client, f"{prefix}/{start}", data, use_multipart=False)

    def _read(self, prefix: str, wanted: tuple[int, int, int]) -> object:
        start, low, size_bytes = wanted
        return obstore.get_range(self._client, f"{prefix}/{start}", start=low, length=size_bytes)

    def is_equal(self, found: Sequence[Any]) -> bool:
        """Return whether these are the bytes that were saved."""
        at = 0
        for each in found:
            view = memoryview(each)
            if view != self._data[at : at + view.nbytes]:
                return False
            at += view.nbytes
        return at == self._data.nbytes


def find_bucket_peers(endpoint: str) -> list[BucketPeer]:
    """Return the other libraries that save to a bucket, if they are installed."""
    if _PEERS.exists() and str(_PEERS) not in sys.path:
        sys.path.append(str(_PEERS))
    makers = {"s3fs": _make_s3fs, "s3torchconnector": _make_connector}
    return [make(endpoint) for package, make in makers.items() if util.find_spec(package)]


def _make_s3fs(endpoint: str) -> BucketPeer:
    options = {"key": "key", "secret": "secret", "endpoint_url": endpoint}
    module = import_module("torch.distributed.checkpoint._fsspec_filesystem")

    def locate(prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    return _make_dcp(
        "DCP + s3fs",
        lambda prefix: module.FsspecWriter(locate(prefix), thread_count=_PUTS, **options),
        lambda prefix: module.FsspecReader(locate(prefix), **options),
    )


def _make_connector(endpoint: str) -> BucketPeer:
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "key")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "secret")
    package, dcp = import_module("s3torchconnector"), import_module("s3torchconnector.dcp")
    config = package.S3ClientConfig(force_path_style=True)
    client = import_module("s3torchconnector._s3client").S3Client(_REGION, endpoint=endpoint, s3client_config=config)

    def aim(made: Any) -> Any:
        made.fs._client = client  # the only way to pass an endpoint
        return made

    def locate(prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}/"

    return _make_dcp(
        "DCP + s3torchconnector",
        lambda prefix: aim(dcp.S3StorageWriter(_REGION, locate(prefix), config, thread_count=_PUTS)),
        lambda prefix: aim(dcp.S3StorageReader(_REGION, locate(prefix), config)),
    )


def _make_dcp(name: str, make_writer: Callable[[str], Any], make_reader: Callable[[str], Any]) -> BucketPeer:
    def save(prefix: str, state: State) -> None:
        with _quietly():
            state_dict_saver.save(dict(state), storage_writer=make_writer(prefix), no_dist=True)

    def load(prefix: str, like: State) -> State:
        found: dict[str, torch.Tensor] = dict(make_empty(like))
        with _quietly():
            state_dict_loader.load(found, storage_reader=make_reader(prefix), no_dist=True)
        return found

    return BucketPeer(name, save, load)


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ONE_PROCESS)
        yield
