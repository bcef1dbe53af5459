"""A miss is explained by the nearest that is stored: which parts differ, from what to what, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.compile_cache.artifacts.why import Candidate, Explanation, explain
from holdfast.compile_cache.key_parts import PARTS, GraphKey, hash_parts
from holdfast.errors import Corrupt
from holdfast.json_text import Json

_PARTS: Final[dict[str, Json]] = {
    "graph": ["in0", "%0 = torch.sin(in0)", "%1 = torch.mul(%0, 2)", "return (%1,)"],
    "constants": [{"dtype": "torch.float32", "digest": "ab" * 32}],
    "inputs": {"inputs": [{"dtype": "torch.float32", "size": [2, 4]}, {"number": "s0"}], "symbols": {"s0": "2 to oo"}},
    "aliasing": [],
    "custom_ops": {"my::op": {"backward": "12" * 32}},
    "flags": {"grad": True, "autocast": {"cpu": None}},
    "config": {"inductor": {"cpp.march": None, "fallback_random": False}},
    "options": {},
    "system": {"cpu_isa": "AVX512", "cpu_instructions": "avx avx2 avx512f fma " + "x" * 80},
}


def key_with(**parts: Json) -> GraphKey:
    return hash_parts({part: parts.get(part, _PARTS[part]) for part in PARTS})


def stored(key: GraphKey, name: str = "stored", *, guards: str = "") -> Candidate:
    return Candidate(name, key.digests, lambda: key.parts, guards)


def headline(old: Mapping[str, Json], new: Mapping[str, Json]) -> str:
    return explain(key_with(**new), [stored(key_with(**old))]).headline


def swap(part: str, *path: Any, to: Json) -> dict[str, Json]:
    """Return a part with one value of it replaced."""

    def replace(value: Any, rest: tuple[Any, ...]) -> Any:
        if not rest:
            return to
        copy = dict(value) if isinstance(value, dict) else list(value)
        if isinstance(copy, dict):
            copy[rest[0]] = replace(copy.get(rest[0]), rest[1:])
        else:
            copy[rest[0]] = replace(copy[rest[0]], rest[1:])
        return copy

    return {part: replace(_PARTS[part], path)}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (swap("flags", "autocast", "cpu", to="torch.bfloat16"), "flags changed (autocast.cpu None -> bfloat16)"),
        (swap("flags", "grad", to=False), "flags changed (grad True -> False)"),
        (swap("inputs", "inputs", 0, "size", to=[50, 4]), "inputs changed (input 0 size [2, 4] -> [50, 4])"),
        (swap("inputs", "inputs", 0, "parameter", to=True), "inputs changed (input 0 parameter absent -> True)"),
        (swap("inputs", "inputs", to=_PARTS["inputs"]["inputs"][:1]), "inputs changed (inputs 2 -> 1)"),
        (swap("inputs", "symbols", "s0", to="9 to oo"), "inputs changed (symbols.s0 2 to oo -> 9 to oo)"),
        (
            {"aliasing": [[[0, 0], [1, 16]]]},
            "aliasing changed (no inputs share memory -> inputs 0 (at byte 0) and 1 (at byte 16) share memory)",
        ),
        (
            swap("constants", 0, "digest", to="cd" * 32),
            "constants changed (constant 0 digest abababababab -> cdcdcdcdcdcd)",
        ),
        (
            swap("custom_ops", "my::op", "backward", to="34" * 32),
            "custom_ops changed (my::op.backward 121212121212 -> 343434343434)",
        ),
        (
            swap("config", "inductor", "cpp.march", to="x86-64-v3"),
            "config changed (inductor.cpp.march None -> x86-64-v3)",
        ),
        ({"options": {"max_autotune": True}}, "options changed (max_autotune absent -> True)"),
        (swap("system", "cpu_isa", to="AVX2"), "system changed (cpu_isa AVX512 -> AVX2)"),
        (
            swap("system", "cpu_instructions", to="avx avx2 fma vaes " + "x" * 80),
            "system changed (cpu_instructions removed avx512f, added vaes)",
        ),
        (swap("graph", 2, to="%1 = torch.mul(%0, 3)"), "graph changed (1 of 4 lines removed, 1 added)"),
    ],
)
def test_each_part_has_a_description(change: dict[str, Json], text: str) -> None:
    assert headline({}, change) == f"missed: {text}"


def test_several_parts_are_listed() -> None:
    text = headline({}, {**swap("flags", "grad", to=False), **swap("system", "cpu_isa", to="AVX2")})

    assert text == "missed: flags changed (grad True -> False); system changed (cpu_isa AVX512 -> AVX2)"


def test_the_line_is_shortened_and_the_details_are_not() -> None:
    new = {"options": {f"option{number}": number for number in range(6)}}

    found = explain(key_with(**new), [stored(key_with())])

    assert found.headline == (
        "missed: options changed (option0 absent -> 0, option1 absent -> 1, option2 absent -> 2, and 3 more)"
    )
    assert len(found.details) == 6
    assert found.details[5] == "options: option5 absent -> 5"


def test_another_graph_is_explained_with_a_diff() -> None:
    found = explain(key_with(**swap("graph", 2, to="%1 = torch.mul(%0, 3)")), [stored(key_with(), "@compiled/ab/0")])

    assert found.text == (
        "missed: graph changed (1 of 4 lines removed, 1 added)\n"
        "nearest stored: @compiled/ab/0\n"
        "--- stored\n+++ now\n@@ -1,4 +1,4 @@\n"
        " in0\n %0 = torch.sin(in0)\n-%1 = torch.mul(%0, 2)\n+%1 = torch.mul(%0, 3)\n return (%1,)"
    )


def test_the_same_graph_is_nearer_than_fewer_changes() -> None:
    same_graph = key_with(**swap("flags", "grad", to=False), **swap("system", "cpu_isa", to="AVX2"))
    other_graph = key_with(**swap("graph", 2, to="%1 = torch.mul(%0, 3)"))

    found = explain(key_with(), [stored(other_graph, "other graph"), stored(same_graph, "same graph")])

    assert (found.nearest, found.changed) == ("same graph", ("flags", "system"))


def test_of_those_with_the_same_graph_the_fewest_changes_are_nearest() -> None:
    one = key_with(**swap("flags", "grad", to=False))
    two = key_with(**swap("flags", "grad", to=False), **swap("system", "cpu_isa", to="AVX2"))

    assert explain(key_with(), [stored(two, "two"), stored(one, "one")]).nearest == "one"


def test_of_graphs_that_differ_the_one_with_fewer_other_lines_is_nearest() -> None:
    far = key_with(graph=["in0", "in1", "return (in0, in1)"])
    near = key_with(**swap("graph", 2, to="%1 = torch.mul(%0, 3)"))

    assert explain(key_with(), [stored(far, "far"), stored(near, "near")]).nearest == "near"


def test_guards_are_the_reason_if_the_key_is_stored() -> None:
    found = explain(key_with(), [stored(key_with(), "@compiled/ab/0", guards="9 <= L['t0']")])

    assert found.headline == "missed: 1 entry has this key, but its shape guards do not hold: 9 <= L['t0']"
    assert found.nearest == "@compiled/ab/0"


def test_guards_that_were_tried_can_be_given() -> None:
    found = explain(key_with(), [], guards=["9 <= L['t0']", ""])

    assert found.headline == "missed: 2 entries have this key, but their shape guards do not hold: 9 <= L['t0']; (none)"


def test_an_empty_store_is_the_reason() -> None:
    assert explain(key_with(), []) == Explanation("the store has no other compiled graph")


def test_a_damaged_entry_is_explained_as_far_as_it_is_known() -> None:
    def fail() -> Mapping[str, Json]:
        raise Corrupt("damaged", key="@compiled/ab/0")

    old = key_with(**swap("flags", "grad", to=False), **swap("system", "cpu_isa", to="AVX2"))

    found = explain(key_with(), [Candidate("@compiled/ab/0", old.digests, fail)])

    assert found.headline == "missed: flags and system changed (the key of the nearest artifact cannot be read)"


def test_an_entry_of_another_format_is_explained() -> None:
    found = explain(key_with(), [Candidate("old", {"graph": key_with().digests["graph"]}, dict)])

    assert found.changed == PARTS[1:]
    assert found.headline.startswith("missed: constants changed (")


_JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3), below, max_size=3),
    max_leaves=6,
)


@given(old=st.dictionaries(st.sampled_from(PARTS), _JSON), new=st.dictionaries(st.sampled_from(PARTS), _JSON))
def test_any_parts_are_explained_and_each_that_changed_is_named(old: dict[str, Json], new: dict[str, Json]) -> None:
    key, other = key_with(**new), key_with(**old)

    found = explain(key, [stored(other)])

    changed = tuple(part for part in PARTS if key.digests[part] != other.digests[part])
    assert found.changed == changed
    assert all(f"{part} changed (" in found.headline for part in changed)
