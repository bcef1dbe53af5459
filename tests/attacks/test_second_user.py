"""A real second user overwrites an unsigned compiled graph, through an ACL or the group; the first does not run it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from holdfast.compile_cache.artifacts.artifact import describe_content, read_artifact
from holdfast.compile_cache.artifacts.catalog import StoredVariant, iter_artifacts, list_signed
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.errors import Untrusted
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import Repository, open_repository
from tests.kit.compile_artifacts import find_variant, forge, store_artifact
from tests.kit.intruding import STRANGER, set_acl
from tests.kit.saving import load_bytes, new_repo, noise, record_key

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")

ROOT: Final = Path(__file__).parents[2]
Open = Callable[[Path], None]


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.target,)


def open_by_acl(path: Path) -> None:
    set_acl(path, permissions=7 if path.is_dir() else 6)


def open_to_group(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


WAYS: Final = {"an access control list": open_by_acl, "the group": open_to_group}


def plant_bomb(repo: Repository, found: StoredVariant, folder: Path, way: Open) -> Path:
    """Let the second user replace an artifact by one that, when loaded, makes the file that is returned.

    He makes a pack and a manifest, which only digests vouch for, and writes into the record, which stays its owner's.
    """
    store, target = Path(repo.store.url), folder / "executed"
    # Bytes behind the end of a pickle are not looked at; these are too many to lie in the manifest.
    entries = load_bytes(repo, found.name) | {"graph": pickle.dumps(Bomb(target)) + noise(10_000)}
    assert found.snapshot is not None
    metadata = dict(found.snapshot.metadata)
    _, content = describe_content(found.key_digest, list_signed(metadata), entries)
    forged = new_repo(LocalStore(folder / "forged"))
    forge(forged, found.name, entries, metadata | {"content": content, "mac": ""})
    record = record_key(found.name)
    for place in ("packs", "manifests", record):
        way(store / place)
    commands = [f"cp forged/{place}/* {store}/{place}/" for place in ("packs", "manifests")]
    commands.append(f"cat forged/{record} > {store}/{record}")
    group = 0 if way is open_to_group else STRANGER
    subprocess.run(
        ["/bin/sh", "-c", " && ".join(commands)], cwd=folder, user=STRANGER, group=group, extra_groups=[], check=True
    )
    assert {path.stat().st_uid for path in (store, store / "packs", store / record)} == {0}
    return target


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_a_second_user_has_overwritten_is_not_unpickled(folder: Path, way: str) -> None:
    repo = new_repo(LocalStore(folder / "store"))
    found = store_artifact(repo)
    read_artifact(repo, found, trust=Trust())

    target = plant_bomb(repo, found, folder, WAYS[way])
    planted = find_variant(open_repository(LocalStore(folder / "store")))
    with pytest.raises(Untrusted, match=r"run `(setfacl -R -b|chmod -R g-w) "):
        pickle.loads(read_artifact(repo, planted, trust=Trust()).graph)

    assert not target.exists()


def test_the_bomb_goes_off_for_who_trusts_everything(folder: Path) -> None:
    repo = new_repo(LocalStore(folder / "store"))
    target = plant_bomb(repo, store_artifact(repo), folder, open_by_acl)
    planted = find_variant(open_repository(LocalStore(folder / "store")))

    pickle.loads(read_artifact(repo, planted, trust=Trust(everything=True)).graph)

    assert target.exists()


PROGRAM: Final = """
import sys, torch, holdfast
compiler = holdfast.open(sys.argv[1]).compiler()
print(torch.compile(lambda x: x.sin() + 1, backend=compiler)(torch.zeros(3)).tolist())
print(compiler.statistics.hit, compiler.statistics.refused)
"""


def compile_model(folder: Path) -> list[str]:
    """Compile a model in a process of its own, with the store's graphs; return its result, hits and refusals."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "store")], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(dir=folder)},
    )  # fmt: skip
    return ended.stdout.split("\n")[:2]


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiles twice, in processes of their own
@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_compiled_anew_rather_than_run_a_second_users_code(folder: Path, way: str) -> None:
    assert compile_model(folder) == ["[1.0, 1.0, 1.0]", "0 0"]
    assert compile_model(folder) == ["[1.0, 1.0, 1.0]", "1 0"]
    repo = open_repository(LocalStore(folder / "store"))
    (found,) = iter_artifacts(repo.store)

    target = plant_bomb(repo, found, folder, WAYS[way])

    ended = compile_model(folder)
    assert not target.exists()
    assert ended == ["[1.0, 1.0, 1.0]", "0 1"]
