"""Files are kept and restored by `put`, `get` and `open_file`; what cannot be done changes nothing."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli.main import main
from holdfast.errors import BadName, NameInUse, NotFound, SourceChanged
from holdfast.files.keep import keep_files, plan_sources
from holdfast.repo.files import plan_files
from holdfast.repo.write.writer import Request, WriteOptions, save
from tests.cli.runs import digest_tree
from tests.kit.tensor_files import NO_SAFETENSORS, write_safetensors, write_torch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of a test: a directory `data` with two files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/sub").mkdir(parents=True)
    (tmp_path / "data/config.json").write_text('{"lr": 1}')
    (tmp_path / "data/sub/vocab.txt").write_text("a b c")
    return tmp_path


@pytest.fixture
def store(folder: Path) -> holdfast.Store:
    return holdfast.open(folder / "store")


@pytest.mark.parametrize("place", ["packs/x", "new", "packs"])
def test_another_store_inside_the_store_is_refused(store: holdfast.Store, place: str) -> None:
    store.save("a", {"x": 1})

    for url in (os.path.join(store.url, place), f"file://{os.path.abspath(store.url)}/{place}"):
        with pytest.raises(BadName, match="is inside the store"):
            store.copy("a", url)
        with pytest.raises(BadName, match="is inside the store"):
            store.save("b", {"x": 1}, mirror=url)


def test_a_directory_comes_back(store: holdfast.Store, folder: Path) -> None:
    result = store.put("v1", "data", metadata={"source": "web"})
    restored = store.get("v1", folder / "out")

    assert digest_tree(folder / "out/data") == digest_tree(folder / "data")
    assert (result.name, result.logical_bytes, result.existed) == ("v1", 14, False)
    assert (restored.num_files, restored.num_bytes) == (2, 14)
    assert store.snapshot("v1").metadata == {"source": "web"}


def test_several_paths_and_path_objects_are_accepted(store: holdfast.Store, folder: Path) -> None:
    store.put("v1", [folder / "data/config.json", "data/sub"])

    store.get("v1", folder / "out")

    assert sorted(os.listdir(folder / "out")) == ["config.json", "sub"]


def test_a_part_is_restored(store: holdfast.Store, folder: Path) -> None:
    store.put("v1", "data/")

    assert store.get("v1", "out", only="*.txt").num_files == 1
    assert os.listdir(folder / "out") == ["sub"]


def test_a_store_in_memory_keeps_files(folder: Path) -> None:
    store = holdfast.open("memory://")
    store.put("v1", ".")

    store.get("v1", "out")

    assert digest_tree(folder / "out/data") == digest_tree(folder / "data")


def test_the_same_files_are_not_written_twice(store: holdfast.Store, folder: Path) -> None:
    write_torch(folder / "data/model.pt", torch.randn(700, 1000))
    first = store.put("v1", "data")

    again = store.put("v1", "data")

    assert (again.existed, again.digest) == (True, first.digest)


def test_files_that_were_cut_by_other_rules_are_still_the_same(store: holdfast.Store, folder: Path) -> None:
    """An earlier version cut all files at multiples of 1 MiB."""
    write_torch(folder / "data/model.pt", torch.randn(700, 1000))
    earlier = save(store.repository, Request("v1", plan_files(["data"])))
    fresh = store.put("v2", "data")

    again = store.put("v1", "data")

    assert (again.existed, again.digest) == (True, earlier.digest)
    assert fresh.digest != earlier.digest
    assert store.diff("v1", "v2").changes == ()


def test_other_content_under_the_name_is_refused(store: holdfast.Store, folder: Path) -> None:
    store.put("v1", "data")
    (folder / "data/config.json").write_text('{"lr": 2}')

    with pytest.raises(NameInUse, match=r"^'v1' is in use and holds other content; nothing was written\."):
        store.put("v1", "data")

    assert store.put("v1", "data", overwrite=True).generation == 1


def test_a_name_that_is_a_tag_is_refused(store: holdfast.Store) -> None:
    store.put("v1", "data")
    store.tag("best", "v1")

    with pytest.raises(NameInUse, match="'best' is a tag for 'v1'"):
        store.put("best", "data")


@pytest.mark.parametrize(
    ("paths", "error", "text"),
    [
        ("nothing", FileNotFoundError, "No such file or directory: 'nothing'"),
        ("", BadName, "an empty path names no file"),
        ([], NotFound, "there are no files in an empty list of paths; nothing was saved"),
        ("empty", NotFound, "there are no files in empty; nothing was saved"),
        (["data/config.json", "other/config.json"], BadName, "would both be the entry 'config.json'"),
        ("store", BadName, "is inside the store"),
        (".", BadName, "contains the store"),
        ("link", BadName, "is a symbolic link to the directory 'data', and such links are not followed"),
        ("broken", BadName, "which cannot be followed; fix or remove it"),
        ("pipe", BadName, "is neither a file nor a directory"),
    ],
)
def test_a_bad_path_is_one_sentence_and_saves_nothing(
    folder: Path, store: holdfast.Store, paths: str | list[str], error: type[Exception], text: str
) -> None:
    for name in ("empty", "other"):
        (folder / name).mkdir()
    (folder / "other/config.json").touch()
    (folder / "link").symlink_to("data")
    (folder / "broken").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    store.put("v1", "data")
    before = digest_tree(folder / "store")

    with pytest.raises(error) as raised:
        store.put("v2", paths)

    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert digest_tree(folder / "store") == before


@pytest.mark.parametrize("name", ["", "../x", "@own", "a//b"])
def test_a_bad_name_saves_nothing(folder: Path, store: holdfast.Store, name: str) -> None:
    with pytest.raises(BadName):
        store.put(name, "data")

    assert not (folder / "store").exists()


def test_a_file_that_changes_meanwhile_saves_nothing(
    folder: Path, store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_torch(folder / "data/model.pt", torch.randn(300, 300))
    planned = plan_sources(store.repository, "data")
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(SourceChanged, match=r"model.pt changed while it was being saved"):
        keep_files(store.repository, "v1", planned, WriteOptions(), progress=None)

    assert store.snapshots() == []


def test_existing_files_are_named_and_kept(store: holdfast.Store, folder: Path) -> None:
    store.put("v1", "data/")
    (folder / "out").mkdir()
    (folder / "out/config.json").write_text("mine")

    with pytest.raises(NameInUse, match=r"1 of 2 files exist already in .*out: config.json\. Nothing was written"):
        store.get("v1", "out")

    assert os.listdir(folder / "out") == ["config.json"]
    assert (folder / "out/config.json").read_text() == "mine"
    store.get("v1", "out", overwrite=True)
    assert json.loads((folder / "out/config.json").read_text()) == {"lr": 1}


def test_links_in_the_target_are_not_followed(store: holdfast.Store, folder: Path) -> None:
    store.put("v1", "data/")
    (folder / "precious").mkdir()
    (folder / "out").mkdir()
    (folder / "out/sub").symlink_to(folder / "precious")

    with pytest.raises(BadName, match="'sub' is a file or a symbolic link, but a directory is needed"):
        store.get("v1", "out")

    assert os.listdir(folder / "precious") == []


def test_a_target_inside_the_store_is_refused(store: holdfast.Store, folder: Path) -> None:
    store.put("v1", "data")
    before = digest_tree(folder / "store")

    with pytest.raises(BadName, match="is inside the store"):
        store.get("v1", folder / "store/out")

    assert digest_tree(folder / "store") == before


def test_a_saved_tree_has_no_files(store: holdfast.Store, folder: Path) -> None:
    store.save("tree", {"w": torch.arange(1000.0)})

    with pytest.raises(NotFound, match=r"^'tree' has no files but a saved tree; store.load\('tree'\) loads it"):
        store.get("tree", "out")

    assert not (folder / "out").exists()
    store.get("tree", "out", raw=True)
    assert (folder / "out/w").stat().st_size == 4000


def test_unknown_names_are_reported(store: holdfast.Store) -> None:
    store.put("v1", "data")

    with pytest.raises(NotFound, match="'v2'"):
        store.get("v2", "out")
    with pytest.raises(NotFound, match=r"no entry of 'v1' matches '\*\.pt'"):
        store.get("v1", "out", only="*.pt")


@pytest.mark.parametrize(
    ("path", "near"),
    [("config.json", "data/config.json"), ("data/confg.json", "data/config.json"), ("vocab.txt", "data/sub/vocab.txt")],
)
def test_an_unknown_path_suggests_a_similar_one(store: holdfast.Store, path: str, near: str) -> None:
    store.put("v1", "data")

    with pytest.raises(NotFound) as raised:
        store.open_file("v1", path)

    assert str(raised.value).startswith(f"no entry {path!r} in 'v1'; ")
    assert str(raised.value).endswith(f"; did you mean {near!r}?")


def test_libraries_read_files_from_the_store(store: holdfast.Store, folder: Path) -> None:
    state = {"w": torch.randn(700, 1000), "b": torch.zeros(3)}
    write_torch(folder / "data/model.pt", state)
    store.put("v1", "data/")

    with store.open_file("v1", "config.json") as stream:
        assert json.load(stream) == {"lr": 1}
    with store.open_file("v1", "model.pt") as stream:
        assert torch.equal(torch.load(stream)["w"], state["w"])
    with store.open_file("v1", "model.pt") as stream, zipfile.ZipFile(stream) as archive:
        assert archive.testzip() is None


def test_safetensors_reads_files_from_the_store(store: holdfast.Store, folder: Path) -> None:
    pytest.importorskip("safetensors", reason=NO_SAFETENSORS)
    from safetensors.torch import load

    state = {"w": torch.randn(700, 1000), "b": torch.zeros(3)}
    store.put("v1", write_safetensors(folder / "model.safetensors", state))

    with store.open_file("v1", "model.safetensors") as stream:
        assert torch.equal(load(stream.read())["w"], state["w"])


@pytest.mark.parametrize("write", [write_safetensors, write_torch], ids=["safetensors", "torch"])
def test_tensors_that_reuse_chunks_of_a_file_can_be_mapped(store: holdfast.Store, folder: Path, write: object) -> None:
    """The vector is so odd that the matrix after it would not be aligned, if both were stored back to back."""
    assert callable(write)
    state = {"a": torch.randn(5001), "b": torch.randn(700, 1000)}
    store.put("file", write(folder / "model", state))
    saved = store.save("tensors", state)
    again = holdfast.open(folder / "store")

    loaded = again.load("tensors", mmap=True)

    assert saved.new_bytes == 0
    assert again.statistics().mapped_entries == 2
    assert all(torch.equal(loaded[name], state[name]) and loaded[name].data_ptr() % 64 == 0 for name in state)


def test_many_small_storages_are_packed_densely(store: holdfast.Store, folder: Path) -> None:
    path = write_torch(folder / "model.pt", [torch.randn(1100) for _ in range(300)])
    store.put("file", path)

    (pack,) = (folder / "store/packs").iterdir()

    assert pack.stat().st_size < 1.1 * path.stat().st_size


def test_a_copied_file_comes_back(store: holdfast.Store, folder: Path) -> None:
    path = write_torch(folder / "model.pt", torch.randn(700, 1000))
    store.put("file", path)
    store.save("tensors", torch.load(path))

    assert main(["-s", store.url, "copy", "file", "tensors", "--to", str(folder / "other")]) == 0

    other = holdfast.open(folder / "other")
    other.get("file", "out")
    assert (folder / "out/model.pt").read_bytes() == path.read_bytes()
    assert torch.equal(other.load("tensors", mmap=True), torch.load(path))
    assert other.check(read=True) == []


def test_a_damaged_chunk_of_a_file_is_an_error(store: holdfast.Store, folder: Path) -> None:
    data = write_torch(folder / "model.pt", torch.randn(700, 1000)).read_bytes()
    store.put("v1", "model.pt")
    (pack,) = (folder / "store/packs").iterdir()
    stored = bytearray(pack.read_bytes())
    stored[stored.index(data[1_500_000:1_500_064])] ^= 1
    pack.write_bytes(stored)
    again = holdfast.open(folder / "store")

    with again.open_file("v1", "model.pt") as stream:
        assert stream.read(100_000) == data[:100_000]
        stream.seek(1_400_000)
        with pytest.raises(holdfast.DigestMismatch, match=r"'v1', entry 'model.pt'"):
            stream.read(200_000)
    with pytest.raises(holdfast.DigestMismatch):
        again.get("v1", "out")
    assert os.listdir(folder / "out") == []
