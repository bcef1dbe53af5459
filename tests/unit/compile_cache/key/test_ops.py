"""The code of operators that do not come with torch is in the key, down to the functions that it calls."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.compile_cache.key_parts import PARTS, GraphKey
from tests.kit.graph_keys import key_of, reason_of

# Any: much of torch has no types.
_LIBRARY: Any = torch.library
_OPS: Any = torch.ops

SOURCE = """
FACTOR = 3.0

def helper(g):
    return g * FACTOR

def implement(x: torch.Tensor) -> torch.Tensor:
    return x * 2

def fake(x):
    return torch.empty_like(x)

def setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])

def backward(ctx, g):
    (x,) = ctx.saved_tensors
    return helper(g)

def kernel(x):
    return x + x
"""


def key_of_operator(
    source: str = SOURCE, *, filename: str = "<op>", versions: dict[str, str] | None = None
) -> GraphKey:
    """Return the key of a call of an operator whose functions a source text defines."""
    with operator_of(source, filename) as call:
        return key_of(call, torch.ones(3, requires_grad=True), versions=versions or {})


@contextlib.contextmanager
def operator_of(source: str, filename: str = "<op>") -> Iterator[Callable[[Tensor], Any]]:
    names: dict[str, Any] = {"torch": torch, "__name__": "users_module"}
    exec(compile(source, filename, "exec"), names)
    made = torch.library.custom_op("holdfast_test::scale", names["implement"], mutates_args=())
    made.register_fake(names["fake"])
    made.register_autograd(names["backward"], setup_context=names["setup"])
    made.register_kernel("cpu")(names["kernel"])
    try:
        yield call_scale
    finally:
        made._lib._destroy()


def call_scale(x: Tensor) -> Any:
    return torch.ops.holdfast_test.scale(x)


def call_double(x: Tensor) -> Any:
    return torch.ops.holdfast_test.double(x)


def call_compiled(x: Tensor) -> Any:
    return torch.ops._test.leaky_relu(x)


def list_changed(one: GraphKey, other: GraphKey) -> list[str]:
    return [part for part in PARTS if one.digests[part] != other.digests[part]]


def test_the_same_code_has_the_same_key() -> None:
    assert list_changed(key_of_operator(), key_of_operator()) == []


def test_names_of_local_variables_comments_and_files_do_not_change_the_key() -> None:
    renamed = "\n\n# moved\n" + SOURCE.replace("(x,) = ctx", "(saved,) = ctx")

    other = key_of_operator(renamed, filename="/elsewhere/op.py")

    assert list_changed(key_of_operator(), other) == []


def test_names_of_arguments_change_the_key_because_callers_may_use_them() -> None:
    swapped = SOURCE.replace("def helper(g)", "def helper(g, *, up, down)").replace("g * FACTOR", "g * up - down")
    swapped = swapped.replace("helper(g)\n", "helper(g, up=2, down=3)\n", 1)

    one = key_of_operator(swapped)
    other = key_of_operator(swapped.replace("up, down", "down, up").replace("g * up - down", "g * down - up"))

    assert list_changed(one, other) == ["custom_ops"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x * 2", "return x * 3"),
        ("return torch.empty_like(x)", "return torch.zeros_like(x)"),
        ("save_for_backward(inputs[0])", "save_for_backward(output)"),
        ("return helper(g)", "return -helper(g)"),
        ("return g * FACTOR", "return g / FACTOR"),
        ("FACTOR = 3.0", "FACTOR = 5.0"),
        ("return x + x", "return x + x + x"),
    ],
    ids=["implementation", "fake", "setup_context", "backward", "helper", "constant", "kernel"],
)
def test_any_code_of_an_operator_changes_the_key(old: str, new: str) -> None:
    assert old in SOURCE

    assert list_changed(key_of_operator(), key_of_operator(SOURCE.replace(old, new))) == ["custom_ops"]


def test_a_version_replaces_the_digest_of_the_code() -> None:
    name = "holdfast_test::scale"
    edited = SOURCE.replace("FACTOR = 3.0", "FACTOR = 5.0")

    one = key_of_operator(versions={name: "1"})

    assert list_changed(one, key_of_operator(edited, versions={name: "1"})) == []
    assert list_changed(one, key_of_operator(edited, versions={name: "2"})) == ["custom_ops"]


def test_code_that_uses_a_tensor_has_no_digest_and_the_reason_names_the_next_step() -> None:
    with operator_of(SOURCE.replace("FACTOR = 3.0", "FACTOR = torch.ones(())")) as call:
        reason = reason_of(call, torch.ones(3, requires_grad=True))

    assert reason == (
        "the backward of the operator holdfast_test::scale uses a torch.Tensor, which has no digest; to cache"
        ' the graph, pass versions={"holdfast_test::scale": "1"} and change the version whenever the code changes'
    )


def test_code_that_reads_the_environment_has_no_digest() -> None:
    source = SOURCE.replace("FACTOR = 3.0", "import os")

    with operator_of(source.replace("g * FACTOR", "g * float(os.environ['FACTOR'])")) as call:
        reason = reason_of(call, torch.ones(3, requires_grad=True))

    assert reason.startswith(
        "the backward of the operator holdfast_test::scale uses os._Environ in helper, whose result may depend on"
    )


PLAIN = """
import dataclasses, functools, logging, math
import numpy as np
import torch.nn.functional as F

log = logging.getLogger(__name__)

@dataclasses.dataclass(frozen=True)
class Config:
    eps: float = 1e-5
    names: tuple[str, ...] = ("a",)

CONFIG = Config()

def check(x):
    if x.dim() < 1:
        raise ValueError(f"bad {type(x).__name__} of {tuple(x.shape)}")
    log.debug("checked %s", x.shape)

def helper(g):
    check(g)
    with torch.no_grad():
        factor = functools.reduce(lambda a, b: a + b, [1, 2]) * np.float64(CONFIG.eps) * math.sqrt(2.0)
        return F.silu(g).to(torch.float32).contiguous() * factor + getattr(g, "held", 0)
"""


def test_plain_operators_have_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "users_module", ModuleType("users_module"))
    source = SOURCE.replace("def helper(g):\n    return g * FACTOR\n", PLAIN)
    assert "CONFIG" in source

    one, other = key_of_operator(source), key_of_operator(source.replace("1e-5", "1e-6"))

    assert list_changed(one, other) == ["custom_ops"]


def test_an_operator_whose_code_torch_does_not_keep_is_not_cached() -> None:
    library = _LIBRARY.Library("holdfast_test", "FRAGMENT")
    try:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")

        reason = reason_of(call_double, torch.ones(3))
    finally:
        library._destroy()

    assert reason.startswith("the operator holdfast_test::double was defined by torch.library.Library, which does not")


def test_an_operator_of_a_library_is_identified_by_the_libraries_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "ops.so"
    monkeypatch.setattr(_OPS, "loaded_libraries", {str(library)})
    keys = []

    for number, content in enumerate((b"one", b"one", b"another")):
        library.write_bytes(content)
        os.utime(library, ns=(number, number))
        keys.append(key_of(call_compiled, torch.ones(3)))

    assert list_changed(keys[0], keys[1]) == []
    assert list_changed(keys[0], keys[2]) == ["custom_ops"]


def test_an_operator_of_a_library_that_is_not_known_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_OPS, "loaded_libraries", set())

    reason = reason_of(call_compiled, torch.ones(3))

    assert reason.startswith("the operator _test::leaky_relu comes from a library that torch.ops.load_library did not")


def _replacement(value: object = 1) -> object:
    return value


def test_a_user_lowering_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = ModuleType("torch._inductor.lowering")
    monkeypatch.setitem(sys.modules, tables.__name__, tables)
    monkeypatch.setattr(tables, "user_lowerings", {}, raising=False)
    plain = key_of(torch.sin, torch.ones(3))
    monkeypatch.setattr(tables, "user_lowerings", {torch.ops.aten.sin.default: _replacement}, raising=False)

    other = key_of(torch.sin, torch.ones(3))

    assert list_changed(plain, other) == ["custom_ops"]
    assert list(other.parts["custom_ops"]) == ["preferred lowering of aten.sin.default"]


def test_a_user_decomposition_changes_the_key_and_those_of_torch_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = ModuleType("torch._inductor.decomposition")
    monkeypatch.setitem(sys.modules, tables.__name__, tables)
    sin, relu, cos = torch.ops.aten.sin.default, torch.ops.aten.relu6.default, torch.ops.aten.cos.default
    known = {sin: torch.sin, relu: relu.decompose}
    monkeypatch.setattr(tables, "decompositions", known, raising=False)
    plain = key_of(torch.sin, torch.ones(3))
    monkeypatch.setattr(tables, "decompositions", {**known, cos: _replacement}, raising=False)

    other = key_of(torch.sin, torch.ones(3))

    assert plain.parts["custom_ops"] == {}
    assert list(other.parts["custom_ops"]) == ["decomposition of aten.cos.default"]


def _copy(x: Tensor) -> Tensor:
    return x.clone()


def test_the_operator_that_writes_into_its_output_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = import_module("torch._library._out_variant")
    made = torch.library.custom_op("holdfast_test::with_variant", _copy, mutates_args=())
    made.register_fake(torch.empty_like)
    plain = key_of(made, torch.ones(3))
    monkeypatch.setitem(variants._manual_out_variant_registry, made._opoverload, _OPS.aten.sin.out)

    other = key_of(made, torch.ones(3))

    assert [part for part in PARTS if plain.digests[part] != other.digests[part]] == ["custom_ops"]
