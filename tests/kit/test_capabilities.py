"""Tests of something that torch lacks are skipped, and the reason names it."""

from __future__ import annotations

import pytest
import torch

from tests.kit.capabilities import (
    ABILITIES,
    LACKS,
    find_in_torch,
    is_able,
    needs_ability,
    needs_parameter,
    needs_torch,
    param_dtypes,
)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("float32", torch.float32),
        ("nn.Linear", torch.nn.Linear),
        ("utils.data.sampler.Sampler", torch.utils.data.Sampler),
        ("float31", None),
        ("no_such_module.name", None),
    ],
)
def test_names_of_torch_are_found_also_in_its_modules(name: str, found: object) -> None:
    assert find_in_torch(name) is found


def test_a_test_of_what_torch_has_is_run() -> None:
    assert needs_torch("float32", "nn.Linear").args == (False,)


def test_a_test_of_what_torch_lacks_is_skipped_with_its_name() -> None:
    mark = needs_torch("float32", "float31", "nn.Plank")

    assert mark.args == (True,)
    assert mark.kwargs == {"reason": "this torch has no float31 and no nn.Plank"}


def test_a_dtype_that_torch_lacks_is_a_parameter_that_is_skipped() -> None:
    float32, float31 = param_dtypes("float32", "float31")

    assert (float32.id, float32.values, float32.marks[0].args) == ("torch.float32", (torch.float32,), (False,))
    assert (float31.id, float31.values, float31.marks[0].args) == ("torch.float31", (None,), (True,))


def test_a_parameter_that_a_function_lacks_is_named() -> None:
    has, lacks = needs_parameter("nn.Linear", "bias"), needs_parameter("nn.Linear", "colour")

    assert has.args == (False,)
    assert (lacks.args, lacks.kwargs) == ((True,), {"reason": "this torch has no colour= of nn.Linear"})


def test_a_test_of_what_torch_cannot_do_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("not implemented")

    monkeypatch.setattr("tests.kit.capabilities.ABILITIES", {"fly": fail, "walk": lambda: None})
    lacks, has = needs_ability("walk", "fly"), needs_ability("walk")

    assert (lacks.args, lacks.kwargs) == ((True,), {"reason": "this torch cannot fly"})
    assert has.args == (False,)


@pytest.mark.parametrize("ability", ABILITIES)
def test_each_ability_is_found_or_not_without_an_error(ability: str) -> None:
    assert is_able(ability) in (True, False)


def test_all_reasons_are_those_that_the_page_on_compatibility_lists() -> None:
    marks = [needs_torch("float31"), needs_ability("train with FSDP2 on a CPU"), needs_parameter("nn.Linear", "colour")]

    assert all(mark.kwargs["reason"].startswith(LACKS) for mark in marks)
