"""Two nodes whose network is cut in the middle of a save: both raise, and nothing is committed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.distributed.node import wait_file
from tests.kit.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
ADDRESS = "10.77.0"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=PATIENCE_S)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Make two network namespaces with a cable between them; return their names."""
    names = [f"holdfast-{os.getpid()}-{number}" for number in range(2)]
    cable = [f"hf{os.getpid() % 100_000}{end}" for end in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        for number, (name, end) in enumerate(zip(names, cable, strict=True)):
            ip("link", "set", end, "netns", name, "name", "cable")
            ip("-n", name, "address", "add", f"{ADDRESS}.{number + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=PATIENCE_S)


def start(node: str, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tests.distributed.node", str(rank), str(folder), f"{ADDRESS}.1"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "cable"}
    return subprocess.Popen(["ip", "netns", "exec", node, *words], cwd=ROOT, env=environment)


@pytest.mark.slow  # torch is loaded twice, and the timeout has to pass
def test_a_network_that_is_cut_keeps_nobody_waiting_and_commits_nothing(nodes: list[str], tmp_path: Path) -> None:
    ranks = [start(node, rank, tmp_path) for rank, node in enumerate(nodes)]
    try:
        wait_file(tmp_path / "under way", limit_s=PATIENCE_S)
        ip("-n", nodes[1], "link", "set", "cable", "down")
        (tmp_path / "cut").touch()
        for rank in ranks:
            rank.wait(PATIENCE_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(PATIENCE_S)

    outcome: list[dict[str, Any]] = [
        json.loads((tmp_path / f"told {rank}").read_text(encoding="utf-8")) for rank in range(2)
    ]
    assert [each["kind"] for each in outcome] == ["RankError", "RankError"]
    assert "rank 1: RankGone" in outcome[0]["text"]
    assert "is gone or cannot be reached" in outcome[1]["text"]
    with holdfast.open(tmp_path / "store") as store:
        assert not store.load("run")["w"].any()
        store.save("after", {"w": 1})
        assert [finding for finding in store.check(read=True) if finding.severity == "error"] == []
