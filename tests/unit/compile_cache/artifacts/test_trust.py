"""An artifact is trusted if it is signed, if only this user can write to its store, or if the user trusts all."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest

from holdfast.compile_cache.artifacts.artifact import read_artifact
from holdfast.compile_cache.artifacts.trust import Trust, check_store_trust, open_checked, read_secret
from holdfast.errors import HoldfastError, Untrusted
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import Repository
from tests.kit.compile_artifacts import OTHER_SECRET, SECRET, find_variant, make_artifact, store_artifact
from tests.kit.hooking import Hook
from tests.kit.intruding import set_acl
from tests.kit.saving import new_repo, record_key

KEY = "3f" * 32


def check_ownership(path: str) -> str:
    """Return how another user than this one or root could have written to `path`; "" if none could."""
    with ExitStack() as handles:
        return open_checked(path, (), handles)[1]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that only this user can write to, as are those above it."""
    folder = tmp_path / "store"
    folder.mkdir(mode=0o755)
    return folder


@pytest.fixture
def repo(place: Path) -> Repository:
    """A store that only this user can write to, with an unsigned artifact."""
    mask = os.umask(0o022)
    try:
        repo = new_repo(LocalStore(place))
        store_artifact(repo)
    finally:
        os.umask(mask)
    return repo


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_CACHE_KEY", "HOLDFAST_CACHE_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_a_store_in_memory_is_trusted() -> None:
    repo = new_repo()

    assert check_store_trust(repo.store, store_artifact(repo)) == ""


def test_a_store_that_only_this_user_can_write_to_is_trusted(repo: Repository) -> None:
    assert read_artifact(repo, find_variant(repo), trust=Trust()) == make_artifact()


ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
PARTS = ["", "packs", "manifests", "snapshots", "shelf", "record"]


def find_part(repo: Repository, place: Path, below: str) -> Path:
    """Return the path of a part of the store on which the trust in its artifact rests."""
    record = place / record_key(find_variant(repo).name)
    return {"shelf": record.parent, "record": record}.get(below, place / below)


@pytest.mark.parametrize("below", PARTS)
@pytest.mark.parametrize("mode", [0o757, 0o1777])
def test_a_store_that_any_user_can_write_to_is_not_trusted(
    repo: Repository, place: Path, below: str, mode: int
) -> None:
    target = find_part(repo, place, below)
    target.chmod(mode)

    cured = f"{target} can be written by any user (mode {mode:04o}): run `chmod -R go-w {place}`"
    with pytest.raises(Untrusted, match=re.escape(cured)):
        read_artifact(repo, find_variant(repo), trust=Trust())


@pytest.mark.parametrize("below", PARTS)
def test_a_store_that_a_group_can_write_to_is_not_trusted(repo: Repository, place: Path, below: str) -> None:
    target = find_part(repo, place, below)
    target.chmod(0o775)
    gid = target.stat().st_gid

    with pytest.raises(Untrusted) as caught:
        read_artifact(repo, find_variant(repo), trust=Trust())

    cured = f"{target} can be written by its group {gid} (mode 0775): run `chmod -R g-w {place}`"
    if below == "record":
        cured += f", then `holdfast -s {place} cache clear --yes`, since others may have changed it"
    assert f"{cured}. Sign artifacts" in str(caught.value)


def test_a_record_that_others_could_change_is_named_before_the_directories_that_they_can_write_to(
    repo: Repository, place: Path
) -> None:
    find_part(repo, place, "record").chmod(0o664)
    place.chmod(0o775)

    assert check_store_trust(repo.store, find_variant(repo)).endswith("since others may have changed it")


def test_a_record_that_differs_from_the_one_that_was_read_is_not_trusted(repo: Repository) -> None:
    found = find_variant(repo)
    assert found.snapshot is not None
    other = replace(found, snapshot=replace(found.snapshot, metadata={}))

    assert check_store_trust(repo.store, other) == "its record was replaced while it was read"


def test_a_check_leaves_no_file_open(repo: Repository) -> None:
    before = os.listdir("/proc/self/fd")

    check_store_trust(repo.store, find_variant(repo))
    check_ownership("/none")

    assert os.listdir("/proc/self/fd") == before


def test_the_command_in_the_message_makes_the_store_trusted(place: Path) -> None:
    mask = os.umask(0o002)
    try:
        repo = new_repo(LocalStore(place))
        store_artifact(repo)
        place.chmod(0o775)
        doubt = check_store_trust(repo.store, find_variant(repo))
        command = doubt.partition("`")[2].partition("`")[0]
        subprocess.run(command, shell=True, check=True)

        assert check_store_trust(repo.store, find_variant(repo)) == ""
        store_artifact(repo, make_artifact("b"))
        assert check_store_trust(repo.store, find_variant(repo, "b")) == ""
    finally:
        os.umask(mask)


def test_every_writable_directory_above_is_named_with_the_command_that_fixes_it(tmp_path: Path) -> None:
    place = tmp_path / "a b/c/store"
    place.mkdir(parents=True)
    (tmp_path / "a b").chmod(0o775)
    (tmp_path / "a b/c").chmod(0o757)
    gid = place.stat().st_gid

    assert check_ownership(str(place)) == (
        f"{tmp_path}/a b can be written by its group {gid} (mode 0775): run `chmod g-w '{tmp_path}/a b'`;"
        f" {tmp_path}/a b/c can be written by any user (mode 0757): run `chmod go-w '{tmp_path}/a b/c'`"
    )


@pytest.mark.parametrize(
    ("below", "attribute"),
    [(part, ACCESS) for part in PARTS] + [(part, DEFAULT) for part in PARTS if part != "record"],
)
def test_a_store_with_an_access_control_list_is_not_trusted(
    repo: Repository, place: Path, below: str, attribute: str
) -> None:
    target = find_part(repo, place, below)
    set_acl(target, attribute, permissions=4)
    assert not target.stat().st_mode & 0o022

    doubt = check_store_trust(repo.store, find_variant(repo))

    cure = f"run `setfacl -R -b {place}`"
    if below == "record":
        cure += f", then `holdfast -s {place} cache clear --yes`, since others may have changed it"
    assert doubt == f"{target} has an access control list, which may let others write: {cure}"


@pytest.mark.parametrize("attribute", [ACCESS, DEFAULT])
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_directory_above_with_an_access_control_list_is_reported(
    tmp_path: Path, place: Path, attribute: str, mode: int
) -> None:
    tmp_path.chmod(mode)
    set_acl(tmp_path, attribute, permissions=5)

    cure = f"run `setfacl -b {tmp_path}`"
    assert check_ownership(str(place)) == f"{tmp_path} has an access control list, which may let others write: {cure}"


def test_a_list_that_only_repeats_the_mode_is_ignored(repo: Repository, place: Path) -> None:
    set_acl(place, permissions=None)

    assert check_store_trust(repo.store, find_variant(repo)) == ""


@pytest.mark.parametrize("attribute", ["system.nfs4_acl", "system.richacl"])
def test_lists_of_other_kinds_are_reported(place: Path, attribute: str, hook: Hook) -> None:
    def read(path: str, name: str) -> bytes:
        if (os.readlink(path), name) == (str(place), attribute):
            return b"list"
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)

    hook(os, "getxattr", read)

    assert check_ownership(str(place)).startswith(f"{place} has an access control list")


def test_a_list_that_cannot_be_read_is_reported(place: Path, hook: Hook) -> None:
    def read(path: str, name: str) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    hook(os, "getxattr", read)

    assert check_ownership(str(place)) == "/ cannot be checked (Input/output error)"


def test_a_store_of_another_user_is_not_trusted(repo: Repository, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = place.stat().st_uid
    monkeypatch.setattr("holdfast.compile_cache.artifacts.trust._ROOT_UID", owner + 1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 2)

    with pytest.raises(Untrusted, match=f"/ belongs to user {Path('/').stat().st_uid}"):
        read_artifact(repo, find_variant(repo), trust=Trust())


def test_a_directory_above_that_others_can_write_to_is_reported(tmp_path: Path, place: Path) -> None:
    tmp_path.chmod(0o777)

    assert check_ownership(str(place)) == (
        f"{tmp_path} can be written by any user (mode 0777): run `chmod go-w {tmp_path}`"
    )


def test_a_sticky_directory_above_is_accepted(tmp_path: Path, place: Path) -> None:
    tmp_path.chmod(0o1777)

    assert check_ownership(str(place)) == ""


def test_a_link_that_leads_through_such_a_directory_is_reported(tmp_path: Path, place: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open/inner").symlink_to(place)
    (tmp_path / "link").symlink_to("open/../open/inner")
    assert check_ownership(str(tmp_path / "link")) == ""

    (tmp_path / "open").chmod(0o777)

    assert check_ownership(str(tmp_path / "link")) == (
        f"{tmp_path}/open can be written by any user (mode 0777): run `chmod go-w {tmp_path}/open`"
    )


def test_a_link_within_a_store_is_reported(repo: Repository, place: Path) -> None:
    (place / "packs").rename(place.parent / "elsewhere")
    (place / "packs").symlink_to(place.parent / "elsewhere")

    assert check_store_trust(repo.store, find_variant(repo)) == f"{place}/packs is a link"


def test_a_link_to_a_store_is_judged_by_its_target(repo: Repository, place: Path) -> None:
    link = place.parent / "link"
    link.symlink_to(place)
    assert check_store_trust(LocalStore(link), find_variant(repo)) == ""

    place.chmod(0o1777)

    assert check_store_trust(LocalStore(link), find_variant(repo)) == (
        f"{link} can be written by any user (mode 1777): run `chmod -R go-w {place}`"
    )


def test_links_in_a_circle_and_missing_paths_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    assert "cannot be checked (too many links)" in check_ownership(str(tmp_path / "a"))
    assert "cannot be checked (No such file or directory)" in check_ownership(str(tmp_path / "none"))


def test_a_store_that_is_not_a_local_directory_is_not_trusted(repo: Repository) -> None:
    class Elsewhere:
        url = "s3://bucket"

    assert check_store_trust(Elsewhere(), find_variant(repo)) == "the store is not a local directory"  # type: ignore[arg-type]  # only its kind is looked at


@pytest.fixture
def shared(place: Path) -> Repository:
    """A store that any user can write to."""
    repo = new_repo(LocalStore(place))
    place.chmod(0o777)
    return repo


def test_a_signed_artifact_is_trusted(shared: Repository) -> None:
    found = store_artifact(shared, secret=SECRET)

    assert read_artifact(shared, found, trust=Trust(secret=SECRET)) == make_artifact()


def test_every_artifact_is_trusted_if_the_user_says_so(shared: Repository) -> None:
    assert read_artifact(shared, store_artifact(shared), trust=Trust(everything=True)) == make_artifact()


@pytest.mark.parametrize(
    ("signed_with", "checked_with", "reason"),
    [
        (None, None, "it is not signed"),
        (None, SECRET, "it is not signed"),
        (SECRET, None, "there is no key to check its signature with"),
        (SECRET, OTHER_SECRET, "its signature does not match the key"),
    ],
)
def test_the_message_of_a_refusal_names_the_reason_and_the_next_step(
    shared: Repository, place: Path, signed_with: bytes | None, checked_with: bytes | None, reason: str
) -> None:
    found = store_artifact(shared, secret=signed_with)

    with pytest.raises(Untrusted) as caught:
        read_artifact(shared, found, trust=Trust(secret=checked_with))

    assert str(caught.value) == (
        f"'{found.name}' in {place} is refused, because loading it runs its code: {reason}, and {place} can be written"
        f" by any user (mode 0777): run `chmod -R go-w {place}`. Sign artifacts with a key that all users of the store"
        " share (HOLDFAST_CACHE_KEY_FILE or key_file=), or pass trust=True if you trust everyone who can write there"
    )
    assert caught.value.name == found.name


def test_an_artifact_that_cannot_be_trusted_is_not_read(shared: Repository, hook: Hook) -> None:
    unsigned = store_artifact(shared)
    signed = store_artifact(shared, make_artifact("b"), secret=SECRET)

    hook.forbid(resolve_name("holdfast.compile_cache.artifacts.artifact"), "open_snapshot")

    for found, secret in ((unsigned, None), (unsigned, SECRET), (signed, None)):
        with pytest.raises(Untrusted):
            read_artifact(shared, found, trust=Trust(secret=secret))


def test_a_record_without_a_file_is_reported(repo: Repository) -> None:
    found = find_variant(repo)
    assert found.snapshot is not None
    later = replace(found, snapshot=replace(found.snapshot, generation=7))

    assert "cannot be checked" in check_store_trust(repo.store, later)


def test_a_secret_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    assert read_secret() is None

    secret = read_secret(file)

    assert secret is not None
    assert len(secret) == 32
    monkeypatch.setenv("HOLDFAST_CACHE_KEY", KEY)
    assert read_secret() == secret
    monkeypatch.setenv("HOLDFAST_CACHE_KEY", "another" * 8)
    assert read_secret() not in (secret, None)
    monkeypatch.setenv("HOLDFAST_CACHE_KEY_FILE", str(file))
    assert read_secret() == secret


def test_a_secret_that_is_too_short_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE_KEY", "short")

    with pytest.raises(
        HoldfastError, match=r"\$HOLDFAST_CACHE_KEY: a key has 32 to 65536 bytes, this one has 5; create"
    ):
        read_secret()


def test_a_missing_key_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match=r"cannot be read: .*/none cannot be checked .No such file or directory"):
        read_secret(tmp_path / "none")


def test_a_key_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o622)

    with pytest.raises(HoldfastError, match=r"other users could replace the key: .* can be written by any user"):
        read_secret(file)


def test_a_key_file_that_others_can_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o644)

    with caplog.at_level(logging.WARNING):
        assert read_secret(file)

    assert (
        f"the key file {file} can be read by other users, who could sign artifacts; run chmod 600 on it" in caplog.text
    )


def test_a_directory_on_a_network_filesystem_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = new_repo(LocalStore(str(tmp_path / "store")))
    found = store_artifact(repo)
    monkeypatch.setattr("holdfast.objects.local.files.PosixFiles.read_filesystem_type", lambda *_: "nfs4")
    shared = LocalStore(str(tmp_path / "store"))

    assert (
        check_store_trust(shared, found)
        == "the store is on a network filesystem, where other machines can write as any user"
    )
