"""A symbolic link in a folder to import or save brings no file from elsewhere into the store, at any moment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final

import pytest
from safetensors.torch import save_file

import holdfast
from attacks.source_links import FOLDERS, OUTSIDE, SECRET, build, build_hub_cache, iter_places, lead_outside
from holdfast.cli.main import main
from holdfast.errors import BadFile, BadName, HoldfastError
from holdfast.objects.memory import MemoryStore
from holdfast.repo.read.reader import open_snapshot
from tests.attacks.test_link_races import Swap, watch_calls
from tests.cli.runs import digest_tree

VERBS: Final = ("import", "put")


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    store = holdfast.open(tmp_path / "store")
    store.save("good", {"x": 1})
    return store


def _take_in(store: holdfast.Store, verb: str, folder: Path, *, follow_links: bool = False) -> bytes:
    """Import or save a folder, and return the digest of the snapshot."""
    if verb == "import":
        return store.import_(folder, "m", follow_links=follow_links).saved.digest
    return store.put("m", f"{folder}/", follow_links=follow_links).digest


def _iter_linked(kind: str, way: str, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a folder for each file and directory of a format, with a link in its place, and the place."""
    sound = build(kind, tmp_path / "sound")
    for number, place in enumerate(iter_places(sound)):
        folder = tmp_path / str(number) / "given"
        shutil.copytree(sound, folder)
        lead_outside(folder / place.relative_to(sound), way)
        yield folder, place


def _list_files(store: holdfast.Store) -> list[str]:
    with open_snapshot(store.repository, store["m"].record) as reader:
        return list(reader.manifest.names)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("way", OUTSIDE)
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_link_that_leads_outside_is_refused_by_name_wherever_it_is(
    kind: str, way: str, verb: str, store: holdfast.Store, tmp_path: Path
) -> None:
    before = digest_tree(tmp_path / "store")
    for folder, place in _iter_linked(kind, way, tmp_path):
        with pytest.raises(BadName, match="symbolic link") as caught:
            _take_in(store, verb, folder)

        assert str(folder) in str(caught.value), place
        assert "follow_links=True" in str(caught.value), place
    assert digest_tree(tmp_path / "store") == before


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("way", OUTSIDE[:3])
@pytest.mark.parametrize("kind", FOLDERS)
def test_links_that_the_user_allows_are_followed_wherever_they_are(
    kind: str, way: str, verb: str, store: holdfast.Store, tmp_path: Path
) -> None:
    for folder, place in _iter_linked(kind, way, tmp_path):
        expected = _take_in(store, verb, tmp_path / "sound")
        store.delete("m")

        assert _take_in(store, verb, folder, follow_links=True) == expected, place
        if verb == "import":
            assert store.verify_import(folder, "m", follow_links=True) == []
            with pytest.raises(BadName, match="follow_links=True"):
                store.verify_import(folder, "m")
        store.delete("m")


def test_the_command_line_refuses_a_link_and_follows_it_if_told(
    store: holdfast.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build("save_pretrained", tmp_path / "given")
    (tmp_path / "key").write_bytes(SECRET)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "key")
    for command in (["import", str(folder), "m"], ["put", "p", str(folder)]):
        assert main(["-s", store.url, *command]) == 2
        assert f"{folder}/config.json" in capsys.readouterr().err
        assert main(["-s", store.url, *command, "--follow-links"]) == 0
        capsys.readouterr()
    verify = ["-s", store.url, "verify-import", str(folder), "--against", "m"]
    assert main(verify) == 2
    assert main([*verify, "--follow-links"]) == 0
    with store.open_file("m", "config.json") as file:
        assert file.read() == SECRET


@pytest.mark.parametrize("verb", VERBS)
def test_a_snapshot_in_the_cache_of_the_hub_is_taken_in_as_if_it_had_no_links(
    verb: str, store: holdfast.Store, tmp_path: Path
) -> None:
    snapshot = build_hub_cache(tmp_path / "hub")
    plain = tmp_path / "plain"
    (plain / "sub").mkdir(parents=True)
    for path in snapshot.rglob("*.*"):
        (plain / path.relative_to(snapshot)).write_bytes(path.read_bytes())
    expected = _take_in(store, verb, plain)
    (tmp_path / "alias").symlink_to(snapshot)

    for folder in (snapshot, tmp_path / "alias"):
        store.delete("m")
        assert _take_in(store, verb, folder) == expected
    assert {"config.json", "sub/more.json"} <= {*_list_files(store)}
    store.put("part", f"{snapshot}/sub/")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("way", ["blobs", "a blob", "another model", "no model"])
def test_a_forged_cache_of_the_hub_leads_nowhere(verb: str, way: str, store: holdfast.Store, tmp_path: Path) -> None:
    snapshot = build_hub_cache(tmp_path / "hub")
    model = snapshot.parents[1]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config").write_bytes(SECRET)
    if way == "blobs":
        (model / "blobs").rename(tmp_path / "old")
        save_file({}, elsewhere / "weights")
        (model / "blobs").symlink_to(elsewhere)
    elif way == "a blob":
        (model / "blobs" / "config").unlink()
        (model / "blobs" / "config").symlink_to(elsewhere / "config")
    elif way == "another model":
        (model.parent / "models--org--private" / "blobs").mkdir(parents=True)
        (model.parent / "models--org--private" / "blobs" / "config").write_bytes(SECRET)
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to("../../../models--org--private/blobs/config")
    else:
        model.rename(model.with_name("org--name"))
        snapshot = model.with_name("org--name") / "snapshots" / snapshot.name

    with pytest.raises(BadName, match=r"symbolic link that leads to .*follow_links=True"):
        _take_in(store, verb, snapshot)


@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "nowhere"])
@pytest.mark.parametrize("name", ["config.json", "extra.bin", "model.safetensors", "sub/x", "latest"])
def test_what_is_no_file_is_refused_and_never_waited_for(
    kind: str, name: str, store: holdfast.Store, tmp_path: Path
) -> None:
    folder = build("save_pretrained", tmp_path / "given")
    place = folder / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to({"device": "/dev/zero", "loop": place.name, "nowhere": "nothing"}[kind])

    for verb in VERBS:
        with pytest.raises((BadName, BadFile), match=place.name):
            _take_in(store, verb, folder)
    if kind in ("pipe", "device"):
        for verb in VERBS:
            with pytest.raises((BadName, BadFile), match=place.name):
                _take_in(store, verb, folder, follow_links=True)


def test_directories_that_lead_to_themselves_end_with_an_error(store: holdfast.Store, tmp_path: Path) -> None:
    folder = build("save_pretrained", tmp_path / "given")
    for number in range(12):
        (folder / "onnx" / f"link-{number}").symlink_to("..")

    for verb in VERBS:
        with pytest.raises(BadName, match="link-"):
            _take_in(store, verb, folder)
        with pytest.raises(BadName, match=r"a directory that contains it"):
            _take_in(store, verb, folder, follow_links=True)


def test_a_link_to_a_directory_that_has_the_store_is_refused_even_if_links_are_followed(
    store: holdfast.Store, tmp_path: Path
) -> None:
    folder = build("save_pretrained", tmp_path / "given")
    (folder / "onnx" / "back").symlink_to(tmp_path / "store" / "packs")

    with pytest.raises(BadName, match=r"is inside the store"):
        _take_in(store, "put", folder, follow_links=True)


# --- check and use


def _iter_swaps(kind: str, verb: str, place: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Take a folder in once for each moment at which a name in it can become a link; yield whether that happened."""
    outside = build(kind, tmp_path / "outside")
    for path in outside.rglob("*.json"):
        path.write_bytes(SECRET)
    folder = build(kind, tmp_path / "given")
    for moment in count():
        store = holdfast.Store(MemoryStore())  # whose system calls are not counted
        swap = Swap(folder / place, outside / place, tmp_path / "aside", at=moment)
        with patch.context() as patched:
            watch_calls(patched, swap)
            try:
                _take_in(store, verb, folder)
            except (HoldfastError, OSError):
                pass
            finally:
                patched.undo()
        for name in _list_files(store) if "m" in store else ():
            with store.open_file("m", name) as file:
                assert SECRET not in file.read()
        swap.undo()
        yield swap.happened
        if not swap.happened:
            assert "m" in store
            return


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", ["config.json", "onnx"])
def test_a_name_that_becomes_a_link_meanwhile_brings_nothing_in(
    verb: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = list(_iter_swaps("save_pretrained", verb, place, tmp_path, monkeypatch))

    assert len(happened) > 5
    assert happened[-1] is False
