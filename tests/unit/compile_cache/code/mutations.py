"""User code that may change between two processes.

Each mutation consists of two versions of a small package that differ in one number. A `Way` is how the code reads that
number, and a `Place` is the function that reads it, such as a backward or a lowering.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.unit.compile_cache.code.mutation_ways import COMMON, OTHERS, WAYS, Way

BEFORE: Final = "2.0"
AFTER: Final = "5.0"


@dataclass(frozen=True, slots=True)
class Place:
    """A function of the user that affects a result."""

    name: str
    source: str
    """A module with `f` and `make_input`; PRELUDE, INSIDE and VALUE are put in."""
    is_compilers: bool = False
    """Whether only torch's compiler runs this code, so that `aot_eager` gives the same answer before and after."""
    refusal: str = ""
    """What the reason names, if torch does not keep this code and graphs are not cached."""
    unused: str = ""
    """Why torch's compiler does not use this code, so that its answer is the same before and after."""
    makes_kernels: bool = True
    """Whether torch compiles a kernel in C++ for it."""

    def find_right(self, results: Mapping[str, Any], number: str) -> list[list[float]] | None:
        """Return the right result of the version with `number`; None if `results` does not contain it."""
        if not self.is_compilers:
            return results.get("eager")
        return results.get("plain") if self.unused else [[float(number)] * 4]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A package before and after one number in it has changed."""

    place: Place
    way: Way

    @property
    def name(self) -> str:
        return f"{self.place.name}: {self.way.name}"

    @property
    def refusal(self) -> str:
        """What the reason names, if graphs are not cached; "" if they are."""
        return self.place.refusal or self.way.refusal

    def list_files(self, number: str) -> dict[str, str]:
        """Return the files of the package, path -> text."""
        source = self.place.source.replace("PRELUDE", self.way.prelude).replace("VALUE", self.way.value)
        inside = textwrap.indent(self.way.inside, "    ")
        files = {**OTHERS, **self.way.files, "mutated/operator.py": source.replace("    INSIDE", inside)}
        return {path: text.replace("NUMBER", number) for path, text in files.items()}


_OPERATOR: Final = """
import torch
PRELUDE
@torch.library.custom_op("mutated::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5
@op.register_fake
def fake(x):
    return torch.empty_like(x)
def backward(ctx, g):
    return g * 3.0
op.register_autograd(backward)
def f(x):
    return op(x)
def make_input():
    return torch.ones(4, requires_grad=True)
"""
_ERF: Final = """
import torch
PRELUDE
REGISTER
def f(x):
    return torch.erfc(x)
def make_input():
    return torch.ones(4)
"""


def _in_operator(name: str, old: str, new: str, *, makes_kernels: bool = True) -> Place:
    assert old in _OPERATOR
    return Place(name, _OPERATOR.replace(old, new), makes_kernels=makes_kernels)


def _for_erfc(name: str, register: str, *, is_compilers: bool = True, refusal: str = "", unused: str = "") -> Place:
    return Place(name, _ERF.replace("REGISTER", textwrap.dedent(register)), is_compilers, refusal, unused)


BACKWARD: Final = _in_operator("backward", "    return g * 3.0", "    INSIDE\n    return g * VALUE")
_SETUP: Final = """
def setup(ctx, inputs, output):
    INSIDE
    ctx.held = VALUE
def backward(ctx, g):
    return g * ctx.held
op.register_autograd(backward, setup_context=setup)
"""

OPERATORS: Final = (
    _in_operator("implementation", "    return x * 1.5", "    INSIDE\n    return x * VALUE"),
    _in_operator(
        "kernel of a device",
        "def f(x)",
        '@op.register_kernel("cpu")\ndef kernel(x):\n    INSIDE\n    return x * VALUE\ndef f(x)',
    ),
    # The first item of the input is the size of the output. The compiler gets the size from the fake alone.
    Place(
        "fake",
        _OPERATOR.replace("return x * 1.5", "return x.new_ones(int(x[0]))")
        .replace("    return torch.empty_like(x)", "    INSIDE\n    return x.new_empty(int(VALUE))")
        .replace("torch.ones(4, requires_grad=True)", "torch.full((4,), NUMBER)"),
    ),
    Place("setup of the context", _OPERATOR.replace("op.register_autograd(backward)", _SETUP.strip())),
    _in_operator(
        "rule for vmap",
        "def f(x):\n    return op(x)",
        "@op.register_vmap\ndef rule(info, in_dims, x):\n    INSIDE\n    return op(x * VALUE), in_dims[0]\n"
        "def f(x):\n    return torch.vmap(op)(x)",
    ),
    _in_operator(
        "backward by another operator",
        "def backward(ctx, g):\n    return g * 3.0",
        """
@torch.library.custom_op("mutated::times", mutates_args=())
def times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor
@times.register_fake
def times_fake(x, factor):
    return torch.empty_like(x)
def backward(ctx, g):
    INSIDE
    return times(g, float(VALUE))
""".strip(),
        makes_kernels=False,
    ),
    _in_operator(
        "helper of a backward",
        "    return g * 3.0",
        "    return g * help_it()\ndef help_it():\n    INSIDE\n    return VALUE",
    ),
)

REPLACEMENTS: Final = (
    _for_erfc(
        "lowering",
        """
        from torch._inductor import lowering
        @lowering.register_lowering(torch.ops.aten.erfc.default, type_promotion_kind=None)
        def lower(x):
            INSIDE
            return lowering.mul(x, VALUE)
        """,
    ),
    _for_erfc(
        "lowering of a packet",
        """
        from torch._inductor import lowering
        @lowering.register_lowering(torch.ops.aten.erfc, type_promotion_kind=None)
        def lower(x):
            INSIDE
            return lowering.mul(x, VALUE)
        """,
        unused="for a packet, register_lowering skips the overloads that have a lowering, and graphs call overloads",
    ),
    _for_erfc(
        "lowering by assignment",
        """
        from torch._inductor import lowering
        def lower(x):
            INSIDE
            return lowering.mul(x, VALUE)
        lowering.lowerings[torch.ops.aten.erfc.default] = lower
        """,
    ),
    _for_erfc(
        "preferred lowering",
        """
        from torch._inductor import lowering
        def lower(x):
            INSIDE
            return lowering.mul(x, VALUE)
        lowering.user_lowerings[torch.ops.aten.erfc.default] = lower
        """,
    ),
    _for_erfc(
        "decomposition",
        """
        from torch._inductor.decomposition import register_decomposition
        @register_decomposition([torch.ops.aten.erfc.default])
        def decompose(x):
            INSIDE
            return x * VALUE
        """,
    ),
    _for_erfc(
        "pattern's replacement",
        """
        from torch._inductor.fx_passes.post_grad import pass_patterns
        from torch._inductor.pattern_matcher import fwd_only, register_replacement
        def search(x):
            return torch.ops.aten.erfc.default(x)
        def replace(x):
            INSIDE
            return x * VALUE
        register_replacement(search, replace, [torch.ones(4)], fwd_only, pass_patterns[1])
        """,
        refusal="a pattern of yours (mutated.operator.search)",
    ),
    _for_erfc(
        "graph pattern",
        """
        from torch._inductor.fx_passes.post_grad import pass_patterns
        from torch._inductor.pattern_matcher import Arg, CallFunction, register_graph_pattern
        @register_graph_pattern(CallFunction(torch.ops.aten.erfc.default, Arg()), pass_dict=pass_patterns[1])
        def rewrite(match, x):
            INSIDE
            factor = VALUE
            match.replace_by_example(lambda x: x * factor, [x])
        """,
        refusal="a pattern of yours (mutated.operator.rewrite)",
    ),
    _for_erfc(
        "autograd kernel",
        """
        class Times(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * TIMES()
            @staticmethod
            def backward(ctx, g):
                return g
        def TIMES():
            INSIDE
            return VALUE
        library = torch.library.Library("aten", "IMPL")
        library.impl("erfc", Times.apply, "AutogradCPU")
        """,
        is_compilers=False,
        refusal="aten::erfc (AutogradCPU)",
    ),
    _for_erfc(
        "kernel for all",
        """
        @torch.library.impl("aten::erfc", "AutogradCPU")
        def kernel(x):
            INSIDE
            return x * VALUE
        """,
        is_compilers=False,
        refusal="aten::erfc (AutogradCPU)",
    ),
    _for_erfc(
        "py_impl",
        """
        @torch.ops.aten.erfc.default.py_impl(torch._C.DispatchKey.AutogradCPU)
        def kernel(x):
            INSIDE
            return x * VALUE
        """,
        is_compilers=False,
    ),
    _for_erfc(
        "functionalization",
        """
        @torch.ops.aten.erfc.default.py_functionalize_impl
        def kernel(ctx, x):
            INSIDE
            return ctx.wrap_tensors(ctx.unwrap_tensors((x,))[0] * VALUE)
        """,
        is_compilers=False,
    ),
)

_CALLABLE: Final = """
import torch
PRELUDE
DEFINE
def make_input():
    return torch.ones(4, 4)
"""


def _called(name: str, define: str, *, makes_kernels: bool = False) -> Place:
    # The number is an argument of a kernel of torch, so that nothing is compiled in C++.
    source = _CALLABLE.replace("DEFINE", textwrap.dedent(define).strip())
    return Place(name, source.replace("TIMES", "torch.addmm(x, x, x, alpha=VALUE)"), makes_kernels=makes_kernels)


FUNCTION: Final = _called("function", "def f(x):\n    INSIDE\n    return TIMES")
# For values that are tensors.
PRODUCT: Final = _called("product", "def f(x):\n    INSIDE\n    return x * VALUE", makes_kernels=True)
CALLABLES: Final = (
    _called(
        "forward",
        """
        class Net(torch.nn.Module):
            def forward(self, x):
                INSIDE
                return TIMES
        f = Net()
        """,
    ),
    _called(
        "method of a layer",
        """
        class Layer(torch.nn.Module):
            def forward(self, x):
                return self.help_it(x)
            def help_it(self, x):
                INSIDE
                return TIMES
        f = torch.nn.Sequential(torch.nn.Identity(), Layer())
        """,
    ),
    _called(
        "property of a layer",
        """
        class Layer(torch.nn.Module):
            @property
            def held(self):
                INSIDE
                return VALUE
            def forward(self, x):
                return torch.addmm(x, x, x, alpha=self.held)
        f = torch.nn.Sequential(Layer())
        """,
    ),
    _called(
        "closure of the callable",
        """
        def help_it(x):
            INSIDE
            return TIMES
        def make(inner):
            def outer(x):
                return inner(x)
            return outer
        f = make(help_it)
        """,
    ),
    _called(
        "base of a layer",
        """
        class Base(torch.nn.Module):
            def forward(self, x):
                INSIDE
                return TIMES
        class Layer(Base):
            def forward(self, x):
                return super().forward(x)
        f = Layer()
        """,
    ),
)
_TENSORS: Final = frozenset({
    "a method set on tensors", "a replaced function of torch", "a wrapped function of torch", "a hidden operator",
    "a hidden operator of a library", "a namespace by a local name", "an autograd function",
})  # fmt: skip
"""Ways that give a tensor."""

MUTATED_CALLABLES: Final = (
    *(Mutation(PRODUCT if way.name in _TENSORS else FUNCTION, way) for way in WAYS),
    *(Mutation(place, way) for place in CALLABLES for way in COMMON),
)
"""Code of a callable, which dynamo traces, instead of code that torch's compiler runs."""

MUTATIONS: Final = (
    *(Mutation(BACKWARD, way) for way in WAYS),
    *(Mutation(place, way) for place in OPERATORS + REPLACEMENTS for way in COMMON),
)
QUICK: Final = tuple(mutation for mutation in MUTATIONS if mutation.place is BACKWARD or mutation.way is COMMON[2])
"""Each way in one place, and one way in each place."""


def judge_callable(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with the results of three processes that call a callable: before, after, before again.

    A callable that cannot be described is refused, which is never wrong. But a change of the result must change the
    key, and must be noticed in a running process.
    """
    before, after, again = (results[role] for role in ("before", "after", "again"))
    if errors := [each["error"] for each in (before, after, again) if "error" in each]:
        return errors
    wrong = []
    if before["eager"] == after["eager"]:
        wrong.append("the number does not change the result, so this tests nothing")
    if "key" in before and before["key"] == after.get("key"):
        wrong.append("stale: both versions have one key")
    if before.get("key") != again.get("key"):
        wrong.append("the same code has two keys")
    if before.get("missed"):
        wrong.append("stale: a change in the running process was not noticed")
    for role, each in results.items():
        if "answer" in each and each["answer"] != each["eager"]:
            wrong.append(f"{role}: {each['answer']} for {each['eager']}")
    if after.get("hits"):
        wrong.append("stale: a callable that was stored before the change was loaded after it")
    if before.get("saved") and not again.get("hits"):
        wrong.append("what was stored was not loaded again")
    return wrong


def judge(mutation: Mutation, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the results of two processes, one for each version of a package."""
    if "error" in before or "error" in after:
        return [before.get("error", ""), after.get("error", "")]
    wrong = []
    if "key" in before and before["key"] == after.get("key"):
        wrong.append("stale: both versions have one key")
    reasons = [results["reason"] for results in (before, after) if "reason" in results]
    if reasons and not mutation.refusal:
        wrong.append(f"it could be cached: {reasons[0]}")
    if len(reasons) < 2 and mutation.refusal:
        wrong.append("it has a key, although this code cannot be followed")
    wrong += [f"not for {mutation.refusal}: {reason}" for reason in reasons if mutation.refusal not in reason]
    for results, number in ((before, BEFORE), (after, AFTER)):
        right = mutation.place.find_right(results, number)
        wrong += [f"{results[by]} for {right}" for by in ("answer", "plain") if by in results and results[by] != right]
    if "eager" in before and (before["eager"] == after["eager"]) != mutation.place.is_compilers:
        wrong.append("the number does not change the result, so this tests nothing")
    if mutation.place.unused and before.get("plain") != after.get("plain"):
        wrong.append(f"the number changes the result, which contradicts this: {mutation.place.unused}")
    return wrong
