"""Each method of `Store` takes the options of its dataclass, with the same defaults: neither changes alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Final, NamedTuple

import pytest

import holdfast
from holdfast import Store
from holdfast.capture.compare.align import Bounds
from holdfast.capture.compare.compare import DiffOptions
from holdfast.capture.record.options import make_options
from holdfast.checkpointing import ManagerOptions
from holdfast.compile_cache.choices import CompilerOptions
from holdfast.distributed.checkpoint.checkpoint import find_world
from holdfast.files.keep import restore_files
from holdfast.formats.export import ExportOptions
from holdfast.formats.importing import ImportOptions
from holdfast.repo.upkeep.prune import make_keep
from holdfast.repo.write.writer import WriteOptions
from holdfast.series import FollowOptions, PublishOptions
from holdfast.serving.server import StoreServer
from holdfast.snapshot.batches import LoadOptions
from holdfast.snapshot.into.plan import IntoOptions
from holdfast.snapshot.save import SaveOptions
from holdfast.store import OpenOptions


class Options(NamedTuple):
    """What the keywords of a method become."""

    declared: tuple[Callable[..., Any], ...]
    """Dataclasses, or functions that make one."""
    own: frozenset[str] = frozenset()
    """Keywords that the method resolves itself."""
    hidden: frozenset[str] = frozenset()
    """Fields that the method sets, or leaves as they are."""
    other_defaults: frozenset[str] = frozenset()


SET_BY_STORE: Final = frozenset({"environment", "verify_reuse"})
"""What a save records besides the tree; for recordings only."""
PROGRESS: Final = frozenset({"progress"})

METHODS: Final[Mapping[str, Options]] = {
    "save": Options((SaveOptions, find_world), PROGRESS | {"mirror"}, SET_BY_STORE),
    "save_async": Options((SaveOptions, find_world), PROGRESS | {"mirror", "staging"}, SET_BY_STORE),
    "publish": Options(
        (PublishOptions, SaveOptions, find_world),
        PROGRESS | {"mirror"},
        SET_BY_STORE | {"saving", "overwrite", "after_s"},
    ),
    "load": Options((LoadOptions,)),
    "load_into": Options(
        (IntoOptions, find_world),
        frozenset({"check_target"}),
        frozenset({"held"}),
        other_defaults=frozenset({"replicas"}),
    ),
    "follow": Options((FollowOptions,)),
    "manager": Options((ManagerOptions,)),
    "plan_prune": Options((make_keep,)),
    "prune": Options((make_keep,), PROGRESS | {"collective"}),
    "put": Options(
        (WriteOptions,), PROGRESS | {"follow_links"}, SET_BY_STORE | {"base", "compression", "delta", "after_s"}
    ),
    "get": Options((restore_files,)),
    "export": Options((ExportOptions,), PROGRESS),
    "export_async": Options((ExportOptions,)),
    "record": Options((make_options,)),
    "diff_runs": Options(
        (DiffOptions, Bounds), frozenset({"noise", "reference"}), frozenset({"bounds", "max_rows", "budget_bytes"})
    ),
    "compiler": Options((CompilerOptions,)),
    "serve": Options((StoreServer,)),
    "import_": Options(
        (ImportOptions,),
        PROGRESS,
        SET_BY_STORE | {"allow_pickle", "grads", "base", "compression", "delta", "after_s"},
    ),
}


def list_keywords(function: Callable[..., Any]) -> dict[str, object]:
    """Return the keyword-only parameters of a function, and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def list_fields(declared: Callable[..., Any]) -> dict[str, object]:
    """Return the options that a dataclass or a function declares, and their defaults; None for an empty container."""
    if not is_dataclass(declared):
        return list_keywords(declared)
    return {each.name: find_default(each) for each in fields(declared)}


def find_default(field: Field[Any]) -> object:
    return None if field.default is MISSING else field.default


@pytest.mark.parametrize("name", METHODS)
def test_the_keywords_of_a_method_are_the_options_that_are_declared(name: str) -> None:
    options = METHODS[name]
    declared = {key: value for each in options.declared for key, value in list_fields(each).items()}

    keywords = list_keywords(getattr(Store, name))

    assert {*keywords} - options.own == {*declared} - options.hidden
    same = (declared.keys() & keywords.keys()) - options.other_defaults
    assert {key: keywords[key] for key in same} == {key: declared[key] for key in same}


def test_no_method_hides_its_options() -> None:
    methods = [method for name, method in inspect.getmembers(Store, inspect.isfunction) if not name.startswith("_")]

    hidden = [
        method.__name__
        for method in methods
        if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(method).parameters.values())
    ]

    assert hidden == []


def test_opening_takes_the_options_of_a_handle() -> None:
    keywords = list_keywords(holdfast.open)
    declared = list_fields(OpenOptions)

    resolved = {"mirror", "mirror_wait", "mirror_options", "cache_dir", "cache_bytes"}
    assert {*keywords} - resolved == {*declared} - {"mirror", "cache"}
    assert all(keywords[key] == declared[key] for key in keywords.keys() & declared.keys())


@pytest.mark.parametrize("name", METHODS)
def test_a_keyword_that_does_not_exist_is_refused_by_name(name: str) -> None:
    store = holdfast.open("memory://")

    with pytest.raises(TypeError, match="unexpected keyword argument 'compresion'"):
        getattr(store, name)("x/", {}, compresion="fast")
