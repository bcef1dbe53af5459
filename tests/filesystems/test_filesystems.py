"""The contract, the fault loop and the kill loop on real filesystems, mounted for the test or inside another kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.filesystems.machine import run_inside
from tests.filesystems.mounts import MOUNTS, mounted

ROOT: Final = Path(__file__).resolve().parents[2]
TRIALS: Final = "tests/filesystems/trials.py"
INSIDE: Final = ("vfat", "nfs3", "nfs4")
"""What the other kernel has mounted, below /mnt."""
LACKS: Final[dict[str, dict[str, Any]]] = {
    "tmpfs": {"hard_links": True, "case_sensitive": True},
    "ext4": {"hard_links": True, "case_sensitive": True},
    "xfs": {"hard_links": True, "case_sensitive": True},
    "btrfs": {"hard_links": True, "case_sensitive": True},
    "overlay": {"hard_links": True, "case_sensitive": True},
    "exfat (FUSE)": {"hard_links": False, "rename_noreplace": False, "case_sensitive": False, "network": False},
    "ntfs (FUSE)": {"hard_links": True, "network": True},
    "bindfs (FUSE)": {"hard_links": True, "case_sensitive": True, "network": True},
    "vfat": {"hard_links": False, "rename_noreplace": True, "case_sensitive": False, "time_step_s": 2.0},
    "nfs3": {"hard_links": True, "rename_noreplace": False, "network": True},
    "nfs4": {"hard_links": True, "rename_noreplace": False, "network": True},
}
"""What the table in docs/reference/filesystems.md says of each, as far as the trial can tell."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def describe_trials(place: Path) -> list[str]:
    """Return the command that runs the trials with their files in a directory."""
    options = ["-q", "-rP", "--tb=short", "-p", "no:cacheprovider", "-o", "timeout=1800"]
    return [sys.executable, "-m", "pytest", *options, f"--basetemp={place}", TRIALS]


def read_features(said: str) -> dict[str, Any]:
    (line,) = [line for line in said.splitlines() if line.startswith("features: ")]
    features: dict[str, Any] = json.loads(line.removeprefix("features: "))
    return features


def verify_passed(name: str, code: int, said: str) -> None:
    assert code == 0, said
    features = read_features(said)
    assert {key: features[key] for key in LACKS[name]} == LACKS[name]


@pytest.mark.parametrize("name", MOUNTS)
def test_a_filesystem_of_this_kernel_stands_the_trials(name: str, tmp_path: Path) -> None:
    with mounted(name, tmp_path) as point:
        ran = subprocess.run(describe_trials(point / "tmp"), cwd=ROOT, capture_output=True, text=True, check=False)

    verify_passed(name, ran.returncode, ran.stdout + ran.stderr)


@pytest.mark.parametrize("name", INSIDE)
def test_a_filesystem_of_another_kernel_stands_the_trials(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    code, said = run_inside(tmp_path, describe_trials(Path("/mnt", name, "tmp")))

    verify_passed(name, code, said)


SQUASHED: Final = """
import os, sys
import holdfast
store = holdfast.open("/mnt/squash/store")
try:
    store.save("x", {"step": 1})
except holdfast.ReadOnlyStore as error:
    print("refused:", error)
os.mkdir("/mnt/export/squash/free")
os.chmod("/mnt/export/squash/free", 0o777)
store = holdfast.open("/mnt/squash/free/store")
store.save("x", {"step": 1})
assert store.load("x") == {"step": 1}
assert store.check(read=True) == []
"""


def test_root_squash_is_a_clear_refusal_or_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    code, said = run_inside(tmp_path, [sys.executable, "-c", SQUASHED])

    assert code == 0, said
    assert "refused: cannot write" in said or "Permission denied" in said


def test_features_are_read_from_what_the_trials_say() -> None:
    said = 'x\nfeatures: {"hard_links": true, "case_sensitive": true}\n1 passed\n'
    verify_passed("ext4", 0, said)
    with pytest.raises(AssertionError):
        verify_passed("ext4", 1, said)
    with pytest.raises(AssertionError):
        verify_passed("ext4", 0, said.replace("true", "false"))
