"""Changes of an `autograd.Function`: its methods, what they read, and how it is defined."""

from __future__ import annotations

import textwrap
from typing import Any, Final

import torch
from torch import Tensor

from tests.integration.compile_cache.changes import Change, Compile, Program

BEFORE: Final = "2.0"
AFTER: Final = "5.0"

_PLAIN: Final = """
class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.5
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x * 3.0
def f(x):
    return Op.apply(x).sin()
"""
_SETUP: Final = """
class Op(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 1.5
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.held = 3.0
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x * ctx.held
def f(x):
    return Op.apply(x).sin()
"""


def by_source(source: str) -> Program:
    """Return a program that compiles `f` of a module, and returns its outputs and the gradient of its input."""

    def run(compile_: Compile) -> list[Tensor]:
        module: dict[str, Any] = {"torch": torch, "__name__": "changed"}
        exec(compile(source, "<changed>", "exec"), module)
        x = torch.linspace(0.1, 0.8, 4).requires_grad_()
        found = compile_(module["f"])(x)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        sum(each.sum() for each in outputs if each.requires_grad).backward()  # type: ignore[union-attr]  # a tensor
        assert x.grad is not None
        return [*outputs, x.grad]

    return run


def _change(name: str, source: str, **how: Any) -> Change:
    text = textwrap.dedent(source)
    assert "NUMBER" in text, name
    before, after = (by_source(text.replace("NUMBER", number)) for number in (BEFORE, AFTER))
    return Change(name, before, after, **how)


def _replace(name: str, old: str, new: str, *, of: str = _PLAIN, prelude: str = "", **how: Any) -> Change:
    assert old in of, name
    return _change(name, textwrap.dedent(prelude) + of.replace(old, new), **how)


_FORWARD: Final = "return x * 1.5"
_BACKWARD: Final = "return g * x * 3.0"
_F: Final = "    return Op.apply(x).sin()"

_BODIES: Final = (
    _replace("forward: a constant", "x * 1.5", "x * NUMBER"),
    _replace("forward: an operator's argument", "x * 1.5", "torch.add(x, x, alpha=NUMBER)"),
    _replace("forward: a tensor made there", "x * 1.5", "x * torch.full((4,), NUMBER)"),
    _replace("forward: a branch", _FORWARD, "if NUMBER > 3:\n            return x * 1.5\n        return x * 4.0"),
    _replace("forward: what is saved", "save_for_backward(x)", "save_for_backward(x * NUMBER)"),
    _replace("forward: an attribute of ctx", "x * 3.0", "x * ctx.held", of=_PLAIN.replace(
        "        return x * 1.5", "        ctx.held = NUMBER\n        return x * 1.5")),
    _replace("forward: an attribute of ctx that is a list", "x * 3.0", "x * ctx.held[1]", of=_PLAIN.replace(
        "        return x * 1.5", "        ctx.held = [1.0, NUMBER]\n        return x * 1.5")),
    _replace("forward: a tensor on ctx", "x * 3.0", "x * ctx.held", of=_PLAIN.replace(
        "        return x * 1.5", "        ctx.held = x.detach() * NUMBER\n        return x * 1.5")),
    _replace("backward: a constant", "x * 3.0", "x * NUMBER"),
    _replace("backward: an operator's argument", "g * x * 3.0", "torch.addcmul(g, g, x, value=NUMBER)"),
    _replace("backward: a branch", _BACKWARD, "if NUMBER > 3:\n            return g\n        return g * 4.0"),
    _replace("backward: a loop", _BACKWARD, "for _ in range(int(NUMBER)):\n            g = g * x\n        return g"),
    _replace("backward: a branch on needs_input_grad", _BACKWARD,
             "return g * NUMBER if ctx.needs_input_grad[0] else g"),
    _replace("backward: once_differentiable", "    @staticmethod\n    def backward(ctx, g)",
             "    @staticmethod\n    @torch.autograd.function.once_differentiable\n    def backward(ctx, g)",
             of=_PLAIN.replace("x * 3.0", "x * NUMBER")),
    _replace("backward: in place", "        return g * x * 3.0", "        return (g * x).mul_(NUMBER)"),
    _replace("backward: under no_grad", "        return g * x * 3.0",
             "        with torch.no_grad():\n            return g * x * NUMBER"),
    _replace("backward: under enable_grad", "        return g * x * 3.0",
             "        with torch.enable_grad():\n            y = (x.detach().requires_grad_() * NUMBER)\n"
             "        return g * y.detach()"),
    _replace("setup_context: an attribute", "ctx.held = 3.0", "ctx.held = NUMBER", of=_SETUP),
    _replace("setup_context: what is saved", "save_for_backward(*inputs)", "save_for_backward(inputs[0] * NUMBER)",
             of=_SETUP),
    _replace("setup_context: of the output", "save_for_backward(*inputs)", "save_for_backward(output * NUMBER)",
             of=_SETUP),
    _replace("setup_context: the forward", "x * 1.5", "x * NUMBER", of=_SETUP),
    _replace("setup_context: the backward", "x * ctx.held", "x * ctx.held * NUMBER", of=_SETUP),
)  # fmt: skip

_READS: Final = tuple(
    _replace(f"{place}: {name}", old, new.replace("VALUE", value), prelude=prelude, **how)
    for place, old, new in (("forward", "x * 1.5", "x * VALUE"), ("backward", "x * 3.0", "x * VALUE"))
    for name, value, prelude, how in (
        ("a global", "G", "G = NUMBER\n", {}),
        ("a helper", "read()", "def read():\n    return NUMBER\n", {}),
        ("a helper's helper", "read()", "def below():\n    return NUMBER\ndef read():\n    return below()\n", {}),
        ("a helper with tensors", "read(x)", "def read(x):\n    return x.cos() * NUMBER\n", {}),
        ("a closure", "read()", "def make(held):\n    return lambda: held\nread = make(NUMBER)\n", {}),
        ("a default", "read()", "def read(held=NUMBER):\n    return held\n", {}),
        ("a partial", "read()", "import functools\nread = functools.partial(lambda a: a, NUMBER)\n", {}),
        ("a partial of a builtin", "read()", "import functools\nread = functools.partial(max, 1.0, NUMBER)\n", {}),
        ("a method of a builtin", "T.get('a')", "T = {'a': NUMBER}\n", {}),
        ("a builtin of C", "math.pow(NUMBER, 2)", "import math\n", {}),
        ("a builtin's global", "math.fsum(T)", "import math\nT = [NUMBER, 1.0]\n", {}),
        ("a function by exec", "read()", "d = {}\nexec('def read():\\n    return NUMBER', d)\nread = d['read']\n", {}),
        ("a function by eval", "read()", "read = eval('lambda: NUMBER')\n", {}),
        ("a cached function", "read()", "import functools\n@functools.cache\ndef read():\n    return NUMBER\n", {}),
        ("an object", "T.held", "class T:\n    pass\nT = T()\nT.held = NUMBER\n", {}),
        ("a property", "T().held", "class T:\n    @property\n    def held(self):\n        return NUMBER\n", {}),
        ("a class attribute", "Op.held", "", {"of": _PLAIN.replace("Function):", "Function):\n    held = NUMBER")}),
        ("a tensor in a global", "G", "G = torch.full((4,), NUMBER)\n", {}),
        ("a number in a tensor", "G.item()", "G = torch.tensor(NUMBER)\n", {}),
        ("an enumeration", "T.A.value", "import enum\nclass T(enum.Enum):\n    A = NUMBER\n", {}),
        ("a numpy number", "float(G)", "import numpy\nG = numpy.float64(NUMBER)\n", {}),
        (
            "a function assumed constant",
            "read()",
            "G = NUMBER\n@torch._dynamo.assume_constant_result\ndef read():\n    return G\n",
            {},
        ),
        (
            "another function",
            "Other.apply(x)",
            """
class Other(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * NUMBER
    @staticmethod
    def backward(ctx, g):
        return g * 7.0
""",
            {},
        ),
    )
)

_DEFINITIONS: Final = (
    _change("definition: a base's methods", """
        class Base(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.5
            @staticmethod
            def backward(ctx, g):
                return g * NUMBER
        class Op(Base):
            pass
        def f(x):
            return Op.apply(x).sin()
    """),
    _change("definition: in a function", """
        def make(held):
            class Op(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x * 1.5
                @staticmethod
                def backward(ctx, g):
                    return g * held
            return Op
        Op = make(NUMBER)
        def f(x):
            return Op.apply(x).sin()
    """),
    _change("definition: by type()", """
        Op = type("Op", (torch.autograd.Function,), {
            "forward": staticmethod(lambda ctx, x: x * 1.5),
            "backward": staticmethod(lambda ctx, g: g * NUMBER),
        })
        def f(x):
            return Op.apply(x).sin()
    """),
    _change("definition: by exec", f"exec({_PLAIN.replace('x * 3.0', 'x * NUMBER')!r})"),
    _change("definition: a method set later", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.5
            @staticmethod
            def backward(ctx, g):
                return g
        Op.backward = staticmethod(lambda ctx, g: g * NUMBER)
        def f(x):
            return Op.apply(x).sin()
    """),
    _change("definition: a class method", """
        class Op(torch.autograd.Function):
            held = NUMBER
            @classmethod
            def forward(cls, ctx, x):
                return x * 1.5
            @classmethod
            def backward(cls, ctx, g):
                return g * cls.held
        def f(x):
            return Op.apply(x).sin()
    """),
    _change("definition: a partial for a backward", """
        import functools
        def scaled(held, ctx, g):
            return g * held
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.5
            backward = staticmethod(functools.partial(scaled, NUMBER))
        def f(x):
            return Op.apply(x).sin()
    """),
    _change("definition: a decorated backward", """
        import functools
        def times(function):
            @functools.wraps(function)
            def inner(ctx, g):
                return function(ctx, g) * NUMBER
            return inner
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.5
            @staticmethod
            @times
            def backward(ctx, g):
                return g
        def f(x):
            return Op.apply(x).sin()
    """),
    _change("definition: an instance of a module calls it", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, factor):
                ctx.factor = factor
                return x * 1.5
            @staticmethod
            def backward(ctx, g):
                return g * ctx.factor, None
        class Scaled(torch.nn.Module):
            def __init__(self, factor):
                super().__init__()
                self.factor = factor
            def forward(self, x):
                return Op.apply(x, self.factor)
        module = Scaled(NUMBER)
        def f(x):
            return module(x).sin()
    """),
    _change("definition: allowed in graphs", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.5
            @staticmethod
            def backward(ctx, g):
                return g * NUMBER
        @torch.compiler.allow_in_graph
        def call(x):
            return Op.apply(x)
        def f(x):
            return call(x).sin()
    """, unstored="the graph calls changed.call, which is not part of torch"),
    _change("definition: traced loosely", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.5
            @staticmethod
            def backward(ctx, g):
                return g * NUMBER
        @torch._dynamo.nonstrict_trace
        def call(x):
            return Op.apply(x)
        def f(x):
            return call(x).sin()
    """, unstored="flat_apply"),
    _change("definition: not compiled", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.5
            @staticmethod
            def backward(ctx, g):
                return g * NUMBER
        @torch.compiler.disable
        def call(x):
            return Op.apply(x)
        def f(x):
            return call(x.cos()).sin()
    """),
)  # fmt: skip

_CONTEXTS: Final = (
    _change("ctx: a number as an argument", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, factor):
                ctx.factor = factor
                return x * factor
            @staticmethod
            def backward(ctx, g):
                return g * ctx.factor, None
        def f(x):
            return Op.apply(x, NUMBER).sin()
    """),
    _change("ctx: needs_input_grad of a second input", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                return x * y
            @staticmethod
            def backward(ctx, g):
                return g * (3.0 if ctx.needs_input_grad[1] else 7.0), g
        def f(x):
            return Op.apply(x, torch.ones(4).requires_grad_(NUMBER > 3)).sin()
    """),
    _change("ctx: needs_input_grad of a detached input", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                return x * y
            @staticmethod
            def backward(ctx, g):
                return g * (3.0 if ctx.needs_input_grad[1] else 7.0), g
        def f(x):
            y = x * 1.0
            return Op.apply(x, y if NUMBER > 3 else y.detach()).sin()
    """),
    _change("ctx: mark_dirty", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.mark_dirty(x)
                return x.mul_(NUMBER)
            @staticmethod
            def backward(ctx, g):
                return g * NUMBER
        def f(x):
            y = x.cos()
            return Op.apply(y).sin()
    """),
    _change("ctx: mark_non_differentiable", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                a, b = x * 1.5, x * 2.5
                if NUMBER > 3:
                    ctx.mark_non_differentiable(b)
                return a, b
            @staticmethod
            def backward(ctx, g, h):
                return g + h
        def f(x):
            a, b = Op.apply(x)
            return a.sin() + b.cos()
    """),
    _change("ctx: set_materialize_grads", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.set_materialize_grads(NUMBER > 3)
                return x * 1.5, x * 2.5
            @staticmethod
            def backward(ctx, g, h):
                return g * (3.0 if h is None else 7.0)
        def f(x):
            return Op.apply(x)[0].sin()
    """, reference="aot_eager"),
    _change("ctx: which of two outputs is used", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.5, x * 2.5
            @staticmethod
            def backward(ctx, g, h):
                return g * 3.0 + h * 7.0
        def f(x):
            return Op.apply(x)[int(NUMBER) % 2].sin()
    """),
    _change("ctx: a view as output", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view(2, 2)
            @staticmethod
            def backward(ctx, g):
                return g.reshape(4) * NUMBER
        def f(x):
            return Op.apply(x).sin()
    """),
    _change("ctx: an integer output", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                index = (x * NUMBER).to(torch.int64)
                ctx.mark_non_differentiable(index)
                return x * 1.5, index
            @staticmethod
            def backward(ctx, g, h):
                return g
        def f(x):
            return Op.apply(x)
    """),
    _change("ctx: no gradient for x", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                return x * y
            @staticmethod
            def backward(ctx, g):
                return (None, g) if NUMBER > 3 else (g, g)
        def f(x):
            return Op.apply(x, x * 2.0).sin()
    """),
    _change("ctx: a hook on a gradient", _PLAIN.replace(_F, """
    y = Op.apply(x)
    y.register_hook(lambda g: g * NUMBER)
    return y.sin()"""), unstored="the higher-order operator register_hook"),
    _change("ctx: inside a checkpoint", _PLAIN.replace("x * 3.0", "x * NUMBER").replace(_F, """
    from torch.utils.checkpoint import checkpoint
    return checkpoint(Op.apply, x, use_reentrant=False).sin()""")),
    _change("ctx: inside a nested region", _PLAIN.replace("x * 3.0", "x * NUMBER").replace(_F, """
    return region(region(x)).sin()
@torch.compiler.nested_compile_region
def region(x):
    return Op.apply(x)""")),
    _change("ctx: a gradient of a gradient", _PLAIN.replace("x * 3.0", "x * NUMBER").replace(_F, """
    return torch.func.grad(lambda x: (x * x).sum())(Op.apply(x))""")),
    _change("ctx: a rule for vmap", """
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(x):
                return x * 1.5
            @staticmethod
            def setup_context(ctx, inputs, output):
                pass
            @staticmethod
            def backward(ctx, g):
                return g
            @staticmethod
            def vmap(info, in_dims, x):
                return x * NUMBER, in_dims[0]
        def f(x):
            return torch.vmap(Op.apply)(x).sin()
    """),
    _change("ctx: a generated rule for vmap", """
        class Op(torch.autograd.Function):
            generate_vmap_rule = True
            @staticmethod
            def forward(x):
                return x * NUMBER
            @staticmethod
            def setup_context(ctx, inputs, output):
                pass
            @staticmethod
            def backward(ctx, g):
                return g * NUMBER
        def f(x):
            return torch.vmap(Op.apply)(x).sin()
    """),
)  # fmt: skip

FUNCTION_CHANGES: Final = (*_BODIES, *_READS, *_DEFINITIONS, *_CONTEXTS)
