"""The checks of `make dist` report archives that must not be released."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from release import dist

_TRACKED = ("src/holdfast/__init__.py", "src/holdfast/py.typed")
_LOG = "# Changelog\n\n## 1.2.3\n\n- something\n"
_ROOT = Path(__file__).resolve().parents[2]


def _make_archives(folder: Path, names: tuple[str, ...] = ("__init__.py", "py.typed"), text: bytes = b"") -> list[Path]:
    folder.mkdir()
    wheel, sdist = folder / "holdfast-1.2.3-py3-none-any.whl", folder / "holdfast-1.2.3.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("holdfast-1.2.3.dist-info/METADATA", "")
        for name in names:
            archive.writestr(zipfile.ZipInfo(f"holdfast/{name}"), text)
    with tarfile.open(sdist, "w:gz") as packed:
        for name in ("holdfast-1.2.3/README.md", *(f"holdfast-1.2.3/src/holdfast/{name}" for name in names)):
            packed.addfile(tarfile.TarInfo(name), io.BytesIO())
    return [wheel, sdist]


def test_archives_that_contain_the_tracked_files_are_accepted(tmp_path: Path) -> None:
    assert dist.find_content_errors(_make_archives(tmp_path / "out"), _TRACKED) == []


def test_a_file_that_an_archive_lacks_is_named(tmp_path: Path) -> None:
    problems = dist.find_content_errors(_make_archives(tmp_path / "out", ("__init__.py",)), _TRACKED)
    assert problems == [
        "holdfast-1.2.3-py3-none-any.whl lacks holdfast/py.typed",
        "holdfast-1.2.3.tar.gz lacks holdfast/py.typed",
    ]


def test_a_file_that_git_does_not_track_is_named(tmp_path: Path) -> None:
    [wheel, sdist] = _make_archives(tmp_path / "out", ("__init__.py", "py.typed", "secret.env"))
    assert dist.find_content_errors([wheel, sdist], _TRACKED) == [
        f"{archive.name} contains holdfast/secret.env, which git does not track" for archive in (wheel, sdist)
    ]


def test_equal_builds_have_no_differences(tmp_path: Path) -> None:
    first = _make_archives(tmp_path / "first")[:1]
    assert dist.find_differences(first, _make_archives(tmp_path / "second")[:1]) == []


def test_builds_that_differ_in_one_byte_are_named(tmp_path: Path) -> None:
    first, second = _make_archives(tmp_path / "first")[:1], _make_archives(tmp_path / "second", text=b"1")[:1]
    assert dist.find_differences(first, second) == ["holdfast-1.2.3-py3-none-any.whl differs between two builds"]


def test_an_archive_that_only_one_build_made_is_a_difference(tmp_path: Path) -> None:
    both = _make_archives(tmp_path / "first")
    assert dist.find_differences(both, both[:1]) == ["holdfast-1.2.3.tar.gz differs between two builds"]


def test_the_version_is_read_from_the_name_of_the_wheel(tmp_path: Path) -> None:
    assert dist.find_version(_make_archives(tmp_path / "out")) == "1.2.3"


def test_a_version_with_its_tag_and_its_section_in_the_changelog_can_be_released() -> None:
    assert dist.find_tag_errors("v1.2.3", "1.2.3", is_clean=True, changelog=_LOG) == []


@pytest.mark.parametrize(
    ("tag", "version", "is_clean", "problem"),
    [
        ("v1.2.4", "1.2.3", True, "set __version__ to '1.2.4'; it is '1.2.3'"),
        ("v1.2.3.dev0", "1.2.3.dev0", True, "'1.2.3.dev0' is not a version to release"),
        ("v1.2.4", "1.2.4", True, "CHANGELOG.md has no section '## 1.2.4'"),
        ("v1.2.3", "1.2.3", False, "commit or remove the uncommitted changes"),
    ],
)
def test_what_is_missing_for_a_release_is_named(tag: str, version: str, is_clean: bool, problem: str) -> None:
    assert problem in dist.find_tag_errors(tag, version, is_clean=is_clean, changelog=_LOG)


def test_only_the_job_that_uploads_may_ask_for_an_identity() -> None:
    workflow = (_ROOT / ".github/workflows/release.yml").read_text()
    build, publish = re.split(r"^  publish:$", workflow, flags=re.MULTILINE)
    assert "id-token: write" not in build
    assert "id-token: write" in publish


def test_the_release_workflow_contains_no_password() -> None:
    workflow = (_ROOT / ".github/workflows/release.yml").read_text()
    assert not re.search(r"secrets\.|password|token:\s*\$", workflow)
