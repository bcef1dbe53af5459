"""The suite of deltas trains a model, and measures what it claims."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.kit.compressed_peers import Format, State, make_zipnn_peers, verify_state
from bench.kit.measure import WrongResult
from bench.kit.trained_states import LATE_RATE, Training, iter_trained
from bench.suites import deltas

_TINY = Training(width=64, layers=1, warm_steps=3)


@pytest.fixture(scope="module")
def pair() -> deltas.Pair:
    states = [deltas.BF16.select(trained) for trained in iter_trained(_TINY, 2)]
    return deltas.Pair(deltas.BF16, 2, states[0], states[2])


def test_states_are_those_of_adamw_at_the_late_rate() -> None:
    states = [deltas.KINDS[2].select(trained) for trained in iter_trained(_TINY, 1)]
    name = "layers.layers.0.linear1.weight"
    step = states[1][f"model.{name}"] - states[0][f"model.{name}"]

    assert 0.5 * LATE_RATE < step.abs().max() < 10 * LATE_RATE
    assert states[0].keys() == states[1].keys()
    assert len(states[0]) == 3 * len([key for key in states[0] if key.startswith("model.")])
    assert all((tensor >= 0).all() for key, tensor in states[0].items() if key.startswith("exp_avg_sq."))


def test_training_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    assert len(list(iter_trained(_TINY, 1))) == 2
    assert torch.get_num_threads() == before


def test_the_stored_share_is_that_of_the_second_save_alone(pair: deltas.Pair, tmp_path: Path) -> None:
    rows = {row.workload: row for row in deltas._measure_formats(pair, 1, tmp_path)}

    stored = rows["bf16, 2 steps apart: stored"].figures
    own = {"raw", "fast", "small", "raw + deltas", "small + deltas", "fast + deltas"}
    assert own | {"torch.save + zstd", "safetensors + zstd", "DCP + zstd"} <= stored.keys()
    assert stored["small + deltas"] < stored["fast + deltas"] < stored["small"] < stored["fast"] < stored["raw"] < 1.2
    assert stored["raw + deltas"] == pytest.approx(stored["small + deltas"], abs=0.02)  # the base is not counted
    assert stored["small + deltas"] < 0.5 * stored["small"]
    for way in ("save", "save, one core", "load", "load, one core"):
        assert rows[f"bf16, 2 steps apart: {way}"].figures.keys() == stored.keys()
    assert list(tmp_path.iterdir()) == []


def test_a_format_that_loads_the_base_instead_ends_the_run(
    pair: deltas.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(state: State, path: Path) -> None:
        path.mkdir()

    wrong = Format(save, lambda path: pair.base)
    monkeypatch.setattr(deltas, "_make_formats", lambda like: {deltas.OWN: wrong})
    with pytest.raises(WrongResult):
        deltas._measure_formats(pair, 1, tmp_path)


@pytest.mark.parametrize("kind", deltas.KINDS[:2], ids=lambda kind: kind.label)
def test_zipnn_returns_what_was_saved_alone_and_with_a_base(kind: deltas.Kind, tmp_path: Path) -> None:
    base, _, state = (kind.select(trained) for trained in iter_trained(_TINY, 2))
    peers = make_zipnn_peers(state)
    if not peers:
        pytest.skip("ZipNN is not installed: make bench installs it")
    for number, peer in enumerate(peers.values()):
        place = tmp_path / str(number)
        if peer.save_base is not None:
            peer.save_base(base, place)
        peer.save(state, place)
        verify_state(state, peer.load(place))


def test_deltas_are_encoded_and_decoded_with_each_level_without_a_store(pair: deltas.Pair) -> None:
    rows = {row.workload: row for row in deltas._measure_xor(pair, 1)}

    assert len(rows) == 4
    shares = {
        level: float(rows[f"bf16, 2 steps apart: encode deltas with '{level}', one core"].note.split()[0])
        for level in ("fast", "small")
    }
    assert 0 < shares["small"] < shares["fast"] < 0.5


def test_a_delta_that_is_decoded_to_other_bytes_ends_the_run(
    pair: deltas.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "apply_delta", lambda stored, target, scratch: None)
    with pytest.raises(WrongResult):
        deltas._measure_xor(pair, 1)


@pytest.mark.slow
def test_a_run_of_ten_saves_counts_every_byte_of_its_store(tmp_path: Path) -> None:
    states = {step: deltas.BF16.select(trained) for step, trained in enumerate(iter_trained(_TINY, 9))}
    row = deltas._measure_run({10 * step: state for step, state in states.items()}, tmp_path)

    shares = row.figures
    assert shares["small"] / 10 < shares["small + deltas"] < 0.5 * shares["small"] < shares["raw"]
