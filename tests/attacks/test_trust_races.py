"""A second user swaps files between the check of a compiled graph and its use: what runs is what was checked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch._inductor.codecache as codecache
from torch._inductor import metrics
from torch._inductor.output_code import CompiledFxGraph

from holdfast.compile_cache.artifacts.artifact import describe_content, read_artifact
from holdfast.compile_cache.artifacts.catalog import list_signed
from holdfast.compile_cache.artifacts.trust import Trust, read_secret
from holdfast.compile_cache.bundle import generated, kernels
from holdfast.errors import HoldfastError
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import open_repository
from tests.kit.compile_artifacts import SECRET, find_variant, forge, make_artifact, store_artifact
from tests.kit.intruding import STRANGER
from tests.kit.saving import load_bytes, new_repo

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")

FORGED: Final = b"code of the second user"
SYSTEM_CALLS: Final = ("open", "stat", "lstat", "fstat", "readlink", "listdir", "getxattr", "preadv")


@pytest.fixture
def shared(folder: Path) -> Path:
    """A directory like /tmp: every user can create files, and only move his own."""
    made = folder / "shared"
    made.mkdir()
    made.chmod(0o1777)
    return made


@contextmanager
def acting_as_stranger() -> Iterator[None]:
    os.setegid(STRANGER)
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


class Swap:
    """Just before the n-th system call, the stranger moves his file away, and another process of the user makes one."""

    def __init__(self, place: Path, mine: Path, *, at: int) -> None:
        self.happened = False
        self._place = place
        self._mine = mine
        self._left = at

    def meet(self) -> None:
        self._left -= 1
        if self._left == -1:
            with acting_as_stranger():
                self._place.rename(self._place.with_name("aside"))
            self._mine.rename(self._place)
            self.happened = True

    def undo(self) -> None:
        if self.happened:
            self._place.rename(self._mine)
            self._place.with_name("aside").rename(self._place)


def swap_at_every_moment(
    place: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> Iterator[object]:
    """Act once for each moment at which the swap can come, as long as there is one; yield what the act returned."""
    for moment in count():
        swap = Swap(place, mine, at=moment)
        result: object = None
        with monkeypatch.context() as patch, suppress(HoldfastError):
            for name in SYSTEM_CALLS:
                patch.setattr(os, name, _before(getattr(os, name), swap.meet))
            result = act()
        yield result
        swap.undo()
        if not swap.happened:
            return


def _before(call: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    def first(*args: Any, **kwargs: Any) -> Any:
        act()
        return call(*args, **kwargs)

    return first


def give_to_stranger(path: Path) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, STRANGER, STRANGER)


def forge_store(path: Path, mine: Path, *, mac: str) -> None:
    """Make a store of the stranger whose only record has the same key as that of the user's store."""
    repo = new_repo(LocalStore(mine))
    found = store_artifact(repo)
    assert found.snapshot is not None
    entries = load_bytes(repo, found.name) | {"graph": FORGED}
    metadata = dict(found.snapshot.metadata)
    _, content = describe_content(found.key_digest, list_signed(metadata), entries)
    forge(new_repo(LocalStore(path)), found.name, entries, metadata | {"content": content, "mac": mac})
    give_to_stranger(path)


@pytest.mark.parametrize(("mac", "secret"), [("", None), ("", SECRET), ("ab" * 32, SECRET), ("ab" * 32, None)])
def test_a_store_that_is_swapped_while_a_graph_is_read_gives_no_code_of_the_stranger(
    folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, mac: str, secret: bytes | None
) -> None:
    forge_store(shared / "store", folder / "mine", mac=mac)

    def read() -> bytes:
        repo = open_repository(LocalStore(shared / "store"))
        return bytes(read_artifact(repo, find_variant(repo), trust=Trust(secret=secret)).graph)

    found = set(swap_at_every_moment(shared / "store", folder / "mine", monkeypatch, read))

    assert found == {None, make_artifact().graph}


def test_a_key_file_that_is_swapped_while_it_is_read_gives_no_key_of_the_stranger(
    folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, letter in ((folder / "mine", "a"), (shared / "key", "b")):
        path.write_text(letter * 64)
        path.chmod(0o600)
    right = read_secret(folder / "mine")
    give_to_stranger(shared / "key")

    found = set(swap_at_every_moment(shared / "key", folder / "mine", monkeypatch, lambda: read_secret(shared / "key")))

    assert found == {None, right}


def test_a_library_that_the_stranger_swaps_before_it_is_loaded_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)  # a directory for temporary files without the sticky bit
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "open"))

    def load(path: str, name: str) -> bytes:
        with acting_as_stranger():
            (made,) = (folder / "open").iterdir()
            made.rename(made.with_name("aside"))
            made.mkdir()
            (made / f"{name}.so").write_bytes(FORGED)
        return Path(path).read_bytes()

    assert kernels._load_library(SimpleNamespace(_load_library=load), b"library") == b"library"


@pytest.mark.parametrize("has_compiler", [False, True])
def test_code_that_the_stranger_left_in_torchs_cache_directory_is_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, has_compiler: bool
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    monkeypatch.setattr(generated, "_needs_compiler", lambda _: has_compiler)
    graph: Any = CompiledFxGraph.__new__(CompiledFxGraph)
    graph.source_code, graph.cache_key, graph.cache_linemap = "def call(args):\n    return 1\n", "fabcd", []
    graph._triton_bundle, graph.counter_deltas, graph.runnable_graph_str = None, {}, ""
    graph.inductor_post_grad_graph_str = graph.inductor_provenance_mapping_str = ""
    graph.inductor_provenance_stack_traces_str = ""
    graph.metrics_deltas = metrics.CachedMetricsHelper().get_deltas()
    constants: Any = SimpleNamespace(unwrap=lambda _: None)
    _, written = codecache.PyCodeCache.write(graph.source_code)
    for path in (Path(written), Path(codecache.get_path(graph.cache_key, "py")[2])):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def call(args):\n    return 'code of the second user'\n")
        os.chown(path, STRANGER, STRANGER)

    with generated.running_without_compiler():
        codecache.FxGraphCache.cache_hit_post_compile(graph, {}, constants)

    assert graph.current_callable([]) == 1
