"""Whatever is done beside the first save of a store finds no store, or a sound one: never a damaged one."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.errors import Corrupt, HoldfastError, StoreError
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.store import Store
from tests.cli.every_verb import IMPORTING, READING, WITH_TORCH, WRITING, make_files
from tests.faults.hooked_store import HookedStore
from tests.kit.on_disk import tmp_path  # noqa: F401 - a fixture
from tests.kit.scripted_files import Scripted

TREE: Final = {"x": 1, "y": [2, 3]}
METHODS: Final[dict[str, Callable[[Store, Path], Any]]] = {
    "__contains__": lambda store, folder: "a" in store,
    "__getitem__": lambda store, folder: store["a"],
    "__iter__": lambda store, folder: list(store),
    "__len__": lambda store, folder: len(store),
    "_repr_html_": lambda store, folder: store._repr_html_(),
    "apply_prune": lambda store, folder: store.apply_prune(store.plan_prune(keep_last=1)),
    "best": lambda store, folder: store.best("", "loss"),
    "bisect": lambda store, folder: store.bisect("", lambda snapshot: True),
    "check": lambda store, folder: store.check(),
    "check, reading": lambda store, folder: store.check(read=True),
    "copy": lambda store, folder: store.copy("a", folder / "other"),
    "delete": lambda store, folder: store.delete("b"),
    "diff": lambda store, folder: store.diff("a", "b"),
    "diff_runs": lambda store, folder: store.diff_runs("good", "bad"),
    "export": lambda store, folder: store.export("b", folder / "out"),
    "export_async": lambda store, folder: store.export_async("b", folder / "out").wait(),
    "follow": lambda store, folder: store.follow("", timeout_s=0.0).close(),
    "gc": lambda store, folder: store.gc(),
    "get": lambda store, folder: store.get("b", folder / "got"),
    "import_": lambda store, folder: store.import_(folder / "model.safetensors", "in"),
    "latest": lambda store, folder: store.latest(),
    "load": lambda store, folder: store.load("b"),
    "load_into": lambda store, folder: store.load_into("b", {"x": 0}),
    "open_file": lambda store, folder: store.open_file("b", "x"),
    "plan_prune": lambda store, folder: store.plan_prune(keep_last=1),
    "prune": lambda store, folder: store.prune(keep_last=1),
    "publish": lambda store, folder: store.publish("p", TREE),
    "put": lambda store, folder: store.put("f", folder / "model.pt"),
    "run": lambda store, folder: store.run("good"),
    "runs": lambda store, folder: store.runs(),
    "save": lambda store, folder: store.save("b", TREE),
    "save_async": lambda store, folder: store.save_async("b", TREE).wait(),
    "snapshot": lambda store, folder: store.snapshot("b"),
    "snapshots": lambda store, folder: store.snapshots(),
    "statistics": lambda store, folder: store.statistics(),
    "tag": lambda store, folder: store.tag("t", "b"),
    "tags": lambda store, folder: store.tags(),
    "untag": lambda store, folder: store.untag("t"),
    "verify_export": lambda store, folder: store.verify_export(folder / "model.safetensors", "b"),
    "verify_import": lambda store, folder: store.verify_import(folder / "model.safetensors", "b"),
}
ELSEWHERE: Final = {"close", "compiler", "manager", "mirror", "record", "repository", "serve", "url"}
"""Methods that ask the store nothing by themselves."""
CALLS: Final = ("make_directory", "create_file", "write_at", "sync_file", "rename_noreplace", "link", "sync_directory")
"""System calls of a save: the state of the directory before each of them is kept."""


def test_the_table_has_every_method_of_a_store() -> None:
    public = {name for name in dir(Store) if not name.startswith("_")}

    assert public - ELSEWHERE <= METHODS.keys()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """The current directory, with files to import."""
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.json").write_text("{}")
    return tmp_path


def _find_complaint(call: Callable[[Store, Path], Any], store: Store, folder: Path) -> str:
    """Return how a call says that the store is damaged; empty if it does not."""
    try:
        found = call(store, folder)
    except Corrupt as error:
        return repr(error)
    except (HoldfastError, ValueError, KeyError) as error:
        return str(error) if "restore" in str(error) else ""
    findings = found if isinstance(found, list) else []
    return "; ".join(str(each) for each in findings if getattr(each, "severity", "") in ("error", "warning"))


@pytest.mark.parametrize("name", METHODS)
def test_no_method_finds_damage_where_no_store_was_made_yet(name: str, folder: Path) -> None:
    for place in ("none", "empty"):
        (folder / "empty").mkdir(exist_ok=True)
        assert _find_complaint(METHODS[name], holdfast.open(folder / place), folder) == ""


def _iter_meetings(call: Callable[[Store, Path], Any], folder: Path) -> Iterator[tuple[bool, str]]:
    """Make a call once for each operation on the store before which another process makes the first save."""
    for moment in count():
        objects = MemoryStore()
        left = [moment]

        def meet(_name: str, _key: str, left: list[int] = left, objects: MemoryStore = objects) -> None:
            left[0] -= 1
            if left[0] == -1:
                Store(objects).save("a", TREE)

        hooked = HookedStore(objects)
        store = Store(hooked)
        hooked.before = meet
        yield left[0] < 0, _find_complaint(call, store, folder)
        if left[0] >= 0:
            return
        for made in ("out", "got", "other"):
            shutil.rmtree(folder / made, ignore_errors=True)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"export_async", "publish"}))
def test_no_method_finds_damage_when_the_first_save_comes_at_any_moment(name: str, folder: Path) -> None:
    assert {complaint for _, complaint in _iter_meetings(METHODS[name], folder)} == {""}


def _keep_states(folder: Path) -> list[Path]:
    """Make a first save, and return a copy of the directory for each different state in which it was."""
    states: dict[tuple[str, ...], Path] = {}

    def keep() -> None:
        files = (path for path in (folder / "ckpts").rglob("*") if path.is_file())
        found = tuple(sorted(str(path.relative_to(folder)) for path in files))
        if found not in states:
            states[found] = folder / "states" / str(len(states))
            shutil.copytree(folder / "ckpts", states[found])

    (folder / "ckpts").mkdir()
    files = Scripted(before=dict.fromkeys(CALLS, keep))
    Store(LocalStore(folder / "ckpts", files=files)).save("a", TREE)
    return list(states.values())


@pytest.mark.slow
def test_no_method_finds_damage_in_any_state_of_the_first_save(folder: Path) -> None:
    states = _keep_states(folder)

    for state in states:
        for name, call in METHODS.items():
            if name != "export_async":
                shutil.copytree(state, folder / "copy")
                try:
                    store = holdfast.open(folder / "copy")
                except StoreError as error:
                    pytest.fail(f"{state}: {error}")
                assert _find_complaint(call, store, folder) == "", (name, state)
                for made in ("copy", "out", "got", "other"):
                    shutil.rmtree(folder / made, ignore_errors=True)
    assert len(states) > 4


@pytest.mark.slow
def test_no_command_finds_damage_in_any_state_of_the_first_save(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [folder / "none", *_keep_states(folder)]
    monkeypatch.setenv("HOLDFAST_STORE", str(folder / "copy"))

    for turn, state in enumerate(states):
        # Each command meets one state in three.
        for command in [*READING, *WITH_TORCH, *IMPORTING, *WRITING][turn % 3 :: 3]:
            if state.exists():
                shutil.copytree(state, folder / "copy")
            code = main(shlex.split(command))
            printed = capsys.readouterr()
            text = printed.out + printed.err
            assert code in (0, 1, 2), (command, state, text)
            for word in ("restore", "Corrupt", "damaged and", "is lost", "Traceback", "bug in Holdfast", "error: "):
                assert word not in text, (command, state, text)
            for made in ("copy", "out", "other", "elsewhere", "fresh", "fresh-2"):
                shutil.rmtree(folder / made, ignore_errors=True)
