"""Code of torch, Python and numpy is known by its name; user code is found, also inside wrappers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from holdfast.compile_cache.code.known import find_user_code, is_known_file, is_pure, name_code, name_known
from holdfast.compile_cache.key import flags
from tests.kit import torch_review as review


class UserClass:
    pass


def user_function(x: object = None) -> object:
    return x


def _wrap(function: object) -> Callable[[], object]:
    """Return an object of the standard library that calls `function`."""
    return functools.partial(map, function)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.sigmoid, "torch.sigmoid"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
        (torch.nn.functional.silu, "torch.nn.functional.silu"),
        (math.sqrt, "math.sqrt"),
        (functools.reduce, "_functools.reduce"),
        (dict, "builtins.dict"),
        (str.upper, "builtins.str.upper"),
        (np.add, "numpy.add"),
        (user_function, ""),
        (UserClass, ""),
    ],
)
def test_known_code_has_a_name_and_user_code_has_none(value: object, name: str) -> None:
    assert name_known(value) == name


def test_a_user_class_that_claims_to_be_of_torch_is_not_known() -> None:
    claimed = type("Linear", (), {"__module__": "torch.nn.modules.linear"})

    assert name_known(claimed) == ""


def test_files_of_torch_and_python_are_known() -> None:
    assert is_known_file(torch.nn.functional.__file__)
    assert is_known_file(functools.__file__)
    assert not is_known_file(__file__)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.add", True),
        ("torch.load_library", False),
        ("torch.random.initial_seed", False),
        ("torch.nn.functional.silu", True),
        ("torch.is_grad_enabled", True),
        ("torch.distributed.get_rank", False),
        ("numpy.random.rand", False),
        ("math.sqrt", True),
        ("os.getenv", False),
        ("builtins.len", True),
        ("builtins.eval", False),
    ],
)
def test_code_that_reads_more_than_its_arguments_is_not_pure(name: str, *, expected: bool) -> None:
    assert is_pure(name) == expected


def test_no_state_of_torch_is_pure_unless_it_is_in_the_key() -> None:
    unkeyed = {name for name in review.GETTERS if hasattr(torch, name) and is_pure(f"torch.{name}")}
    # `GETTERS` lists these as parts of the key.
    keyed = {"get_default_dtype", "get_num_threads", "is_anomaly_enabled", "is_autocast_enabled", "is_grad_enabled"}

    assert unkeyed == keyed | {"is_inference_mode_enabled"}
    assert not [name for name in (*review.GETTERS, *flags.STATE) if is_pure(f"torch._C.{name}")]


def test_code_is_named_by_its_file() -> None:
    assert name_code(torch.no_grad()(user_function).__code__) == "torch.utils._contextlib.decorate_context"
    assert name_code(functools.wraps.__code__) == ("functools.wraps")


def test_code_under_the_name_of_a_frozen_module_is_followed() -> None:
    for filename in ("<frozen abc>", "<frozen rules>"):
        namespace: dict[str, object] = {"__name__": "abc"}
        exec(compile("def read():\n    return 1", filename, "exec"), namespace)

        assert name_known(namespace["read"]) == ""


@pytest.mark.parametrize("make", [lambda x: x, lambda x: [1, (x,)], _wrap, functools.lru_cache])
def test_user_code_is_found_inside_containers_and_wrappers(make: Callable[[object], object]) -> None:
    assert find_user_code(make(user_function), {}) is user_function


def test_objects_without_user_code_are_remembered() -> None:
    entry = [torch.nn.functional.silu, 1]
    known: dict[int, object] = {}

    assert find_user_code(entry, known) is None
    assert known[id(entry)] is entry
