"""The verb `follow`: a line for each new snapshot, at once, until it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

import holdfast
from tests.cli.runs import Cli
from tests.cli.test_main_process import PROGRAM
from tests.kit.patience import PATIENCE_S


@pytest.fixture
def filled(cli: Cli) -> Cli:
    with holdfast.open(cli.store) as store:
        for number in (1, 2):
            store.publish("policy", {"n": number}, metadata={"step": number})
        store.save("other", {"n": 0})
        store.tag("good", "policy/00000002")
    return cli


def test_the_newest_is_printed_with_its_tags(filled: Cli) -> None:
    lines = filled.ok(*["follow", "policy/", "--timeout", "0s"]).splitlines()

    assert len(lines) == 1
    assert lines[0].startswith("policy/00000002  ")
    assert lines[0].endswith("  good")


def test_json_is_one_object_a_line(filled: Cli) -> None:
    text = filled.ok(*["follow", "policy/", "--since", "policy/00000001", "--every", "--timeout", "0s", "--json"])

    (found,) = [json.loads(line) for line in text.splitlines()]
    assert (found["name"], found["metadata"], found["tags"]) == ("policy/00000002", {"step": 2}, ["good"])


def test_without_a_new_snapshot_nothing_is_printed(filled: Cli) -> None:
    assert filled.ok(*["follow", "policy/", "--since", "policy/00000002", "--timeout", "0s", "--poll", "1s"]) == ""


@pytest.mark.parametrize("words", ["--since nobody", "--timeout soon", "--poll=-1s"])
def test_what_cannot_be_followed_is_refused(filled: Cli, words: str) -> None:
    ran = filled("follow", "policy/", "--timeout", "0s", *words.split())

    assert ran.code in (1, 2)
    assert ran.err.startswith("holdfast: ")


def test_a_snapshot_is_printed_when_it_is_committed_and_an_interrupt_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with holdfast.open(path) as store:
        store.publish("policy", {"n": 1})
        command = [*PROGRAM, "-s", str(path), "follow", "policy/", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["name"] == "policy/00000001"
            store.publish("policy", {"n": 2})
            assert json.loads(process.stdout.readline())["name"] == "policy/00000002"
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)
            assert process.stderr is not None
            assert b"Traceback" not in process.stderr.read()
