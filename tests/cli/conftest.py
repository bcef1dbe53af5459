"""A store with a few files beside it, and the command line to use them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cli.runs import Cli


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Cli:
    """A directory without a store, and no store in the environment."""
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/sub").mkdir(parents=True)
    (tmp_path / "data/config.json").write_text('{"lr": 1}\n')
    (tmp_path / "data/model.bin").write_bytes(random.Random(1).randbytes(2_500_000))
    (tmp_path / "data/sub/run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "data/sub/run.sh").chmod(0o755)
    return Cli(tmp_path, capsysbinary)


@pytest.fixture
def cli(empty: Cli) -> Cli:
    """The same with an empty store."""
    empty.ok("init")
    return empty
