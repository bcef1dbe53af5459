"""The planning benchmark: simulated ranks send what real ranks would send, and every row is present."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kit.claimed_ranks import EchoRounds, cut_shape, make_shapes
from bench.kit.measure import TINY
from bench.suites import planning as planning_suite
from holdfast.distributed.checkpoint.plan import Sketch, is_covered, merge, sketch_boxes
from holdfast.distributed.talk import wire
from holdfast.distributed.talk.rounds import RoundCall
from holdfast.repo.format.boxes import Box, volume


@pytest.mark.slow  # torch takes seconds to load what a DTensor needs
def test_every_size_gives_its_rows(tmp_path: Path) -> None:
    results = planning_suite.run(TINY, tmp_path)

    assert [result.workload.partition(",")[0] for result in results] == [
        *["plan a save"] * 2,
        "plan a load",
        "plan a save",
        "plan a load",
        *["bytes at the busiest rank"] * 2,
    ]
    assert all(result.figure > 0 for result in results if result.unit != "power")


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_the_simulated_sketches_complete_that_of_the_first_rank(ranks: int) -> None:
    box = cut_shape((128, 4), 0, ranks)
    own = sketch_boxes([("x", "bf16", (128, 4), box)], b"12345678")
    rounds = EchoRounds(ranks)
    rounds.arrive(RoundCall("all_gather", "cover"), wire.encode((own.total, list(own.origins))))

    sketches = [Sketch(total, tuple(origins)) for total, origins in map(wire.decode, rounds.collect())]

    assert len(sketches) == ranks
    assert is_covered(merge(sketches))
    assert not is_covered(merge(sketches[:-1]))


@pytest.mark.parametrize("ranks", [1, 3, 8, 200])
def test_shards_cover_each_row_once(ranks: int) -> None:
    boxes = [cut_shape((128, 4), rank, ranks) for rank in range(ranks)]

    assert sum(map(volume, boxes)) == 128 * 4
    assert all(box.stops[0] <= 128 for box in boxes)
    assert Box((0, 0), (0, 0)) not in boxes


def test_parameters_are_as_many_as_requested_with_distinct_names() -> None:
    shapes = make_shapes(1000)

    assert len(shapes) == 1000
