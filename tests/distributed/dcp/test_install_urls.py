"""What the installed store does not support is left to torch's own classes: URLs, subclasses, calls after uninstall."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint import _storage_utils, filesystem

import holdfast
import holdfast.dcp
from holdfast.errors import BadName
from tests.distributed.dcp_states import dcp
from tests.kit.capabilities import find_in_torch, needs_ability, needs_torch
from tests.kit.dcp_calls import ALONE

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:fsync not supported for this stream:UserWarning"
)
TORCH_WRITER, TORCH_READER = filesystem.FileSystemWriter, filesystem.FileSystemReader
PACKAGE = "torch.distributed.checkpoint"
FSSPEC = "fsspec_filesystem" if find_in_torch(f"{PACKAGE[6:]}.fsspec_filesystem") else "_fsspec_filesystem"
LAZY = (FSSPEC, *(["hf_storage"] if find_in_torch(f"{PACKAGE[6:]}.hf_storage") else []), "format_utils")
"""Modules of torch that use the two classes and are imported when they are first needed."""


class Lazy:
    """Imports modules of torch anew, as a process that has never needed them does."""

    def forget(self) -> None:
        for name in LAZY:
            sys.modules.pop(f"{PACKAGE}.{name}", None)
            vars(dcp).pop(name, None)

    def load(self, name: str) -> Any:
        return importlib.import_module(f"{PACKAGE}.{name}")


@pytest.fixture
def lazy() -> Iterator[Lazy]:
    before = {name: sys.modules.get(f"{PACKAGE}.{name}") for name in LAZY}
    modules = Lazy()
    modules.forget()
    yield modules
    modules.forget()
    for name, module in before.items():
        if module is not None:
            sys.modules[f"{PACKAGE}.{name}"] = module
            setattr(dcp, name, module)


@pytest.fixture
def bucket() -> Iterator[Any]:
    """Yield the memory filesystem of fsspec, empty."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield memory
    memory.store.clear()
    holdfast.dcp.uninstall()


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    holdfast.dcp.uninstall()


def make_state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3,), float(value)), "step": int(value)}


def load(**where: Any) -> dict[str, Any]:
    state = make_state(0)
    dcp.load(state, **where, **ALONE)
    return {"w": state["w"].tolist(), "step": state["step"]}


URL = "memory://bucket/ckpt/step-1"
SAVED = {"w": [1, 1, 1], "step": 1}


@needs_ability("save to a filesystem in memory")
@pytest.mark.parametrize("is_imported_before", [False, True])
@pytest.mark.parametrize("store", [None, "store"])
def test_a_url_checkpoint_goes_to_its_bucket(
    lazy: Lazy, bucket: Any, tmp_path: Path, is_imported_before: bool, store: str | None
) -> None:
    if is_imported_before:
        lazy.load(FSSPEC)
    with holdfast.dcp.install(store):
        dcp.save(make_state(1), checkpoint_id=URL, **ALONE)
        found = load(checkpoint_id=URL)

    assert bucket.exists("/bucket/ckpt/step-1/.metadata")
    assert list(tmp_path.iterdir()) == []
    assert found == load(checkpoint_id=URL) == SAVED


@needs_ability("save to a filesystem in memory")
@pytest.mark.parametrize("is_imported_before", [False, True])
def test_the_fsspec_classes_are_torchs_own(lazy: Lazy, bucket: Any, tmp_path: Path, is_imported_before: bool) -> None:
    if is_imported_before:
        lazy.load(FSSPEC)
    with holdfast.dcp.install():
        module = lazy.load(FSSPEC)
        assert module.FsspecWriter.__mro__[1] is TORCH_WRITER
        assert module.FsspecReader.__mro__[1] is TORCH_READER
        assert issubclass(module.FsspecWriter, dcp.FileSystemWriter)
        assert isinstance(module.FsspecReader(URL), dcp.FileSystemReader)
        dcp.save(make_state(1), storage_writer=module.FsspecWriter(URL), **ALONE)
    dcp.save(make_state(1), storage_writer=module.FsspecWriter(URL + "-again"), **ALONE)

    assert load(storage_reader=module.FsspecReader(URL)) == SAVED
    assert load(storage_reader=module.FsspecReader(URL + "-again")) == SAVED
    assert list(tmp_path.iterdir()) == []


@needs_ability("save to a filesystem in memory")
def test_a_subclass_of_an_fsspec_class_saves_by_torchs_code(lazy: Lazy, bucket: Any) -> None:
    with holdfast.dcp.install():
        module = lazy.load(FSSPEC)

        class Writer(module.FsspecWriter):  # type: ignore[misc, name-defined]  # made at run time
            """A writer of a user."""

        dcp.save(make_state(1), storage_writer=Writer(URL), **ALONE)
        assert load(checkpoint_id=URL) == SAVED


@needs_torch("distributed.checkpoint.hf_storage")
@pytest.mark.parametrize("is_imported_before", [False, True])
def test_hugging_face_storage_inherits_from_torchs_classes(lazy: Lazy, is_imported_before: bool) -> None:
    if is_imported_before:
        lazy.load("hf_storage")
    with holdfast.dcp.install():
        module = lazy.load("hf_storage")

        assert TORCH_WRITER in module.HuggingFaceStorageWriter.__mro__
        assert TORCH_READER in module.HuggingFaceStorageReader.__mro__
        assert dcp.FileSystemWriter not in module.HuggingFaceStorageWriter.__mro__
        assert dcp.FileSystemReader not in module.HuggingFaceStorageReader.__mro__


@needs_torch("distributed.checkpoint.hf_storage")
@pytest.mark.parametrize("is_imported_before", [False, True])
def test_hugging_face_storage_writes_its_own_files(lazy: Lazy, tmp_path: Path, is_imported_before: bool) -> None:
    pytest.importorskip("safetensors")
    if is_imported_before:
        lazy.load("hf_storage")
    with holdfast.dcp.install():
        module = lazy.load("hf_storage")
        writer = module.HuggingFaceStorageWriter(str(tmp_path / "hf"))
        assert issubclass(module.HuggingFaceStorageReader, TORCH_READER)
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, **ALONE)
        state = {"w": torch.zeros(3)}
        dcp.load(state, storage_reader=module.HuggingFaceStorageReader(str(tmp_path / "hf")), **ALONE)

    assert state["w"].tolist() == [1, 1, 1]
    assert [path.suffix for path in (tmp_path / "hf").glob("*.safetensors")] == [".safetensors"]
    assert not (tmp_path / ".holdfast").exists()


def test_a_users_subclass_is_a_subclass_of_torchs_class(tmp_path: Path) -> None:
    opened: list[str] = []

    class Mixin:
        """Something else that a user inherits from."""

    with holdfast.dcp.install():

        class Writer(Mixin, dcp.FileSystemWriter):  # type: ignore[misc]  # swapped at run time
            """Overrides what only torch's class has."""

            def __init__(self, path: Path) -> None:
                super().__init__(path, thread_count=2)

            def _write_metadata(self, *args: Any, **kwargs: Any) -> None:
                opened.append("metadata")

            def finish(self, metadata: Any, results: Any) -> None:
                opened.append("finish")
                super().finish(metadata, results)

        assert Writer.__bases__ == (Mixin, TORCH_WRITER)
        assert isinstance(Writer(tmp_path / "a"), dcp.FileSystemWriter)
        dcp.save(make_state(1), storage_writer=Writer(tmp_path / "a"), **ALONE)
        assert load(checkpoint_id=tmp_path / "a") == SAVED

    assert opened == ["finish"]
    assert (tmp_path / "a" / "__0_0.distcp").is_file()
    assert not (tmp_path / ".holdfast").exists()
    assert isinstance(Writer(tmp_path / "a"), filesystem.FileSystemWriter)


def test_uninstall_leaves_torch_as_it_was(lazy: Lazy, tmp_path: Path) -> None:
    with holdfast.dcp.install():
        modules = [lazy.load(name) for name in LAZY]
        kept_writer, kept_reader = dcp.FileSystemWriter, dcp.FileSystemReader
        dcp.save(make_state(1), checkpoint_id=tmp_path / "stored", **ALONE)

    for module in (dcp, filesystem, _storage_utils, *modules):
        # An older hf_storage has neither name, because it derives its classes from those of fsspec.
        assert getattr(module, "FileSystemWriter", TORCH_WRITER) is TORCH_WRITER
        assert getattr(module, "FileSystemReader", TORCH_READER) is TORCH_READER
    # Who imported the names meanwhile gets torch's own classes from them.
    writer, reader = kept_writer(tmp_path / "own"), kept_reader(tmp_path / "own")
    assert (type(writer), type(reader)) == (TORCH_WRITER, TORCH_READER)
    assert isinstance(writer, kept_writer)
    assert isinstance(reader, kept_reader)
    dcp.save(make_state(1), storage_writer=writer, **ALONE)
    assert load(storage_reader=reader) == SAVED
    assert (tmp_path / "own" / "__0_0.distcp").is_file()


def test_installing_twice_or_uninstalling_twice_does_no_harm(tmp_path: Path) -> None:
    holdfast.dcp.uninstall()
    holdfast.dcp.install()
    holdfast.dcp.install(tmp_path / "store")
    dcp.save(make_state(1), checkpoint_id=tmp_path / "a", **ALONE)
    holdfast.dcp.uninstall()
    holdfast.dcp.uninstall()

    assert filesystem.FileSystemWriter is TORCH_WRITER
    assert len(list(holdfast.open(tmp_path / "store").snapshots())) == 1


@pytest.mark.parametrize("is_imported_before", [False, True])
def test_torchs_converters_read_the_store(lazy: Lazy, tmp_path: Path, is_imported_before: bool) -> None:
    if is_imported_before:
        lazy.load("format_utils")
    with holdfast.dcp.install():
        dcp.save(make_state(1), checkpoint_id=tmp_path / "a", **ALONE)
        lazy.load("format_utils").dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")

    assert torch.load(tmp_path / "a.pt")["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("url", [URL, "file:///nowhere/ckpt", "s3://bucket/x", "simplecache::s3://bucket/x"])
def test_torchs_file_classes_refuse_a_url_when_they_are_named(url: str, tmp_path: Path) -> None:
    with holdfast.dcp.install(tmp_path / "store"):
        assert not dcp.FileSystemWriter.validate_checkpoint_id(url)
        assert not dcp.FileSystemReader.validate_checkpoint_id(url)
        with pytest.raises(BadName, match=r"is a URL.*FsspecWriter"):
            dcp.FileSystemWriter(url)
        with pytest.raises(BadName, match=r"is a URL.*FsspecReader"):
            dcp.FileSystemReader(url)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [Path(URL), Path("s3://bucket/x")])
def test_a_url_that_pathlib_has_shortened_is_no_path_either(path: Path, tmp_path: Path) -> None:
    with holdfast.dcp.install():
        with pytest.raises(BadName, match="is a URL"):
            dcp.save(make_state(1), checkpoint_id=path, **ALONE)
        with pytest.raises(BadName, match="is a URL"):
            load(checkpoint_id=path)

    assert list(tmp_path.iterdir()) == []


def test_a_url_for_the_next_save_is_refused_where_torch_tells_all_ranks(tmp_path: Path) -> None:
    with holdfast.dcp.install():
        writer, reader = dcp.FileSystemWriter(tmp_path / "a"), dcp.FileSystemReader(tmp_path / "a")
        writer.reset(URL)
        reader.reset(URL)
        with pytest.raises(BadName, match="is a URL"):
            writer.set_up_storage_writer(True)
        with pytest.raises(BadName, match="is a URL"):
            reader.read_metadata()

    assert list(tmp_path.iterdir()) == []


class PathLike:
    """A path of another library."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


@pytest.mark.parametrize("make", [str, Path, PathLike])
def test_a_path_may_come_as_any_kind_of_path(make: Any, tmp_path: Path) -> None:
    with holdfast.dcp.install():
        dcp.save(make_state(1), checkpoint_id=make(tmp_path / "run" / "a"), **ALONE)
        assert load(checkpoint_id=make(tmp_path / "run" / "a")) == SAVED
        dcp.save(make_state(1), storage_writer=dcp.FileSystemWriter(make(tmp_path / "run" / "b")), **ALONE)
        assert load(storage_reader=dcp.FileSystemReader(make(tmp_path / "run" / "b"))) == SAVED

    assert len(list(holdfast.open(tmp_path / "run" / ".holdfast").snapshots())) == 2


def test_a_store_is_read_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holdfast.dcp.install():
        dcp.save(make_state(1), checkpoint_id=tmp_path / "a", **ALONE)
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert not TORCH_READER.validate_checkpoint_id(str(tmp_path / "a"))

        assert load(checkpoint_id=str(tmp_path / "a")) == SAVED


def test_an_installed_writer_can_be_sent_to_a_process_without_the_store(tmp_path: Path) -> None:
    with holdfast.dcp.install(tmp_path / "store"):
        data = pickle.dumps(dcp.FileSystemWriter(tmp_path / "a"))
    writer = pickle.loads(data)

    dcp.save(make_state(1), storage_writer=writer, **ALONE)
    assert len(list(holdfast.open(tmp_path / "store").snapshots())) == 1


def test_torchs_own_writer_can_be_pickled_while_a_store_is_installed(tmp_path: Path) -> None:
    own = TORCH_WRITER(tmp_path / "a")
    with holdfast.dcp.install():
        copy = pickle.loads(pickle.dumps(own))

        assert type(copy) is TORCH_WRITER
        dcp.save(make_state(1), storage_writer=copy, **ALONE)
        assert load(checkpoint_id=tmp_path / "a") == SAVED

    assert (tmp_path / "a" / "__0_0.distcp").is_file()
    assert type(pickle.loads(pickle.dumps(own))) is TORCH_WRITER


@needs_ability("save to a filesystem in memory")
@pytest.mark.slow
def test_a_fresh_process_saves_urls_to_their_bucket(tmp_path: Path) -> None:
    script = """
    import warnings
    warnings.simplefilter("ignore")
    import fsspec, os, torch
    import torch.distributed.checkpoint as dcp
    import holdfast.dcp
    holdfast.dcp.install()
    dcp.save({"w": torch.ones(3)}, checkpoint_id="memory://bucket/a")
    holdfast.dcp.uninstall()
    from torch.distributed.checkpoint.{fsspec} import FsspecReader, FsspecWriter
    dcp.save({"w": torch.ones(3)}, storage_writer=FsspecWriter("memory://bucket/b"))
    print(sorted(fsspec.filesystem("memory").ls("/bucket", detail=False)), os.listdir("."))
    """
    words = [sys.executable, "-c", textwrap.dedent(script).replace("{fsspec}", FSSPEC)]

    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)

    assert run.stdout.split("\n")[-2] == "['/bucket/a', '/bucket/b'] []"
