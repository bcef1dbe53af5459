"""A run of sharded ranks is compared with a run of one process: shards are assembled first."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.testing.ranks import run_ranks
from tests.integration.capture import sharded_training
from tests.kit.capabilities import FSDP
from tests.kit.patience import RUN_S

pytestmark = [FSDP, pytest.mark.slow]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> holdfast.Store:
    """Runs of one process and of two ranks, one of these with a weight that is off."""
    path = tmp_path_factory.mktemp("runs")
    store = holdfast.open(path)
    sharded_training.train(store, "alone", sharded_training.make_model())
    for name, fault in (("sharded", 0.0), ("off", 1e-4)):
        run_ranks(2, sharded_training.train_sharded, str(path), name, fault, timeout_s=RUN_S)
    return store


def test_a_sharded_run_is_that_of_one_process(store: holdfast.Store) -> None:
    found = store.diff_runs("alone", "sharded")

    assert found.origin is None, found.headline
    assert found.is_match


def test_what_was_compared_of_parameters_is_whole(store: holdfast.Store) -> None:
    sharded = [event for event in store.run("sharded").events(0) if event.site.kind == "parameter"]

    assert {event.placement for event in sharded} == {"Shard(dim=0)"}
    assert {event.global_shape for event in sharded} >= {(9, 6), (5, 9)}


def test_a_weight_of_one_shard_that_is_off_is_named(store: holdfast.Store) -> None:
    origin = store.diff_runs("alone", "off").origin

    assert origin is not None
    assert (origin.step, origin.phase, origin.fqn) == (0, "forward", "2.weight")


def test_ranks_of_one_run_agree(store: holdfast.Store) -> None:
    assert store.diff_runs("sharded", "sharded").is_equal
