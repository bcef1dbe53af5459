"""The verb `run`: what ls, diff, nan, ranks and report print, how they exit, and how they answer mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.cli.output import Output
from holdfast.progress import CallbackProgress, ProgressUpdate
from tests.cli.runs import Cli, digest_tree


def test_ls_lists_runs_and_what_was_noted(recorded: Cli) -> None:
    lines = recorded.ok("run", "ls").splitlines()

    assert re.split(r"\s{2,}", lines[0]) == ["NAME", "STATUS", "RANKS", "STARTED", "NOTES"]
    assert re.match(r"bad +complete +1 +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d +a slow disk$", lines[1])
    assert len(lines) == 12


def test_ls_of_a_store_without_runs_says_so(cli: Cli) -> None:
    ran = cli("run", "ls")

    assert (ran.code, ran.out, ran.err) == (0, "", f"holdfast: no run was recorded yet in {cli.store}\n")
    assert cli("run", "ls", "--json").json == []


def test_ls_as_json(recorded: Cli) -> None:
    first = recorded("run", "ls", "--json").json[0]

    assert first == {
        "name": "bad",
        "status": "complete",
        "world": 1,
        "started": "2026-09-21T14:13:20Z",
        "environment": {"torch": "2.13", "seed": "0"},
        "notes": ["a slow disk"],
    }


def test_snapshots_and_runs_do_not_meet(recorded: Cli) -> None:
    ran = recorded("ls")

    assert (ran.code, ran.out) == (0, "")


def test_diff_names_the_origin_and_exits_with_1(recorded: Cli) -> None:
    ran = recorded("run", "diff", "good", "bad")

    assert (ran.code, ran.err) == (1, "")
    lines = ran.out.splitlines()
    assert lines[0] == "good -> bad"
    assert "environment  torch  2.12 -> 2.13" in lines
    assert lines.index("note: bad: a slow disk") > next(at for at, line in enumerate(lines) if "origin: " in line)
    headline = "output differs though inputs and parameters are equal (model.py:7)"
    assert f"origin: step 1, forward, layers.1: {headline}" in lines
    assert re.search(r"^  rel 0\.\d+  max abs 0\.25 at \(0, 0\): 0 against 0\.25  ", ran.out, re.MULTILINE)
    assert re.search(r"^ORIGIN +1  forward  output  layers\.1 +\S+e\S+  2\.50e-01", ran.out, re.MULTILINE)
    assert re.search(r"^PROPAGATED +1  forward  input +layers\.2 ", ran.out, re.MULTILINE)
    assert lines[-1] == "15 equal, 0 close, 1 origin, 2 propagated, 0 missing; 1 step equal as a whole"


def test_diff_of_equal_runs_exits_with_0(recorded: Cli) -> None:
    out = recorded.ok("run", "diff", "good", "good-2")

    assert "good and good-2 are equal in 3 steps" in out


def test_diff_as_json(recorded: Cli) -> None:
    ran = recorded("run", "diff", "good", "bad", "--json")

    assert ran.code == 1
    assert (ran.json["origin"]["fqn"], ran.json["origin"]["step"]) == ("layers.1", 1)
    assert [row["class"] for row in ran.json["rows"]] == ["origin", "propagated", "propagated"]


def test_diff_and_report_show_a_bar_except_with_json(recorded: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[ProgressUpdate] = []
    monkeypatch.setattr(Output, "progress", lambda self: CallbackProgress(updates.append))

    recorded("run", "diff", "good", "bad", "--json")
    assert not updates

    for words in (["diff", "good", "bad"], ["report", "good", "bad", "diff.html"]):
        recorded("run", *words)
        assert updates[0].task == "compare good with bad"
        assert updates[-1].is_ended
        assert updates[-1].done_bytes == updates[-1].total_bytes > 0
        updates.clear()


def test_diff_of_digests_says_that_nobody_knows_how_much(recorded: Cli) -> None:
    ran = recorded("run", "diff", "digests", "bad-digests")

    assert ran.code == 1
    assert re.search(r"^ORIGIN +1  forward  output  layers\.1 +-  +-  +-  +-  +-$", ran.out, re.MULTILINE)


def test_diff_of_some_steps_compares_only_these(recorded: Cli) -> None:
    assert recorded("run", "diff", "good", "bad", "--steps", "0,2").code == 0
    assert recorded("run", "diff", "good", "bad", "--steps", "1-").code == 1


def test_diff_allows_what_the_user_says_is_close(recorded: Cli) -> None:
    assert recorded("run", "diff", "good", "bad", "--tolerance", "0,1").code == 0
    assert recorded("run", "diff", "good", "bad", "--tolerance", "exact").code == 1


def test_a_repetition_that_is_as_far_apart_makes_it_noise(recorded: Cli) -> None:
    assert recorded("run", "diff", "good", "bad", "--noise", "bad").code == 0
    assert recorded("run", "diff", "good", "bad", "--noise", "good-2").code == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["diff", "god", "bad"], "no run 'god' in .*; did you mean 'good'"),
        (["diff", "good", "later"], "have no step in common: nothing was compared"),
        (["diff", "good", "bad", "--steps", "many"], "--steps: steps must look like .*, not 'many'"),
        (["diff", "good", "bad", "--tolerance", "some"], "--tolerance: 'some' is not a tolerance"),
        (["diff", "good", "bad", "--map", "a"], "--map takes NAME=VALUE, not 'a'"),
        (["diff", "good", "bad", "--dim", "a=x"], "--dim takes PATTERN=DIM where DIM is a number"),
        (["report", "good", "bad", "/no/such/place.html"], "there is no directory /no/such; create it first"),
        (["tensor", "good", "layers.9"], "no matching tensor of 'layers.9'; `holdfast run events good` lists"),
        (["tensor", "good", "layers.1", "--step", "9"], "no matching tensor of 'layers.1' in step 9"),
        (["tensor", "good", "layers.1"], "several tensors in step 0: forward input .*; choose by --kind"),
        (["tensor", "good", "layers.1", "--kind", "input", "--against", "later"], "has no input of layers.1 in step 0"),
        (["nan", "@x"], "no part of it may begin with '@'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_an_error_that_says_what_to_do(recorded: Cli, words: list[str], said: str) -> None:
    ran = recorded("run", *words)

    assert ran.code == 2
    assert re.search(said, ran.err)


def test_nan_names_who_made_it(recorded: Cli) -> None:
    ran = recorded("run", "nan", "nan")

    assert (ran.code, ran.err) == (1, "")
    assert re.match(r"step 1, forward, layers\.1: output is not finite though inputs .* are finite: 1 NaN", ran.out)
    assert re.search(r"^  inputs: input\S* of layers\.1 finite", ran.out, re.MULTILINE)


def test_nan_of_a_clean_run_exits_with_0(recorded: Cli) -> None:
    assert recorded.ok("run", "nan", "good").startswith("good: no NaN found")
    assert recorded("run", "nan", "good", "--json").json["origin"] is None


def test_ranks_names_the_replica_that_differs(recorded: Cli) -> None:
    ran = recorded("run", "ranks", "bad-ranks")

    assert (ran.code, ran.err) == (1, "")
    assert re.match(r"step 0, forward, parameter of layers\.0\.weight: rank 1 differs from rank 0: ", ran.out)
    assert re.search(r"^0 +forward  parameter  layers\.0\.weight  0 / 1  +3\.33e-01  5\.00e-01$", ran.out, re.MULTILINE)


def test_ranks_that_agree_exit_with_0(recorded: Cli) -> None:
    assert "are equal" in recorded.ok("run", "ranks", "ranks")


def test_report_writes_a_page(recorded: Cli, tmp_path: Path) -> None:
    place = tmp_path / "diff.html"

    ran = recorded("run", "report", "good", "bad", str(place))

    assert (ran.code, ran.err) == (1, "")
    assert ran.out.splitlines()[-1] == f"{place}: 18 rows"
    assert place.read_bytes().startswith(b"<!doctype html>")
    assert b"layers.1: output differs" in place.read_bytes()


def test_no_action_changes_the_store(recorded: Cli, tmp_path: Path) -> None:
    before = digest_tree(recorded.store)

    for words in (["ls"], ["diff", "good", "bad"], ["nan", "nan"], ["ranks", "ranks"], ["events", "good"]):
        recorded("run", *words)
    recorded("run", "report", "good", "bad", str(tmp_path / "diff.html"))

    assert digest_tree(recorded.store) == before


def test_a_large_difference_is_not_counted_in_billions_of_ulp(recorded: Cli) -> None:
    text = recorded("run", "diff", "good", "bad", "--all").out
    exact = recorded("run", "diff", "good", "bad", "--json").json

    counts = [row["measure"]["max_ulp"] for row in exact["rows"] if row["measure"]]
    assert max(count for count in counts if count is not None) > 1000
    assert "> 1000" in text
    assert not re.search(r"(?<![.0-9])[0-9]{6,}\b", text)
