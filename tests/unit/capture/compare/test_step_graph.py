"""The calls of a step: which events are inside a call, and which calls consume an output."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.capture.compare.step_graph import StepGraph, is_below
from holdfast.capture.stored.events import Event, EventKind, Site


def make_graph(*events: tuple[str, EventKind, str]) -> StepGraph:
    """Return a graph of events given by module, kind and content."""
    made = [
        Event(seq, Site(0, "backward" if kind == "grad" else "forward", kind, fqn, 0, ""), 0, "float32", (1,), digest)
        for seq, (fqn, kind, digest) in enumerate((fqn, kind, text.encode()) for fqn, kind, text in events)
    ]
    return StepGraph(made)


@pytest.fixture
def graph() -> StepGraph:
    return make_graph(
        ("", "input", "x"),
        ("a", "input", "x"),
        ("a", "output", "y"),
        ("b", "input", "y"),
        ("b.c", "input", "y"),
        ("b.c", "output", "z"),
        ("b", "output", "z"),
        ("", "output", "z"),
        ("a", "grad", "g"),
    )


@pytest.mark.parametrize(("fqn", "module", "found"), [("a.b", "a", True), ("ab", "a", False), ("a", "a", False)])
def test_a_name_is_below_a_module_by_whole_components(fqn: str, module: str, found: bool) -> None:
    assert is_below(fqn, module) is found


def test_every_other_name_is_below_the_model() -> None:
    assert is_below("a", "")
    assert not is_below("", "")


def list_calls(graph: StepGraph, index: int) -> Sequence[str]:
    return [call.fqn for call in graph.find_consumers(index)]


def test_an_event_is_inside_the_innermost_call_around_it(graph: StepGraph) -> None:
    inside, outermost = graph.find_enclosing(4), graph.find_enclosing(1)

    assert inside is not None
    assert outermost is not None
    assert (inside.fqn, outermost.fqn) == ("b", "")
    assert graph.find_enclosing(0) is None


def test_the_consumers_of_an_output_have_its_bytes_as_input_inner_ones_first(graph: StepGraph) -> None:
    assert list_calls(graph, 2) == ["b.c", "b"]
    assert list_calls(graph, 5) == []


def test_a_gradient_belongs_to_the_output_of_its_call(graph: StepGraph) -> None:
    assert graph.find_output(8) == 2


def test_a_parameter_belongs_to_the_innermost_module_that_was_called(graph: StepGraph) -> None:
    assert graph.find_owner("b.c.weight") == "b.c"
    assert graph.find_owner("b.d.weight") == "b"
    assert graph.find_owner("scale") == ""


def test_events_that_differ_are_listed_in_a_range(graph: StepGraph) -> None:
    graph.set_standings(["equal", "differs", "close", "differs", "missing", "equal", "differs", "equal", "equal"])

    assert list(graph.iter_bad(0, 9)) == [1, 3, 6]
    assert list(graph.iter_bad(2, 6)) == [3]
    assert graph.is_bad(1)
    assert not graph.is_bad(2)
