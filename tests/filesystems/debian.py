"""Installs Debian packages for tests, where that can be done without asking."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Final

import pytest

_INSTALL_S: Final = 600.0


def require(programs: dict[str, str]) -> None:
    """Have programs, given with the package of each; skip the test if one is missing and cannot be installed."""
    missing = {package for program, package in programs.items() if not _find(program)}
    if missing and not _install(sorted(missing)):
        pytest.skip(f"needs Debian's {', '.join(sorted(missing))}, which cannot be installed here")


def _find(program: str) -> str | None:
    return shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin")


def _install(packages: list[str]) -> bool:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return False
    # Runlevel 1 keeps the installed servers from being started.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        try:
            subprocess.run(["apt-get", *words], env=environment, capture_output=True, check=True, timeout=_INSTALL_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False
    return True
