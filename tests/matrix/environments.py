"""Builds a virtual environment for one pair of Python and torch, with every package pinned."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAIRS: Final = ROOT / "tests/matrix/pairs"
CONSTRAINTS: Final = ROOT / "constraints.txt"
PROJECT: Final = ROOT / "pyproject.toml"
# The first two come with Python itself.
_NOT_PINNED: Final = frozenset({"pip", "setuptools", "holdfast"})
_STAMP: Final = "constraints.txt"

Pins = dict[str, str]


class CannotBuild(Exception):
    """An environment cannot be built; the text says what to do."""


def list_pairs() -> list[str]:
    """Return the pairs that have a file of pins, lowest Python first: `3.10-2.6` is Python 3.10 with torch 2.6."""
    return sorted((file.stem for file in PAIRS.glob("*.txt")), key=order_of_pair)


def order_of_pair(pair: str) -> list[int]:
    """Return what pairs are sorted by: the numbers in their names."""
    return [int(number) for number in re.findall(r"\d+", pair)]


def find_place() -> Path:
    """Return the directory of all environments: HOLDFAST_MATRIX, otherwise one in the user's cache directory."""
    chosen = os.environ.get("HOLDFAST_MATRIX")
    return Path(chosen).absolute() if chosen else Path.home() / ".cache/holdfast-matrix"


def read_pins(pair: str) -> Pins:
    """Return the pins of a pair: those of constraints.txt, replaced and completed by those of the pair's file."""
    own = PAIRS / f"{pair}.txt"
    if not own.is_file():
        raise CannotBuild(f"there is no pair {pair!r}; the pairs are {', '.join(list_pairs())}")
    return parse_pins(CONSTRAINTS.read_text(encoding="utf-8")) | parse_pins(own.read_text(encoding="utf-8"))


def parse_pins(text: str) -> Pins:
    """Return the version of each package in lines of the form `name==version`."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.partition("==")[::2] for line in lines if line)
    return {_spell(name): version for name, version in pairs}


def find_not_pinned(installed: Mapping[str, str], pins: Mapping[str, str]) -> list[str]:
    """Return `name==version` of each installed package that no pin names with this version.

    A pin without a local version, such as 2.13.0, also names builds of it, such as 2.13.0+cpu.
    """
    return [
        f"{name}=={version}"
        for name, version in installed.items()
        if pins.get(name) not in (version, version.partition("+")[0])
    ]


def describe_wanted(pair: str, project: bytes) -> str:
    """Return the pins of a pair as a file for pip; it differs if pyproject.toml, which names the packages, differs."""
    pins = "".join(f"{name}=={version}\n" for name, version in sorted(read_pins(pair).items()))
    return f"# for pyproject.toml {hashlib.sha256(project).hexdigest()}\n{pins}"


def build_environment(pair: str, place: Path) -> Path:
    """Return the Python of the environment of a pair below `place`; creates it, or updates it to what is wanted now."""
    folder = place / pair
    python, stamp = folder / "bin/python", folder / _STAMP
    wanted = describe_wanted(pair, PROJECT.read_bytes())
    if not python.exists():
        subprocess.run([find_interpreter(pair.partition("-")[0]), "-m", "venv", str(folder)], check=True)
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        stamp.unlink(missing_ok=True)
        pins_file = folder / "wanted.txt"
        pins_file.write_text(wanted, encoding="utf-8")
        _install(python, pins_file, f"{ROOT}[test]")
        _verify_pinned(python, pair)
        pins_file.replace(stamp)
    # Not part of what the stamp covers: another checkout may have used the environment since.
    _install(python, stamp, str(ROOT), "--no-deps")
    return python


def find_interpreter(version: str) -> str:
    """Return the path of a Python such as `3.10`: the one on PATH, otherwise the newest that pyenv has installed."""
    installed = (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python")
    newest_first = sorted(map(str, installed), key=order_of_pair, reverse=True)
    for candidate in (shutil.which(f"python{version}"), *newest_first):
        if candidate and _runs(candidate, version):
            return candidate
    raise CannotBuild(f"there is no Python {version}; install it, for example with `pyenv install {version}`")


def _runs(candidate: str, version: str) -> bool:
    # A shim of pyenv is on PATH even if it cannot run.
    done = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.startswith(f"Python {version}.")


def _install(python: Path, pins: Path, package: str, *options: str) -> None:
    words = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", *options, "--editable", package]
    # PIP_CONSTRAINT and not -c: it also applies to the build backend.
    subprocess.run([str(python), *words], check=True, cwd=ROOT, env={**os.environ, "PIP_CONSTRAINT": str(pins)})


def _verify_pinned(python: Path, pair: str) -> None:
    words = [str(python), "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    listed = subprocess.run(words, check=True, capture_output=True, text=True)
    installed = _leave_out(parse_pins(listed.stdout), _NOT_PINNED)
    missing = find_not_pinned(installed, read_pins(pair))
    if missing:
        raise CannotBuild(f"add these lines to tests/matrix/pairs/{pair}.txt:\n" + "\n".join(missing))


def _leave_out(pins: Pins, names: Iterable[str]) -> Pins:
    return {name: version for name, version in pins.items() if name not in names}


def _spell(name: str) -> str:
    """Return the name of a package as all tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
