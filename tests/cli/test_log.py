"""The verb `log`: what was saved from what, and what is shown of each snapshot."""

from __future__ import annotations

import pytest
import torch

import holdfast
from tests.cli.runs import Cli, digest_tree, flip, mask


@pytest.fixture
def forked(cli: Cli) -> Cli:
    """A run of three steps, a fork from its second, and a snapshot made of the ends of both."""
    with holdfast.open(cli.store) as store:
        for step in (1, 2, 3):
            metadata = {"step": step, "metrics": {"loss": 1 / step}}
            store.save(f"run/step-{step}", {"w": torch.full((2,), step)}, metadata=metadata)
    with holdfast.open(cli.store) as store:
        store.load_into("run/step-2", {"w": torch.zeros(2, dtype=torch.int64)})
        store.save("fork/step-3", {"w": torch.ones(2)})
    with holdfast.open(cli.store) as store:
        store.load("fork/step-3")
        store.load("run/step-3")
        store.save("soup", {"w": torch.zeros(2)})
        store.tag("best", "fork/step-3")
    return cli


def rows(text: str) -> list[list[str]]:
    """Return the lines of a table, with cells separated by two spaces or more."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in mask(text).splitlines()]


def test_log_draws_what_was_saved_from_what(forked: Cli) -> None:
    before = digest_tree(forked.store)

    found = rows(forked.ok("log"))

    assert [row[:2] for row in found] == [
        ["NAME", "WHEN"],
        ["*", "soup"],
        ["|\\"],
        ["* |", "fork/step-3"],
        ["| *", "run/step-3"],
        ["|/"],
        ["*", "run/step-2"],
        ["*", "run/step-1"],
    ]
    assert [row[-1] for row in found if len(row) > 1][1:] == ["-", "best", "loss 0.333333", "loss 0.5", "loss 1"]
    texts = "\n".join(" ".join(row) for row in found)
    assert "loaded fork/step-3, run/step-3" in texts
    assert "after run/step-1" in texts
    assert digest_tree(forked.store) == before


def test_log_of_a_name_shows_its_ancestors(forked: Cli) -> None:
    def names(*words: str) -> list[str]:
        return [entry["name"] for entry in forked("log", *words, "--json").json["history"]]

    assert names("fork/step-3") == ["fork/step-3", "run/step-2", "run/step-1"]
    assert names("best") == ["fork/step-3", "run/step-2", "run/step-1"]
    assert names("run/") == ["run/step-3", "run/step-2", "run/step-1"]
    assert names("*/step-3") == ["fork/step-3", "run/step-3"]
    assert names("run/", "--where", "loss < 0.6") == ["run/step-3", "run/step-2"]
    assert names("--limit", "1") == ["soup"]


def test_log_as_json_has_the_whole_lineage(forked: Cli) -> None:
    found = {entry["name"]: entry for entry in forked("log", "--json").json["history"]}

    fork, last = found["fork/step-3"], found["run/step-3"]
    assert fork["loaded"] == [{"name": "run/step-2", "digest": found["run/step-2"]["digest"]}]
    assert (fork["parents"], fork["previous"], fork["lost"]) == (["run/step-2"], None, [])
    assert (last["parents"], last["previous"], last["loaded"]) == (["run/step-2"], "run/step-2", [])
    assert fork["environment"]["world_size"] == 1
    assert last["metadata"] == {"step": 3, "metrics": {"loss": 1 / 3}}


def test_an_ancestor_that_was_deleted_or_overwritten_is_in_parentheses(forked: Cli) -> None:
    forked.ok("rm", "run/step-1", "--yes")
    with holdfast.open(forked.store) as store:
        store.save("run/step-2", {"w": torch.ones(3)}, overwrite=True)

    texts = forked.ok("log")

    assert "after (run/step-1)" not in texts, "step 2 was overwritten, and its new content has no lineage"
    assert "loaded (run/step-2)" in texts
    assert "after (run/step-2)" in texts


def test_log_reports_damage_and_names_that_do_not_exist(forked: Cli) -> None:
    assert "no snapshot or tag 'run/stp-1'" in forked("log", "run/stp-1").err
    flip(next((forked.store / "snapshots").rglob("soup@*")), -10)

    ran = forked("log", "run/")

    assert ran.code == 1
    assert "is damaged" in ran.err


@pytest.mark.parametrize("words", [["--where", "loss <"], ["--limit=-1"], ["nothing/"]])
def test_a_bad_question_is_an_error(forked: Cli, words: list[str]) -> None:
    ran = forked("log", *words)

    assert (ran.code, ran.out) == (2, "")


def test_log_of_an_empty_store_says_so(cli: Cli) -> None:
    ran = cli("log")

    assert (ran.code, ran.out, ran.err) == (0, "", f"holdfast: no snapshot to show in {cli.store}\n")
