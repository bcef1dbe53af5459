"""The verb `serve`: prints its address first, answers, and ends."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

import holdfast
from tests.cli.runs import Cli
from tests.cli.test_main_process import PROGRAM
from tests.kit.patience import PATIENCE_S


def test_the_address_is_printed_and_the_time_ends_it(cli: Cli) -> None:
    ran = cli("serve", "--no-browser", "--timeout", "0s")

    assert ran.code == 0
    assert ran.out.startswith("http://127.0.0.1:")
    assert "/#token=" in ran.out
    assert str(cli.store) in ran.err


def test_json_has_the_address_and_the_store(cli: Cli) -> None:
    found = json.loads(cli.ok("serve", "--no-browser", "--timeout", "0s", "--json", "--host", "localhost"))

    assert found["url"].startswith("http://localhost:")
    assert found["store"] == str(cli.store)


@pytest.mark.parametrize("words", ["--port 70000", "--host 0.0.0.0", "--timeout soon"])
def test_what_cannot_be_served_is_refused(cli: Cli, words: str) -> None:
    ran = cli("serve", "--no-browser", "--timeout", "0s", *words.split())

    assert ran.code == 2
    assert "holdfast" in ran.err


def test_it_answers_until_an_interrupt_ends_it_without_loading_torch(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with holdfast.open(path) as store:
        store.save("a", {"n": 1})
    command = [*PROGRAM, "-s", str(path), "serve", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        base, _, token = process.stdout.readline().strip().partition("/#token=")
        request = urllib.request.Request(f"{base}/api/v1/snapshots", headers={"Authorization": f"Bearer {token}"})
        found = json.load(urllib.request.urlopen(request, timeout=PATIENCE_S))
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGINT)
        _, noted = process.communicate(timeout=PATIENCE_S)

    assert [each["name"] for each in found["snapshots"]] == ["a"]
    assert process.returncode == 0
    assert "the server has ended" in noted
    assert "libtorch" not in maps
