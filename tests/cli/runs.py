"""Run the command line inside this process, and tell whether a store has changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from holdfast.cli.main import main

_TIME: Final = re.compile(r"20[0-9]{2}-[01][0-9]-[0-3][0-9] [0-2][0-9]:[0-5][0-9]:[0-5][0-9]")
_DIGEST: Final = re.compile(r"\b[0-9a-f]{12}\b")


@dataclass(frozen=True)
class Ran:
    """How one command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, parsed."""
        return json.loads(self.out)


class Cli:
    """Runs commands in a directory of its own, which holds a store `ckpts` and files in `data`."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[bytes]) -> None:
        self.folder = folder
        self.store = folder / "ckpts"
        self._capture = capture

    def __call__(self, *words: str) -> Ran:
        """Run one command on the store."""
        return self.bare("-s", str(self.store), *words)

    def bare(self, *words: str) -> Ran:
        """Run one command as it is."""
        self._capture.readouterr()
        code = main(words)
        out, err = self._capture.readouterr()
        return Ran(code, out.decode(), err.decode())

    def ok(self, *words: str) -> str:
        """Run a command that must succeed in silence, and return what it printed."""
        ran = self(*words)
        assert (ran.code, ran.err) == (0, "")
        return ran.out

    def end(self, *words: str) -> tuple[object, str]:
        """Run a command that ends in the parser; return its exit code and all that it printed."""
        with pytest.raises(SystemExit) as caught:
            self.bare(*words)
        out, err = self._capture.readouterr()
        return caught.value.code, (out + err).decode()

    def find(self, prefix: str) -> Path:
        """Return the only file below `prefix`; of the config's two generations, the one that counts."""
        *others, found = sorted(path for path in (self.store / prefix).rglob("*") if path.is_file())
        assert not others or prefix == "config"
        return found


def mask(text: str) -> str:
    """Replace times and short digests by fixed ones."""
    return _DIGEST.sub("0123456789ab", _TIME.sub("2026-01-02 03:04:05", text))


def flip(path: Path, position: int) -> None:
    """Damage a file: flip one bit of the byte at `position`."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def digest_tree(top: Path) -> str:
    """Return a digest of every name, mode, link, byte and time below `top`; of the lock file, of its name and bytes.

    A collector writes into the lock file who it is, and takes that out again.
    """
    hasher = hashlib.sha256()
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        has_time = path.is_file() and path.name != ".lock"
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        fact = f"{path.relative_to(top)} {status.st_mode} {status.st_mtime_ns if has_time else 0} {len(content)} "
        hasher.update(fact.encode(errors="surrogateescape") + content)
    return hasher.hexdigest()
