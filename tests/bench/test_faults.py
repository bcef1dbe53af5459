"""The fault table distinguishes good outcomes from bad ones, and the checked-in table is the one that a run wrote."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench import faults


def test_a_state_is_the_same_only_bit_for_bit() -> None:
    state = faults.make_state(1, (64, 64))
    other_sign = {**state, "layer.1.weight": -state["layer.1.weight"]}

    assert faults.is_same({name: tensor.clone() for name, tensor in state.items()}, state)
    assert not faults.is_same(other_sign, state)
    assert not faults.is_same({"layer.0.weight": state["layer.0.weight"]}, state)
    assert not faults.is_same({**state, "layer.1.weight": state["layer.1.weight"].double()}, state)
    assert not faults.is_same({**state, "layer.1.weight": state["layer.1.weight"].view(torch.int32)}, state)
    assert not faults.is_same({**state, "layer.1.weight": None}, state)
    assert not faults.is_same(None, state)


def test_a_flipped_bit_that_loads_silently_is_called_wrong(tmp_path: Path) -> None:
    state = faults.make_state(faults.OLD, (4096,))
    faults.CONTESTANTS["torch.save"][0](tmp_path, state)
    path = tmp_path / "state.pt"
    position = path.read_bytes().index(state["layer.0.weight"].numpy().tobytes())

    faults.flip_bit(path, 8 * position + 3)
    damaged = faults.judge("torch.save", tmp_path, {"right": state})
    faults.flip_bit(path, 8 * position + 3)

    assert damaged == "wrong"
    assert faults.judge("torch.save", tmp_path, {"right": state}) == "right"


def test_a_flipped_bit_that_is_noticed_is_called_by_its_error(tmp_path: Path) -> None:
    state = faults.make_state(faults.OLD, (4096,))
    faults.CONTESTANTS["Holdfast"][0](tmp_path, state)
    pack = next((tmp_path / "packs").iterdir())
    position = pack.read_bytes().index(state["layer.0.weight"].numpy().tobytes())

    faults.flip_bit(pack, 8 * position + 3)

    assert faults.judge("Holdfast", tmp_path, {"right": state}) == "raises DigestMismatch"


def test_a_file_counts_as_synced_only_after_its_last_byte() -> None:
    trace = """\
7 write(3</d/early>, ""..., 9) = 9
7 fsync(3</d/early>) = 0
7 write(3</d/early>, ""..., 1) = 1
8 writev(4</d/temp>, [{...}], 2) = 20
8 fdatasync(4</d/temp> <unfinished ...>
7 write(5</d/never>, ""..., 9) = 9
8 <... fdatasync resumed>) = 0
8 linkat(AT_FDCWD</home>, "/d/temp", AT_FDCWD</home>, "/d/named", 0) = 0
7 rename("/d/never", "/d/moved") = 0
8 pwrite64(5</e/temp>, ""..., 9, 0) = 9
8 fdatasync(5</e/temp>) = 0
8 linkat(3</e>, "temp", 6</f>, "named", 0) = 0
7 fsync(6</d>) = 0
"""

    assert faults.find_synced(trace) == {"/d/temp", "/d/named", "/d", "/e/temp", "/f/named"}


def test_bad_outcomes_are_bold_and_their_absence_is_shown_as_zero() -> None:
    bad = faults.count_outcomes(["lost", "old whole", "lost"], bad=("lost", "mixed"))
    good = faults.count_outcomes(["old whole"], bad=("lost", "mixed"))

    assert (bad.text, bad.seen) == ("**2 lost**, 1 old whole", {"lost": 2, "old whole": 1})
    assert good.text == "0 lost, 0 mixed, 1 old whole"


@pytest.mark.parametrize(
    ("ended", "found", "text"),
    [
        ("raises StoreFull", "old whole", "save raises StoreFull; old whole"),
        ("raises OSError", "new whole", "save raises OSError; **old overwritten**"),
        ("returns", "lost", "**save returns as if all were well**; **old lost**"),
    ],
)
def test_a_failed_save_is_described_by_its_error_and_by_what_can_be_loaded(ended: str, found: str, text: str) -> None:
    assert faults.describe_failure(ended, found).text == text


def test_a_contestant_that_is_not_installed_has_no_column_and_a_note() -> None:
    result = {
        "seed": 1,
        "versions": {"torch": "2"},
        "columns": ["DCP"],
        "rows": [{"fault": "fire", "cells": {"DCP": {"text": "**lost**"}}}],
    }

    table = faults.render(result)

    assert table.startswith("| fault | DCP |\n| --- | --- |\n| fire | **lost** |\n")
    assert "safetensors is left out: it is not installed." in table
    assert "Seed 1; torch 2." in table


def test_the_page_shows_what_the_recorded_run_saw() -> None:
    recorded = json.loads(faults.RECORD.read_text(encoding="utf-8"))
    page = faults.PAGE.read_text(encoding="utf-8")

    assert f"{faults.BEGIN}\n{faults.render(recorded)}{faults.END}" in page
    assert [row["fault"].split()[0] for row in recorded["rows"]] == ["one", "kill", "disk", "one", "power"]
    assert all("**" not in row["cells"]["Holdfast"]["text"] for row in recorded["rows"])


def test_a_bad_cell_of_holdfast_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = ("fire", lambda name, trials, work: faults.count_outcomes(["lost"], bad=("lost",)))
    fine = ("water", lambda name, trials, work: faults.count_outcomes(["old whole"], bad=("lost",)))
    monkeypatch.setattr(faults, "FAULTS", {"fire": worse, "water": fine})

    statuses = [faults.main(["--quick", "--only", name]) for name in ("fire", "water")]

    assert statuses == [1, 0]
    assert "| fire | **1 lost** |" in capsys.readouterr().out


def _iter_until_killed() -> Iterator[str]:
    yield "alive"
    os.kill(os.getpid(), signal.SIGKILL)


def _iter_until_error() -> Iterator[str]:
    yield str(1 // 0)


@pytest.mark.slow
def test_a_process_that_dies_is_distinguished_from_a_mistake_in_the_trial() -> None:
    with faults.started(_iter_until_killed) as wait_word:
        words = [wait_word(60), wait_word(60)]

    assert words == ["alive", faults.DIES]
    with faults.started(_iter_until_error) as wait_word, pytest.raises(RuntimeError, match="the trial itself failed"):
        wait_word(60)


@pytest.mark.slow
def test_a_run_tries_every_fault_on_each_installed_format(tmp_path: Path) -> None:
    result = faults.run({"flip": 2, "kill": 1}, faults.FAULTS, tmp_path)

    expected = [name for name in faults.COLUMNS if name != "safetensors" or find_spec("safetensors")]
    assert result["columns"] == expected
    assert [list(row["cells"]) for row in result["rows"]] == [expected] * len(faults.FAULTS)
    assert [row["fault"] for row in result["rows"] if "**" in row["cells"]["Holdfast"]["text"]] == []
