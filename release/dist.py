"""Build the wheel and the sdist of a commit, and check them as a user would install them.

    python release/dist.py [--tag v1.2.3]

Builds twice, from two clones of HEAD whose files have different times and permissions: the archives must be equal to
the last byte. Then checks the metadata and the contents, installs the wheel into an empty environment, and runs the
demo there. The archives and their SHA-256 sums end up in dist/.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
DIST: Final = ROOT / "dist"
PACKAGE: Final = "src/holdfast"
SUMS: Final = "SHA256SUMS"


class NotReleasable(Exception):
    """A check failed; the text says which one and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and check; print each step."""
    parser = argparse.ArgumentParser(description="Build and check the wheel and the sdist of HEAD.")
    parser.add_argument("--tag", help="the tag of the release, such as v1.2.3; checks that the version agrees with it")
    chosen = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-dist-") as scratch:
            _make_release(Path(scratch), chosen.tag)
    except NotReleasable as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    return 0


def _make_release(scratch: Path, tag: str | None) -> None:
    is_clean = not _read_git(ROOT, "status", "--porcelain")
    if not is_clean:
        print("dist: there are uncommitted changes; they are not part of the archives", flush=True)
    first, second = (_build(scratch / name) for name in ("first", "second"))
    _report("two builds are equal", find_differences(first, second))
    _report("metadata and long description", _find_metadata_errors(first))
    _report("contents", find_content_errors(first, _read_git(ROOT, "ls-files", PACKAGE).splitlines()))
    version = find_version(first)
    if tag is not None:
        _report(f"version {version} for {tag}", find_tag_errors(tag, version, is_clean=is_clean, changelog=_read_log()))
    _report("the wheel in an empty environment", _find_install_errors(scratch / "user", first, version))
    print(f"dist: wrote {', '.join(_publish(first))} to {DIST.name}/", flush=True)


def _report(check: str, problems: Sequence[str]) -> None:
    if problems:
        raise NotReleasable(f"{check}: " + "; ".join(problems))
    print(f"dist: ok: {check}", flush=True)


def _build(folder: Path) -> list[Path]:
    """Clone HEAD into a new folder, and return the archives that are built from the clone."""
    source, out = folder / "source", folder / "out"
    _run(["git", "clone", "--quiet", str(ROOT), str(source)])
    _run(["git", "checkout", "--quiet", "--detach", _read_git(ROOT, "rev-parse", "HEAD")], cwd=source)
    if folder.name == "second":
        _disturb(source)
    time_s = _read_git(ROOT, "log", "-1", "--format=%ct")
    _run([sys.executable, "-m", "build", "--outdir", str(out), str(source)], SOURCE_DATE_EPOCH=time_s)
    return sorted(out.iterdir())


def _disturb(source: Path) -> None:
    """Change what a checkout on another machine may have otherwise: times and permissions of files."""
    for number, path in enumerate(sorted(source.rglob("*"))):
        if path.is_file() and ".git" not in path.parts:
            path.chmod(0o600)
            os.utime(path, (number * 86_400, number * 86_400))


def find_differences(first: Iterable[Path], second: Iterable[Path]) -> list[str]:
    """Return the names of the archives that are not the same bytes in both builds."""
    sums = [{path.name: _hash(path) for path in build} for build in (first, second)]
    names = sorted(sums[0].keys() | sums[1].keys())
    return [f"{name} differs between two builds" for name in names if sums[0].get(name) != sums[1].get(name)]


def find_content_errors(archives: Iterable[Path], tracked: Iterable[str]) -> list[str]:
    """Return which files of the package an archive lacks, and which it contains although git does not track them."""
    wanted = {name.removeprefix("src/") for name in tracked}
    problems = []
    for archive in archives:
        found = set(_list_package_files(archive))
        problems += [f"{archive.name} lacks {name}" for name in sorted(wanted - found)]
        problems += [f"{archive.name} contains {name}, which git does not track" for name in sorted(found - wanted)]
    return problems


def _list_package_files(archive: Path) -> list[str]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return [name for name in wheel.namelist() if name.startswith("holdfast/")]
    with tarfile.open(archive) as sdist:
        inside = (name.partition("/src/")[2] for name in sdist.getnames())
        return [name for name in inside if name]


def find_version(archives: Iterable[Path]) -> str:
    """Return the version in the names of the archives."""
    [wheel] = [path for path in archives if path.suffix == ".whl"]
    return wheel.name.split("-")[1]


def find_tag_errors(tag: str, version: str, *, is_clean: bool, changelog: str) -> list[str]:
    """Return why a version cannot be released under a tag."""
    problems = [] if tag == f"v{version}" else [f"set __version__ to {tag.removeprefix('v')!r}; it is {version!r}"]
    if not re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?", version):
        problems.append(f"{version!r} is not a version to release")
    if f"## {version}\n" not in changelog:
        problems.append(f"CHANGELOG.md has no section '## {version}'")
    return problems if is_clean else [*problems, "commit or remove the uncommitted changes"]


def _read_log() -> str:
    return (ROOT / "CHANGELOG.md").read_text()


def _find_metadata_errors(archives: Sequence[Path]) -> list[str]:
    checked = _try([sys.executable, "-m", "twine", "check", "--strict", *map(str, archives)])
    return [] if checked.returncode == 0 else [checked.stdout.strip() or checked.stderr.strip()]


def _find_install_errors(folder: Path, archives: Sequence[Path], version: str) -> list[str]:
    """Return what goes wrong for a user who installs the wheel and nothing else."""
    venv.create(folder, with_pip=True)
    python, command = folder / "bin" / "python", folder / "bin" / "holdfast"
    [wheel] = [path for path in archives if path.suffix == ".whl"]
    _run([str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", str(wheel)])
    said = _try([str(command), "--version"], cwd=folder)
    if said.stdout.strip() != f"holdfast {version}":
        return [f"`holdfast --version` prints {said.stdout.strip()!r} {said.stderr.strip()}"]
    # A copy outside the checkout: the demo must find the installed package and nothing else.
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    demo = _try([str(python), str(folder / "examples" / "demo.py")], cwd=folder)
    return [] if demo.returncode == 0 else [f"the demo fails: {(demo.stdout + demo.stderr)[-2000:]}"]


def _publish(archives: Sequence[Path]) -> list[str]:
    """Replace the archives in dist/, and return the names of the new files."""
    DIST.mkdir(exist_ok=True)
    for old in [*DIST.glob("holdfast-*"), *DIST.glob(SUMS)]:
        old.unlink()
    for archive in archives:
        shutil.copyfile(archive, DIST / archive.name)
    (DIST / SUMS).write_text("".join(f"{_hash(path)}  {path.name}\n" for path in archives))
    return [*(path.name for path in archives), SUMS]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def _run(command: Sequence[str], *, cwd: Path | None = None, **variables: str) -> None:
    done = _try(command, cwd=cwd, **variables)
    if done.returncode != 0:
        raise NotReleasable(f"`{' '.join(command)}` fails: {(done.stdout + done.stderr)[-2000:]}")


def _try(command: Sequence[str], *, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    # Every install is pinned, that of the build backend included; the checkout is not on the path.
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), **variables}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True)


if __name__ == "__main__":
    raise SystemExit(main())
