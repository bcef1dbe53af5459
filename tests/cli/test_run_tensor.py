"""The actions `run events` and `run tensor`: which tensors they list, and how they print one."""

from __future__ import annotations

import re

from tests.cli.runs import Cli


def test_events_lists_what_fits(recorded: Cli) -> None:
    out = recorded.ok("run", "events", "good", "layers.[12]", "--step", "1", "--kind", "output")

    assert [re.split(r"\s{2,}", line.strip())[:7] for line in out.splitlines()[1:]] == [
        ["1", "0", "forward", "output", "layers.1", "float32 (3, 4)", "full"],
        ["1", "0", "forward", "output", "layers.2", "float32 (3, 4)", "full"],
    ]


def test_events_as_json(recorded: Cli) -> None:
    found = recorded("run", "events", "stats", "--phase", "forward", "--rank", "0", "--json").json

    assert len(found) == 3 * 9
    assert (found[3]["fqn"], found[3]["kind"], found[3]["level"]) == ("layers.0", "input", "stats")


def test_tensor_prints_values_and_a_histogram(recorded: Cli) -> None:
    words = ("run", "tensor", "good", "layers.1", "--kind", "output", "--step", "1", "--bins", "4")
    out = recorded.ok(*words)

    assert out.startswith("step 1, forward, rank 0: output of layers.1\nfloat32 (3, 4), digest ")
    assert "Linear at model.py:7\n[[0. " in out
    assert "min 0  max 4.5  mean 2.25" in out
    bars = [line for line in out.splitlines() if " | " in line]
    assert [line.split("|")[0].strip() for line in bars] == ["0", "1.125", "2.25", "3.375"]
    assert [int(line.split()[-1]) for line in bars] == [3, 3, 3, 3]


def test_tensor_against_another_run_says_how_far_apart(recorded: Cli) -> None:
    words = ("run", "tensor", "good", "layers.1", "--kind", "output", "--step", "1", "--against")
    ran = recorded(*words, "bad")

    assert (ran.code, ran.err) == (1, "")
    assert "bad: min 0.25  max 4.75" in ran.out
    assert ran.out.splitlines()[-1].startswith("differs  rel ")
    assert recorded.ok(*words, "good-2").endswith("\nequal\n")


def test_tensor_without_values_shows_what_was_kept(recorded: Cli) -> None:
    words = ("layers.1", "--kind", "output")

    stats = recorded.ok("run", "tensor", "stats", *words)
    digests = recorded.ok("run", "tensor", "digests", *words)

    assert "recorded at level stats: its values were not recorded" in stats
    assert len([line for line in stats.splitlines() if " | " in line]) == 2
    assert "recorded at level digest" in digests


def test_tensor_as_json(recorded: Cli) -> None:
    words = ("layers.1", "--kind", "output", "--step", "1", "--json")
    found = recorded("run", "tensor", "nan", *words, "--against", "good")

    assert found.code == 1
    assert found.json["values"][1][2] == "nan"
    assert found.json["portraits"][0]["nan"] == 1
    assert found.json["measure"]["nan"] == [1, 0]
