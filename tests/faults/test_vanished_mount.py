"""A filesystem that is unmounted under an open handle: the directory below it never becomes a new store."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import StoreGone
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.upkeep.collect import collect
from holdfast.repo.write.writer import Request, save
from tests.faults.scenario import read_state, save_content

CONTENT = {"x": bytes(range(256)) * 20}


def run(*command: str) -> str:
    """Run a command; return what it complained about, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr or f"{command[0]} exited with {done.returncode}"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A directory on which a tmpfs is mounted."""
    place = tmp_path / "mount"
    place.mkdir()
    problem = run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place))
    if problem:
        pytest.skip(f"mounting is not allowed here: {problem.strip()}")
    yield place
    while os.path.ismount(place):
        assert not run("umount", "-l", str(place))


def save_to(repo: Repository, name: str) -> None:
    save(repo, Request(name, [BytesSource(entry, data) for entry, data in CONTENT.items()]))


@pytest.mark.parametrize("below", ["", "store"])
def test_a_store_on_a_filesystem_that_was_unmounted_is_not_made_anew_below_it(mount: Path, below: str) -> None:
    root = mount / below
    save_content(LocalStore(root), "a", CONTENT)
    repo = open_repository(LocalStore(root), create=True)
    save_to(repo, "b")
    assert not run("umount", "-l", str(mount))

    with pytest.raises(StoreGone, match="unmounted"):
        save_to(repo, "c")
    with pytest.raises(StoreGone):
        collect(repo.store, store_id=repo.identity.store_id)

    assert os.listdir(mount) == []


def test_a_store_that_is_hidden_by_another_mount_gets_nothing_until_it_is_seen_again(mount: Path) -> None:
    save_content(LocalStore(mount), "a", CONTENT)
    repo = open_repository(LocalStore(mount), create=True)
    problem = run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mount))
    assert not problem
    save_content(LocalStore(mount), "other", CONTENT)

    with pytest.raises(StoreGone, match="another store"):
        save_to(repo, "b")

    assert list(read_state(LocalStore(mount)).names) == ["other"]
    assert not run("umount", str(mount))
    save_to(repo, "b")
    assert sorted(read_state(LocalStore(mount)).names) == ["a", "b"]
