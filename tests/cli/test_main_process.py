"""The command line as a process of its own: exit codes, pipes that close, disks that are full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runs import Cli

PROGRAM = [sys.executable, "-c", "import sys; from holdfast.cli.main import main; sys.exit(main())"]


def _run(cli: Cli, *words: str, stdout: int = subprocess.PIPE) -> tuple[int, str, str]:
    command = [*PROGRAM, "-s", str(cli.store), *words]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_exit_code_is_the_process_own(cli: Cli) -> None:
    cli.ok("put", "snap", "data")

    assert _run(cli, "cat", "snap", "data/config.json") == (0, '{"lr": 1}\n', "")
    code, out, err = _run(cli, "show", "snip")
    assert (code, out, err) == (2, "", f"holdfast: no snapshot or tag 'snip' in {cli.store}; did you mean 'snap'?\n")
    cli.find("packs").unlink()
    assert _run(cli, "check")[0] == 1


def test_the_installed_program_runs() -> None:
    program = Path(sys.executable).with_name("holdfast")
    if not program.exists():
        pytest.skip("the package is not installed; run `make setup`")

    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("holdfast ")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_closes_ends_the_run_quietly(cli: Cli, unbuffered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    cli.ok("put", "snap", "data/model.bin")

    with subprocess.Popen(
        [*PROGRAM, "-s", str(cli.store), "cat", "snap", "model.bin"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.read(10)
        process.stdout.close()
        err = process.stderr.read()

    assert (process.returncode, err) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_does_not_fit_is_an_error(cli: Cli) -> None:
    cli.ok("put", "snap", "data/config.json")
    with open("/dev/full", "w") as full:
        code, _, err = _run(cli, "ls", stdout=full.fileno())

    assert (code, err) == (2, "holdfast: No space left on device\n")


def test_names_that_the_terminal_cannot_show_do_not_break_the_run(cli: Cli) -> None:
    cli.ok("put", "läuft", "data/config.json")

    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [*PROGRAM, "-s", str(cli.store), "ls"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)

    assert "l\\xe4uft" in done.stdout
