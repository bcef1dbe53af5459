"""Guards are arithmetic over sizes, or they are not evaluated."""

from __future__ import annotations

from typing import Final

import pytest

from holdfast.compile_cache.bundle.compiler import MAX_GUARDS_CHARS, SHARED_NAMES, GuardLanguage

LANGUAGE: Final = GuardLanguage(SHARED_NAMES | {"max"})


@pytest.mark.parametrize(
    "text",
    [
        "2 <= L['t0'] and L['t0'] <= 4096",
        "(L['t0'] % 8) == 0",
        "L['t0']*L['t1'] < 2147483648 or not (L['t0'] == 3)",
        "max(1, L['t0'] // 2) != -1",
        "math.floor(L['t0'] / 2) > 3",
        "torch.sym_float(L['t0']) < math.inf",
        "L['t0']**2 < 100",
        "(1 if L['t0'] > 3 else 0) == 1",
    ],
)
def test_guards_that_torch_writes_are_plain(text: str) -> None:
    assert LANGUAGE.is_plain(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "L.__class__",
        "L['t0'].__class__",
        "L[0]",
        "torch.load('x')",
        "math.__loader__",
        "torch.ops.load_library('x')",
        "max(key=print)",
        "max(*L)",
        "max",
        "min(1, L['t0'])",
        "torch.sym_max(1, L['t0'])",
        "max.__call__(1, 2)",
        "math.floor.__call__(1)",
        "(max or min)(1, 2)",
        "[x for x in (1,)]",
        "(lambda: 1)()",
        "L['t0'] in (1, 2)",
        "f'{L}'",
        "'a' * 10**10",
        "9**9**9",
        "(L['t0']**16)**16",
        "L['t0']**L['t1']",
        "L['t0']**99",
        "1 << 10**10",
        "(y := 1)",
        "exec('1')",
        "print",
        "",
        "L['t0'] <",
        "\0",
        "(" * 1000 + ")" * 1000,
        "1 < 2 and " * (MAX_GUARDS_CHARS // 10) + "1 < 2",
    ],
)
def test_other_texts_are_not_plain(text: str) -> None:
    assert not LANGUAGE.is_plain(text)
