"""Long lists of leaves are folded: repeated layers to `#`, RNG state to one line; every leaf is in one line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.trees.folding import RNG_LABEL, FoldableLeaf, fold_leaves

KEYS = st.sampled_from(["layers", "0", "1", "2", "10", "w", "b", "07", "²", ""])
LEAVES = st.builds(
    FoldableLeaf,
    st.lists(KEYS, min_size=1, max_size=4).map(".".join),
    st.sampled_from(["float32 (2,)", "int64 ()", "3"]),
    st.booleans(),
)


def fold(*lines: tuple[str, str]) -> list[tuple[str, str, int]]:
    """Fold tensors, given by name and label; return name, label and number of leaves of each line."""
    leaves = [FoldableLeaf(name, label, is_plain=False) for name, label in lines]
    return [(found.name, found.label, len(found.members)) for found in fold_leaves(leaves)]


def test_repeated_layers_become_one_line() -> None:
    lines = [(f"layers.{number}.{part}", "float32") for number in range(6) for part in ("w", "b")]

    assert fold(("embed", "float32"), *lines) == [
        ("embed", "float32", 1),
        ("layers.#.w", "6 x float32", 6),
        ("layers.#.b", "6 x float32", 6),
    ]


def test_a_number_that_is_the_same_everywhere_is_kept() -> None:
    lines = [(f"stage.1.layers.{number}.w", "float32") for number in range(3)]

    assert fold(*lines) == [("stage.1.layers.#.w", "3 x float32", 3)]


def test_two_numbers_that_differ_are_both_folded() -> None:
    lines = [(f"layers.{layer}.experts.{expert}", "float32") for layer in range(2) for expert in range(4)]

    assert fold(*lines) == [("layers.#.experts.#", "8 x float32", 8)]


def test_leaves_of_another_dtype_or_shape_have_a_line_of_their_own() -> None:
    lines = [(f"layers.{number}", "float32" if number % 2 else "int64") for number in range(6)]

    assert fold(*lines) == [("layers.#", "3 x int64", 3), ("layers.#", "3 x float32", 3)]


def test_two_layers_are_listed_one_by_one() -> None:
    lines = [("layers.0", "float32"), ("layers.1", "float32")]

    assert fold(*lines) == [("layers.0", "float32", 1), ("layers.1", "float32", 1)]


def test_different_plain_values_are_folded_to_the_first_and_the_last() -> None:
    leaves = [FoldableLeaf(f"params.{number}", str(number), is_plain=True) for number in range(72)]

    (found,) = fold_leaves(leaves)

    assert (found.name, found.label) == ("params.#", "72 values: 0, 1 ... 71")


def test_a_few_different_values_are_listed_one_by_one() -> None:
    leaves = [FoldableLeaf(f"betas.{number}", str(number), is_plain=True) for number in range(4)]

    assert [found.label for found in fold_leaves(leaves)] == ["0", "1", "2", "3"]


def test_rng_state_becomes_one_line_and_what_is_beside_it_stays() -> None:
    names = ["python.version", "python.words", "python.gauss", "numpy.bit_generator", "torch", "accelerator"]
    lines = [("step", "1"), *((f"state.rng.{name}", "bytes") for name in names), ("state.rng2", "bytes")]

    assert fold(*lines) == [("step", "1", 1), ("state.rng", f"{RNG_LABEL}, 6 values", 6), ("state.rng2", "bytes", 1)]


def test_what_only_looks_like_rng_state_is_listed() -> None:
    assert fold(("rng.python.version", "3"), ("rng.torch", "bytes")) == [
        ("rng.python.version", "3", 1),
        ("rng.torch", "bytes", 1),
    ]


@given(st.lists(LEAVES, max_size=30))
def test_every_leaf_is_in_exactly_one_line(leaves: list[FoldableLeaf]) -> None:
    folds = fold_leaves(leaves)

    members = [position for found in folds for position in found.members]
    assert sorted(members) == [*range(len(leaves))]
    assert [found.members[0] for found in folds] == sorted(found.members[0] for found in folds)
    assert all(found.name == leaves[found.members[0]].name for found in folds if len(found.members) == 1)
