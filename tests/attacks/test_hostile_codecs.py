"""Forged encoded chunks are refused or decoded into their own memory: no crash, no wait, no memory beyond the chunk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attacks.hostile import GOOD, build
from attacks.hostile_codecs import CODEC_ATTACKS, RAW, iter_forged, make_honest
from tests.attacks.test_attacks import MAX_CPU_S, ROOT, attack, find_faults
from tests.kit.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 2000), pytest.param(2, 200_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_forged_chunks_are_decoded_in_a_process_with_little_memory(seed: int, count: int) -> None:
    words = [sys.executable, "-m", "attacks.hostile_codecs", str(seed), str(count)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    number, longest_s = ended.stdout.split()
    assert int(number) > 20_000 + count
    assert float(longest_s) < MAX_CPU_S


def test_forged_chunks_are_many_and_not_honest() -> None:
    forged, honest = list(iter_forged(0, 10)), make_honest("fast", RAW)
    assert len(forged) > 20_000
    assert sum(stored == honest for stored in forged) < 200


@pytest.mark.slow
@pytest.mark.parametrize("name", CODEC_ATTACKS)
def test_an_attack_ends_fast_small_and_with_a_sentence(name: str, tmp_path: Path) -> None:
    report = attack(name, tmp_path, plant=CODEC_ATTACKS[name])
    assert list(find_faults(report)) == []
    assert report["runs"][-1]["out"] == GOOD["config.json"].decode()
    codes = {run["verb"]: run["code"] for run in report["runs"]}
    assert codes["cat evil weights"] == codes["get evil OUT"] == 2
    assert codes["check --read"] == 1


def test_every_attack_plants_a_snapshot(tmp_path: Path) -> None:
    for name, plant in CODEC_ATTACKS.items():
        nest = build(tmp_path / name)
        plant(nest)
        assert len(list((nest.root / "packs").iterdir())) == 2
