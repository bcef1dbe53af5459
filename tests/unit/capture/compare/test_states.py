"""States as last observed: which modules contain one that differs, also under other names."""

from __future__ import annotations

from holdfast.capture.compare.classify import States, find_name, find_optimizer, is_setting
from holdfast.capture.compare.step_graph import Standing
from holdfast.capture.stored.events import Event, EventKind, Phase, Site


def make_event(fqn: str, kind: EventKind = "parameter", phase: Phase = "forward", path: str = "") -> Event:
    return Event(0, Site(0, phase, kind, fqn, 0, path), 0, "float32", (1,), b"")


def note(states: States, fqn: str, standing: Standing) -> None:
    states.note(make_event(fqn), standing)


def test_a_tied_parameter_counts_for_the_modules_of_all_its_names() -> None:
    states = States()
    states.set_tied({"head.weight": "embed.weight"})

    note(states, "embed.weight", "differs")

    assert states.has_bad("head")
    assert states.has_bad("embed")
    assert states.has_bad()
    assert not states.has_bad("layers")
    assert list(states.iter_bad()) == ["embed.weight", "head.weight"]
    assert states.find_below("head") == (("head.weight", "differs"),)


def test_a_parameter_that_is_equal_again_counts_no_longer_even_if_it_was_untied_meanwhile() -> None:
    states = States()
    states.set_tied({"head.weight": "embed.weight"})
    note(states, "embed.weight", "differs")
    states.set_tied({})

    note(states, "embed.weight", "equal")

    assert not any(map(states.has_bad, ("", "embed", "head")))


def test_what_the_optimizer_made_counts_from_the_next_step_on() -> None:
    states = States()
    note(states, "weight", "equal")

    states.note(make_event("weight", phase="optimizer"), "differs")

    assert not states.has_bad()
    states.end_step()
    assert states.has_bad()


def test_the_settings_of_a_group_name_their_optimizer() -> None:
    only = make_event("param_groups.0", "optimizer", "optimizer", "['lr']")
    second = make_event("param_groups.1.0", "optimizer", "optimizer", "['lr']")

    assert is_setting(only)
    assert find_name(only) == "param_groups.0['lr']"
    assert (find_optimizer(only), find_optimizer(second)) == ("", "1")
