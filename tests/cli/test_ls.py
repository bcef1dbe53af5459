"""The verb `ls`: conditions, order, columns, globs, and the cache beside the store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.verbs.ls import format_age, format_value
from holdfast.query import stored
from holdfast.query.expression import parse_field
from tests.cli.runs import Cli, digest_tree, flip, mask


@pytest.fixture
def run(cli: Cli) -> Cli:
    """Steps 1 to 12 of a run with a loss, one of them NaN, and a file that has none."""
    store = holdfast.open(cli.store)
    for step in range(1, 13):
        loss = "nan" if step == 3 else 12 / step
        store.save(f"run/step-{step}", {"lr": step}, metadata={"step": step, "metrics": {"loss": loss}})
    store.tag("best", "run/step-12")
    cli.ok("put", "notes", "data/config.json", "--meta", "a*b=c")
    return cli


@pytest.fixture
def few(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Three snapshots, which are enough for a cache file."""
    monkeypatch.setattr(stored, "MIN_NEW", 3)
    for number in range(3):
        cli.ok("put", f"run/{number}", "data/config.json")
    return cli


def names(cli: Cli, *words: str) -> list[str]:
    return [snapshot["name"] for snapshot in cli("ls", *words, "--json").json["snapshots"]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--where", "loss < 1.2"], ["run/step-11", "run/step-12"]),
        (["run/", "--where", "step in (2, 3)"], ["run/step-2", "run/step-3"]),
        (["--where", "not loss exists"], ["notes"]),
        (["--where", "tag = 'best'"], ["run/step-12"]),
        (["--where", "['a*b'] = 'c'"], ["notes"]),
        (["--where", "age > 1d"], []),
        (["--where", "step < 4", "--sort", "-step"], ["run/step-3", "run/step-2", "run/step-1"]),
        (["--where", "step < 4", "--sort=loss"], ["run/step-2", "run/step-1", "run/step-3"]),
        (["--sort", "loss", "--limit", "1"], ["run/step-12"]),
        (["run/step-1?"], ["run/step-10", "run/step-11", "run/step-12"]),
        (["run/step-1"], ["run/step-1", "run/step-10", "run/step-11", "run/step-12"]),
        (["*"], ["notes"]),
        (["**/step-[2-3]"], ["run/step-2", "run/step-3"]),
    ],
)
def test_ls_lists_what_was_asked_for(run: Cli, words: list[str], expected: list[str]) -> None:
    before = digest_tree(run.store)

    assert names(run, *words) == expected
    assert digest_tree(run.store) == before


def test_ls_shows_columns(run: Cli) -> None:
    out = run.ok("ls", "--columns", "step,loss,size,tag,lr", "--where", "step > 10 or step = 3 or not step exists")

    assert out == (
        "NAME         step     loss  size  tag   lr\n"
        "notes           -        -  10 B  -      -\n"
        "run/step-3      3      nan   0 B  -      -\n"
        "run/step-11    11  1.09091   0 B  -      -\n"
        "run/step-12    12        1   0 B  best   -\n"
    )


def test_ls_as_json_has_the_columns_and_the_environment(run: Cli) -> None:
    found = run("ls", "run/step-3", "--columns", "loss,step,gone,tag", "--json").json["snapshots"][0]

    assert found["columns"] == {"loss": "nan", "step": 3, "gone": None, "tag": None}
    assert found["environment"]["world_size"] == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--where", "loss <"], "expected a field or a value, not the end of the expression\n  loss <\n        ^\n"),
        (["--where", "x $ 'a\nb'"], "'$' does not belong here\n  x $ 'a\\nb'\n    ^\n"),
        (["--where", ""], "the expression is empty; write a condition such as loss < 0.3\n"),
        (["--sort", "a..b"], "'a..b' is not the name of a field; write step, loss or metrics.loss\n"),
        (["--columns", ","], "'' is not the name of a field; write step, loss or metrics.loss\n"),
        (["--limit=-1"], "limit is a whole number that is not negative, not -1\n"),
        (["--tree", "--columns", "a"], "--tree shows folders, which have no fields; leave out --columns\n"),
    ],
)
def test_a_bad_question_is_one_sentence(run: Cli, words: list[str], error: str) -> None:
    ran = run("ls", *words)

    assert (ran.code, ran.out, ran.err) == (2, "", f"holdfast: {error}")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--where", "lss < 3"], "no snapshot here has the field 'lss' (fields that exist: a*b, loss, step)"),
        (["--where", "loss > 99"], "none of 13 snapshots matches"),
        (["x*"], "no snapshot matches 'x*'"),
        (["x"], "no snapshot starts with 'x'"),
    ],
)
def test_nothing_found_is_explained(run: Cli, words: list[str], reason: str) -> None:
    ran = run("ls", *words)

    assert (ran.code, ran.out, ran.err) == (0, "", f"holdfast: {reason} in {run.store}\n")


def test_a_name_with_special_characters_comes_before_the_glob(cli: Cli) -> None:
    for name in ("a[1]", "a1", "b*", "bc"):
        cli.ok("put", name, "data/config.json")

    assert names(cli, "a[1]") == ["a[1]"]
    assert names(cli, "b*") == ["b*"]
    assert names(cli, "[ab]?") == ["a1", "b*", "bc"]


def test_records_are_remembered_beside_the_store(few: Cli) -> None:
    before = digest_tree(few.store)
    found = few("ls", "--json").json
    (file,) = (few.folder / "cache/holdfast").iterdir()
    written = file.stat().st_mtime_ns

    assert few("ls", "--json").json == found
    assert file.stat().st_mtime_ns == written, "nothing new was read"
    assert digest_tree(few.store) == before


def test_a_damaged_record_is_reported_although_it_was_remembered(few: Cli) -> None:
    few.ok("ls")
    flip(next(path for path in (few.store / "snapshots").rglob("run%2f1@*")), -10)

    ran = few("ls", "run/1")

    assert ran.code == 1
    assert "run%2f1  damaged" in ran.out


@pytest.mark.parametrize("folder", ["", "relative/cache"])
def test_without_a_cache_folder_the_usual_one_is_used(few: Cli, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setenv("HOME", str(few.folder / "home"))

    assert len(names(few)) == 3
    assert [path.name for path in (few.folder / "home/.cache").iterdir()] == ["holdfast"]
    assert not Path(folder or "relative").exists()


def test_a_cache_folder_that_cannot_be_written_is_no_error(few: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)

    assert len(few.ok("ls").splitlines()) == 4


def test_values_are_formatted_for_a_table() -> None:
    fields = {name: parse_field(name) for name in ("age", "size", "created", "x")}

    assert format_value(fields["age"], 7300.0) == "2h"
    assert format_value(fields["size"], 2048) == "2.0 KiB"
    assert mask(format_value(fields["created"], 1_800_000_000.0)) == "2026-01-02 03:04:05"
    assert [format_value(fields["x"], value) for value in (1 / 3, 5, "t", True, None, [1])] == [
        "0.333333",
        "5",
        "t",
        "true",
        "null",
        "[1]",
    ]
    assert [format_age(age) for age in (0.5, 59, 60, 3600, 86400 * 3, -120)] == ["0s", "59s", "1m", "1h", "3d", "-2m"]
