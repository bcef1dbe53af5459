"""A store with a few files beside it, a store of recorded runs, and the command line to use them."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path

import pytest

import holdfast
from tests.cli.runs import Cli
from tests.kit.recordings import Recording, write_recorded


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Cli:
    """A directory without a store, and no store in the environment."""
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


@pytest.fixture
def filled(cli: Cli) -> Cli:
    """Three snapshots and a tag."""
    cli.ok("put", "run/step-100", "data/config.json")
    cli.ok("put", "run/step-99", "data/", "--meta", "epoch=3", "--meta", "why=a test")
    cli.ok("put", "other", "data/sub")
    cli.ok("tag", "best", "run/step-99")
    return cli


@pytest.fixture
def steps(cli: Cli) -> Cli:
    """A store with four steps of one run and a snapshot that shares a file with them."""
    for step in (90, 100, 110, 200):
        (cli.folder / "data/step").write_bytes(bytes([step]) * 2000)
        cli.ok("put", f"run/step-{step}", "data/step")
    cli.ok("put", "twin", "data/step")
    return cli


@pytest.fixture(scope="session")
def written_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of runs: equal ones, one that diverges, one with a NaN, some of two ranks, and one of each level."""
    place = tmp_path_factory.mktemp("recorded")
    repo = holdfast.open(place).repository
    for recording in (
        Recording("good", environment={"torch": "2.12", "seed": "0"}),
        Recording("good-2", environment={"torch": "2.12", "seed": "0"}),
        Recording("bad", is_bad=True, environment={"torch": "2.13", "seed": "0"}, notes=("a slow disk",)),
        Recording("nan", is_bad=True, hole=math.nan),
        Recording("later", first_step=10),
        Recording("digests", level="digest"),
        Recording("bad-digests", is_bad=True, level="digest"),
        Recording("stats", level="stats"),
        Recording("bad-stats", is_bad=True, level="stats"),
        Recording("ranks", world=2),
        Recording("bad-ranks", world=2, odd_rank=1),
    ):
        write_recorded(repo, recording)
    return place


@pytest.fixture
def recorded(empty: Cli, written_runs: Path) -> Cli:
    """The command line on a copy of the store of runs."""
    shutil.copytree(written_runs, empty.store)
    return empty
