"""Keyword arguments become options; those that are not known are refused."""

from __future__ import annotations

import pytest

from holdfast.distributed.checkpoint.checkpoint import find_world
from holdfast.distributed.checkpoint.choices import (
    IntoChoices,
    SaveChoices,
    make_into_options,
    make_save_options,
)
from holdfast.snapshot.into.held import HeldMemory, Since
from holdfast.snapshot.into.plan import IntoOptions
from holdfast.snapshot.save.save import SaveOptions

_OTHERS = {"collective", "process_group", "timeout_s"}


def test_a_save_without_choices_has_the_defaults() -> None:
    assert make_save_options(environment=True, lineage={}) == (SaveOptions(), None)


def test_choices_of_a_save_reach_its_options() -> None:
    options, world = make_save_options(
        environment=False, lineage={"a": 1}, metadata=None, after_s=5.0, overwrite=True, mirror="x", collective=False
    )

    assert options == SaveOptions(overwrite=True, environment=False, lineage={"a": 1}, after_s=5.0)
    assert world is None


def test_a_load_reads_replicas_as_it_measures_unless_told_otherwise() -> None:
    held = HeldMemory()

    options, _ = make_into_options(held=held, progress=None, since="v/1", check_target=True, rename=None)

    assert options == IntoOptions(replicas="auto", held=held, since=Since("v/1", check=True))
    assert options.is_transaction


def test_every_choice_is_accepted_and_no_other() -> None:
    for choices, make in ((SaveChoices, make_save_options), (IntoChoices, make_into_options)):
        known = {*make.__annotations__, *find_world.__annotations__}
        assert {*choices.__annotations__} <= known, choices
    with pytest.raises(TypeError, match="overwite"):
        make_save_options(environment=True, lineage={}, overwite=True)
    assert {*SaveChoices.__annotations__} >= _OTHERS


def test_an_argument_that_is_misspelt_is_refused_with_the_name_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"save\(\) got an unexpected keyword argument 'compresion'; .*'compression'"):
        make_save_options(environment=True, lineage={}, compresion="fast")
    with pytest.raises(TypeError, match=r"load_into\(\) got an unexpected keyword argument 'sinse'; .*'since'"):
        make_into_options(held=HeldMemory(), progress=None, sinse="v/1")
    with pytest.raises(TypeError, match=r"save\(\) got an unexpected keyword argument 'quux'$"):
        make_save_options(environment=True, lineage={}, quux=1)
