"""Events of two runs are paired, whatever differs between the runs, and quickly."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.capture.compare.align import Alignment, align, strip_wrappers
from holdfast.capture.stored.events import Event, EventKind
from tests.kit.made_runs import make_event

KINDS: list[EventKind] = ["input", "output", "grad", "parameter"]
events = st.builds(
    make_event,
    st.just(0),
    st.sampled_from(["", "a", "a.b", "a.c", "d.0", "d.1", "module.a"]),
    st.sampled_from(KINDS),
    digest=st.sampled_from([b"1", b"2", b"3"]),
    shape=st.sampled_from([(), (2,), (2, 3), (0,)]),
    call=st.integers(0, 2),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


def number(listed: list[Event]) -> list[Event]:
    return [event._replace(seq=seq) for seq, event in enumerate(listed)]


def distinct(listed: list[Event]) -> list[Event]:
    return number([*{event.site: event for event in listed}.values()])


steps = st.lists(events, max_size=40).map(number)
distinct_steps = st.lists(events, max_size=40).map(distinct)


def check_whole(found: Alignment, a: list[Event], b: list[Event]) -> None:
    """Every event is in one pair, or listed; pairs come in the order of the first run."""
    assert sorted([pair.a.seq for pair in found.pairs] + [event.seq for event in found.only_a]) == [*range(len(a))]
    assert sorted([pair.b.seq for pair in found.pairs] + [event.seq for event in found.only_b]) == [*range(len(b))]
    assert [pair.a.seq for pair in found.pairs] == sorted(pair.a.seq for pair in found.pairs)


@given(steps)
def test_a_run_is_paired_with_itself(listed: list[Event]) -> None:
    found = align(listed, listed)

    check_whole(found, listed, listed)
    assert all(pair.a == pair.b and pair.how == "exact" for pair in found.pairs)
    assert not found.only_a
    assert not found.only_b


@given(steps, steps)
def test_any_two_runs_are_aligned_and_nothing_is_lost(a: list[Event], b: list[Event]) -> None:
    check_whole(align(a, b), a, b)


@given(steps, st.randoms())
def test_another_order_leaves_nothing_unpaired(listed: list[Event], random: st.DataObject) -> None:
    mixed = [*listed]
    random.shuffle(mixed)  # type: ignore[attr-defined]

    found = align(listed, number(mixed))

    check_whole(found, listed, number(mixed))
    assert not found.only_a
    assert not found.only_b


@given(distinct_steps, st.data())
def test_what_is_missing_on_either_side_leaves_the_rest_paired(listed: list[Event], data: st.DataObject) -> None:
    in_a = [event for event in listed if data.draw(st.booleans())]
    in_b = [event for event in listed if data.draw(st.booleans())]
    a, b = number(in_a), number(in_b)

    exact = {pair.a.site for pair in align(a, b).pairs if pair.how == "exact"}

    assert exact == {event.site for event in in_a} & {event.site for event in in_b}


@given(st.lists(st.integers(1, 1000), unique=True, max_size=30), st.data())
def test_renamed_modules_are_paired_by_shape_and_order(sizes: list[int], data: st.DataObject) -> None:
    ours = number([make_event(0, f"old.{size}", shape=(size,), digest=b"a") for size in sizes])
    kept = [size for size in sizes if data.draw(st.booleans())]
    theirs = number([make_event(0, f"new.{size}x", shape=(size,), digest=b"b") for size in kept])

    found = align(ours, theirs)

    assert [(pair.a.shape, pair.b.shape, pair.how) for pair in found.pairs] == [((s,), (s,), "shape") for s in kept]
    assert [event.shape for event in found.only_a] == [(size,) for size in sizes if size not in kept]


def test_wrappers_have_no_part_in_names() -> None:
    a = [make_event(0, "layers.0.up", digest=b"a")]
    b = [make_event(0, "module._orig_mod.layers.0._checkpoint_wrapped_module.up", digest=b"b")]

    (pair,) = align(a, b).pairs

    assert pair.how == "name"
    assert strip_wrappers(b[0].site.fqn) == "layers.0.up"


@pytest.mark.parametrize(
    ("names", "ours", "theirs"),
    [
        ({"encoder": "blocks"}, "encoder.0.up", "blocks.0.up"),
        ({"encoder.layer.*.out": "blocks.*.proj"}, "encoder.layer.3.out.weight", "blocks.3.proj.weight"),
        ({"a.*.b.*": "x.*.y.*"}, "a.1.b.2", "x.1.y.2"),
        ({"a": "b", "c": "d"}, "c", "d"),
    ],
)
def test_names_that_the_user_maps_are_paired(names: dict[str, str], ours: str, theirs: str) -> None:
    a = [make_event(0, ours, digest=b"a", shape=(3,))]
    b = [make_event(0, theirs, digest=b"b", shape=(4,))]

    assert [pair.how for pair in align(a, b, names=names).pairs] == ["name"]
    assert align(a, b).pairs == ()


def test_a_pattern_does_not_reach_across_components() -> None:
    a = [make_event(0, "encoder.extra", shape=(3,))]
    b = [make_event(0, "encoderx.extra", shape=(4,))]

    assert align(a, b, names={"encoder": "encoderx"}).pairs[0].how == "name"
    assert align([make_event(0, "encoder2.extra", shape=(3,))], b, names={"encoder": "encoderx"}).pairs == ()


def test_results_of_a_call_at_another_path_are_paired_by_the_call() -> None:
    a = [make_event(0, "m", path="[0]", shape=(2,)), make_event(1, "m", path="[1]", shape=(3,))]
    b = [make_event(0, "m", path=".first", shape=(3,)), make_event(1, "m", path=".second", shape=(2,))]

    found = align(a, b)

    assert [(pair.a.shape, pair.b.shape, pair.how) for pair in found.pairs] == [
        ((2,), (2,), "call"),
        ((3,), (3,), "call"),
    ]


def test_the_same_bytes_elsewhere_are_the_last_resort() -> None:
    a, b = [make_event(0, "m", "input", digest=b"x")], [make_event(0, "n", "output", digest=b"x")]

    assert [pair.how for pair in align(a, b).pairs] == ["digest"]


def test_renamed_layers_with_an_insertion_stay_paired_by_their_equal_neighbours() -> None:
    ours = number([make_event(0, f"old.{n}", digest=b"%d" % n) for n in range(20)])
    theirs = number(
        [make_event(0, f"new.{n}", digest=b"changed" if n == 13 else b"%d" % n) for n in range(20)]
        + [make_event(0, "new.last", digest=b"?")]
    )
    theirs.insert(5, make_event(0, "new.inserted", digest=b"!"))

    found = align(ours, number(theirs))

    assert [(pair.a.site.fqn[4:], pair.b.site.fqn[4:]) for pair in found.pairs] == [(str(n), str(n)) for n in range(20)]
    assert [event.site.fqn for event in found.only_b] == ["new.inserted", "new.last"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["same", "renamed", "alike", "mixed"])
def test_fifty_thousand_events_take_seconds(kind: str) -> None:
    count = 50_000
    prefix = "old" if kind == "same" else "new"
    shapes = 1 if kind == "alike" else 7
    ours = number([make_event(0, f"old.{n}", shape=(n % shapes,), digest=b"a%d" % n) for n in range(count)])
    order = [(n * 7919) % count for n in range(count)] if kind == "mixed" else [*range(count)]
    theirs = number([make_event(0, f"{prefix}.{n}", shape=(n % shapes,), digest=b"b%d" % n) for n in order[7:]])

    start = time.process_time()
    found = align(ours, theirs)

    assert len(found.pairs) >= (count - 7) * 0.9
    assert time.process_time() - start < 20


def test_events_are_paired_by_bytes_only_if_they_have_a_digest_of_the_same_kind() -> None:
    host = make_event(0, "a", "output", digest=b"1")
    remote = host._replace(site=host.site._replace(fqn="b", kind="grad"), digest=b"", blake3=b"1")
    both = remote._replace(digest=b"1")

    assert align([host], [remote]).pairs == ()
    assert [pair.how for pair in align([host], [both]).pairs] == ["digest"]
    assert [pair.how for pair in align([remote], [both._replace(site=host.site)]).pairs] == ["digest"]
