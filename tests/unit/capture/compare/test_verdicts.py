"""When two tensors are close: by noise of a repeated run, or by distance from a reference."""

from __future__ import annotations

import torch
import torch.utils.checkpoint

from holdfast.capture.compare.compare import diff_runs
from holdfast.capture.stored.events import Event
from tests.kit.made_runs import hash_elsewhere
from tests.kit.planted_faults import Plant, Tiny, find_origin, leave_dropout_on, name, train, train_well
from tests.kit.runs_in_memory import make_run


def test_a_repeated_run_shows_what_is_noise() -> None:
    def shake(by: float) -> Plant:
        def plant(model: Tiny) -> None:
            model.layers[0].mix = lambda x: torch.relu(x) * (1 + by)  # type: ignore[assignment]

        return plant

    good, again, bad = train_well(), train(shake(1e-4), steps=1), train(shake(1.5e-4), steps=1)
    worse = train(shake(1e-2), steps=1)

    assert diff_runs(good, bad).origin is not None
    assert diff_runs(good, bad, noise=again).origin is None
    found = diff_runs(good, worse, noise=again).origin
    assert found is not None
    assert found.fqn == "layers.0"


def test_an_exact_repetition_leaves_no_noise_to_hide_in() -> None:
    def plant(model: Tiny) -> None:
        model.layers[0].mix = lambda x: torch.relu(x) * (1 + 2**-22)  # type: ignore[assignment]

    good, again, bad = train_well(), train(steps=1), train(plant, steps=1)

    assert diff_runs(good, bad).origin is None
    found = diff_runs(good, bad, noise=again).origin
    assert found is not None
    assert found.fqn == "layers.0"


def test_a_reference_run_shows_whether_the_second_is_worse_than_the_first() -> None:
    def narrow(model: Tiny) -> None:
        model.layers[0].mix = lambda x: torch.relu(x.bfloat16()).float()  # type: ignore[assignment]

    def narrow_after(model: Tiny) -> None:
        model.layers[0].mix = lambda x: torch.relu(x).bfloat16().float()  # type: ignore[assignment]

    def wrong(model: Tiny) -> None:
        model.layers[0].mix = lambda x: torch.relu(x.bfloat16() * 1.1).float()  # type: ignore[assignment]

    truth, a, b, bad = (train(plant, steps=1) for plant in (lambda model: None, narrow, narrow_after, wrong))

    assert diff_runs(a, b, reference=truth).origin is None
    assert diff_runs(a, bad, reference=truth).origin is not None


def test_digests_alone_name_the_origin_and_say_that_the_distance_is_not_known() -> None:
    origin = find_origin(leave_dropout_on, level="digest")

    assert name(origin) == (0, "forward", "layers.1.drop", "output")
    assert origin.measure is not None
    assert origin.measure.basis == "digest"
    assert "by how much is not known" in origin.measure.note


def test_stats_alone_give_a_lower_bound() -> None:
    origin = find_origin(leave_dropout_on, level="stats")

    assert origin.measure is not None
    assert origin.measure.basis == "stats"
    assert (origin.measure.max_abs or 0) > 0


def test_digests_of_different_kinds_neither_differ_nor_match() -> None:
    good, bad = train_well(), train(leave_dropout_on, steps=1)
    remote = make_run(good.facts, [hash_elsewhere(event) for step in good.steps for event in good.events(step)])
    bare = make_run(bad.facts, [strip(event) for step in bad.steps for event in bad.events(step)])

    for a, b in ((remote, bare), (bare, remote)):
        found = diff_runs(a, b)
        assert found.origin is None
        assert not found.is_match
        assert found.counts["unknown"] == len([row for row in found.rows if row.cls == "unknown"]) > 0
        assert "could not be compared: their digests are of different kinds" in found.headline
        assert any(note.startswith("digests are of different kinds") for note in found.notes)


def strip(event: Event) -> Event:
    """Return an event as level "digest" records it."""
    return event._replace(leaf="", stats=None)
