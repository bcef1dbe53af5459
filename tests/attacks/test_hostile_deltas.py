"""Forged deltas are refused, each in less than a second and with a sentence, and nothing else of the store is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from attacks.hostile import GOOD, build
from attacks.hostile_deltas import DELTA_ATTACKS
from holdfast.errors import Corrupt, NewerFormat
from tests.attacks.test_attacks import attack, find_faults
from tests.kit.saving import load_bytes


@pytest.mark.parametrize("name", DELTA_ATTACKS)
def test_a_forged_delta_is_never_loaded(name: str, tmp_path: Path) -> None:
    nest = build(tmp_path)
    DELTA_ATTACKS[name](nest)
    with holdfast.open(nest.root) as store:
        with pytest.raises((Corrupt, NewerFormat)):
            load_bytes(store.repository, "evil")
        assert "error" in {finding.severity for finding in store.check(read=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", DELTA_ATTACKS)
def test_an_attack_ends_fast_small_and_with_a_sentence(name: str, tmp_path: Path) -> None:
    report = attack(name, tmp_path, plant=DELTA_ATTACKS[name])
    assert list(find_faults(report)) == []
    assert report["runs"][-1]["out"] == GOOD["config.json"].decode()
    codes = {run["verb"]: run["code"] for run in report["runs"]}
    assert codes["cat evil weights"] == codes["get evil OUT"] == 2
    assert codes["check --read"] == 1
