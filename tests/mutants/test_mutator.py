from __future__ import annotations

import ast

import pytest

from tests.matrix.environments import ROOT
from tests.mutants.mutator import GUARD, KINDS, apply_mutant, find_mutants
from tests.mutants.tracing import list_modules


def list_changes(source: str) -> set[tuple[str, str]]:
    return {(mutant.kind, apply_mutant(source, mutant)) for mutant in find_mutants("repo/files.py", source)}


@pytest.mark.parametrize(
    ("source", "kind", "changed"),
    [
        ("a < b", "comparison", "(a <= b)"),
        ("a not in b", "comparison", "(a in b)"),
        ("a or b", "and/or", "(a and b)"),
        ("c(not a)", "not", "c((a))"),
        ("f(3)", "integer", "f(4)"),
        ("a[b:]", "slice", "a[(b + 1):]"),
        ("ä + b", "arithmetic", "(ä - b)"),
        ("a += b", "arithmetic", "a -= b"),
        ("if a: b", "condition", "if True: b"),
        ("if a: b", "condition", "if False: b"),
        ("f(a)", "dropped call", "pass"),
        ("file.fsync()", GUARD, "pass"),
        ("if a:\n    raise E(1 + 1)", "raise", "if a:\n    pass"),
        ("def f() -> bool:\n    return a", "return", "def f() -> bool:\n    return None"),
        ("def f(*, a=True): ...", "default", "def f(*, a=False): ..."),
    ],
)
def test_a_kind_of_mistake_is_made(source: str, kind: str, changed: str) -> None:
    assert kind in KINDS
    assert (kind, changed) in list_changes(source)


@pytest.mark.parametrize(
    "source",
    [
        "a: Literal[3]",
        "def f(a: Literal[3]) -> Literal[3]: ...",
        '"""Text."""',
        "assert a < b",
        "if TYPE_CHECKING:\n    import a",
        "__all__ = [f(1 + a)]",
        "def __repr__(self):\n    return f(1)",
        "warnings.warn('text', stacklevel=2)",
        "f'{a + b}'",
        "a + 'text'",
    ],
)
def test_what_makes_no_difference_to_a_program_is_left_alone(source: str) -> None:
    assert list_changes(source) == set()


def test_mutants_of_a_module_can_be_compiled_and_have_keys_of_their_own() -> None:
    module = "objects/url.py"
    source = ROOT.joinpath("src/holdfast", module).read_text(encoding="utf-8")
    mutants = find_mutants(module, source)
    assert module in list_modules()
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 10
    for mutant in mutants:
        assert ast.dump(ast.parse(apply_mutant(source, mutant))) != ast.dump(ast.parse(source)), mutant.key
