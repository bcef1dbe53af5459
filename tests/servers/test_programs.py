"""Servers are started and ended as processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.patience import PATIENCE_S
from tests.servers.programs import answers, find_free_ports, require_program, running

_START = """
import subprocess, sys
from tests.servers.programs import die_with_parent
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, preexec_fn=die_with_parent)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_server_answers_until_it_is_killed_and_again_after_a_start(tmp_path: Path) -> None:
    (port,) = find_free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with running(command, tmp_path / "server", url) as process:
        assert answers(url)
        process.kill()
        assert not answers(url)
        process.start(url)
        assert answers(f"{url}/absent")

    assert not answers(url)


def test_a_server_that_ends_at_once_is_shown_with_its_words(tmp_path: Path) -> None:
    (port,) = find_free_ports(1)
    with pytest.raises(AssertionError, match="no such option"):
        with running([sys.executable, "-c", "exit('no such option')"], tmp_path / "server", f"http://127.0.0.1:{port}"):
            pass


def test_a_program_that_is_not_installed_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="make servers"):
        require_program("a-server-that-nobody-has")


def test_a_server_does_not_outlive_a_killed_test() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    with parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    try:
        assert select.select([child], [], [], PATIENCE_S)[0]
    finally:
        os.close(child)
