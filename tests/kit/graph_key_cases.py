"""Pairs of calls: those that are the same work, and those that differ in one part of their keys."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.compile_cache.key_parts import GraphKey
from tests.kit.graph_keys import key_of

MakeKey = Callable[[], GraphKey]

# Any: what torch puts on these modules when it makes them.
_INDUCTOR: Final[Any] = inductor_config
_FUNCTORCH: Final[Any] = functorch_config


@dataclass(frozen=True, slots=True)
class Pair:
    """Two calls that have one key, or differ in some parts of it."""

    name: str
    one: MakeKey
    other: MakeKey
    parts: tuple[str, ...] = ()


def call(function: Callable[..., object], *inputs: object, **how: Any) -> MakeKey:
    return lambda: key_of(function, *inputs, **how)


def under(context: Callable[[], contextlib.AbstractContextManager[Any]], make: MakeKey) -> MakeKey:
    def inside() -> GraphKey:
        with context():
            return make()

    return inside


def quietly(make: MakeKey) -> MakeKey:
    """Ignore the warnings of torch."""
    return under(_ignoring_warnings, make)


@contextlib.contextmanager
def _ignoring_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def written(source: str, *inputs: object, filename: str = "<test>", **how: Any) -> MakeKey:
    """Call the function `f` of a source text, as if it were in a file."""

    def make() -> GraphKey:
        names: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(source, filename, "exec"), names)
        return key_of(names["f"], *inputs, **how)

    return make


def X(*shape: int) -> Tensor:
    return torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(shape)


class Net(nn.Module):
    def __init__(self, width: int = 4, p: float = 0.5) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.first(x).relu())  # type: ignore[no-any-return]  # modules return Any


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights_of_mine = nn.Linear(4, 4)
        self.sometimes = nn.Dropout(0.5)

    def forward(self, data: Tensor) -> Tensor:
        hidden = self.weights_of_mine(data)
        return self.sometimes(hidden.relu())  # type: ignore[no-any-return]  # modules return Any


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]  # modules return Any


def branches(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))


def renamed_branches(data: Tensor) -> Any:
    def yes(value: Tensor) -> Tensor:
        return value.sin()

    def no(other: Tensor) -> Tensor:
        return other.cos()

    return torch.cond(data.sum() > 0, yes, no, (data,))


def swapped_branches(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a.cos(), lambda a: a.sin(), (x,))


@contextlib.contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    """Change a setting of torch inside the `with` block."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def halves(start: int) -> tuple[Tensor, Tensor]:
    """Return two views of one memory, the second after `start` items."""
    memory = torch.zeros(16)
    return memory[:4], memory[start : start + 4]


def marked(size: int, **bounds: int) -> Tensor:
    x = X(size, 3)
    torch._dynamo.mark_dynamic(x, 0, **bounds)
    return x


def unaligned() -> Tensor:
    return torch.zeros(9)[1:]


def relu(x: Tensor) -> Tensor:
    return x.relu()


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def scale_two(x: Tensor) -> Tensor:
    return x * x.shape[0] + x.shape[1]


BASE: Final = call(relu, X(4, 4))
ADD: Final = call(add, X(4), X(4))
TWO_SIZES: Final = "def f({a}, {b}):\n    return torch.cat([{a}, {b}]).sum() * ({a}.shape[0] + {b}.shape[0])\n"

SAME: Final = (
    Pair("other values", BASE, call(relu, -X(4, 4))),
    Pair(
        "other names of variables",
        written("def f(x):\n    y = x.sin()\n    return y + x", X(4)),
        written("def f(zz):\n    aa = zz.sin()\n    return aa + zz", X(4)),
    ),
    Pair("another function of the same lines", BASE, call(lambda data: data.relu(), X(4, 4))),
    Pair(
        "another file and line",
        written("def f(x):\n    return x.sin()", X(4), filename="/somewhere/a.py"),
        written("\n\n\ndef f(x):\n    # a comment\n    return x.sin()", X(4), filename="/else/b.py"),
    ),
    Pair(
        "a temporary more or less",
        written("def f(x):\n    return x.sin().cos()", X(4)),
        written("def f(x):\n    a = x.sin()\n    b = a.cos()\n    return b", X(4)),
    ),
    Pair("other weights", call(Net(), X(2, 4)), call(Net(), X(2, 4))),
    Pair("other names of modules", call(Net(), X(2, 4)), call(Renamed(), X(2, 4))),
    Pair("buffers that change", call(Norm(), X(2, 4)), call(Norm(), X(2, 4))),
    Pair("other names of branches", call(branches, X(4)), call(renamed_branches, X(4))),
    Pair("other sizes that are dynamic", call(relu, X(4, 5), dynamic=True), call(relu, X(7, 9), dynamic=True)),
    Pair(
        "other names of dynamic inputs",
        written(TWO_SIZES.format(a="x", b="y"), X(4), X(5), dynamic=True),
        written(TWO_SIZES.format(a="second", b="first"), X(6), X(9), dynamic=True),
    ),
    Pair("sizes in the code", call(scale_two, X(4, 5), dynamic=True), call(scale_two, X(8, 3), dynamic=True)),
    Pair("threads that compile", BASE, under(lambda: _INDUCTOR.patch(compile_threads=7), BASE)),
    Pair("another path to the compiler", BASE, under(lambda: _INDUCTOR.patch({"cpp.cxx": (None, "/opt/g++")}), BASE)),
    Pair("traces of the compiler", BASE, under(lambda: _INDUCTOR.patch({"trace.enabled": True, "debug": True}), BASE)),
    Pair("torch's own caches", BASE, under(lambda: _FUNCTORCH.patch(enable_autograd_cache=False), BASE)),
    Pair("an option that is no option", BASE, call(relu, X(4, 4), options={"compile_threads": 3})),
    Pair(
        "options in another order",
        call(relu, X(4, 4), options={"max_autotune": True, "epilogue_fusion": False}),
        call(relu, X(4, 4), options={"epilogue_fusion": False, "max_autotune": True}),
    ),
    Pair("the same sharing elsewhere", call(add, *halves(4)), call(add, *halves(4))),
    Pair("the same tensor twice", call(lambda x: x + x, X(4)), call(lambda x: x + x, X(4))),
)

GRAPH: Final = (
    Pair("another function", BASE, call(torch.sin, X(4, 4)), ("graph",)),
    Pair("another number", call(lambda x: x * 2, X(4)), call(lambda x: x * 3, X(4)), ("graph",)),
    Pair("an int or a float", call(lambda x: x * 2, X(4)), call(lambda x: x * 2.0, X(4)), ("graph",)),
    Pair("an int or a bool", call(lambda x: x * 1, X(4)), call(lambda x: x * True, X(4)), ("graph",)),
    Pair("a zero's sign", call(lambda x: x + 0.0, X(4)), call(lambda x: x + -0.0, X(4)), ("graph",)),
    Pair(
        "operands swapped", call(lambda x, y: x - y, X(4), X(4)), call(lambda x, y: y - 2 * x, X(4), X(4)), ("graph",)
    ),
    Pair(
        "outputs swapped",
        call(lambda x: (x.sin(), x.cos()), X(4)),
        call(lambda x: (x.cos(), x.sin()), X(4)),
        ("graph",),
    ),
    Pair("an output more", call(lambda x: x.sin(), X(4)), call(lambda x: (x.sin(), x.cos()), X(4)), ("graph",)),
    Pair("another slice", call(lambda x: x[1:3], X(4)), call(lambda x: x[1:4:2], X(4)), ("graph",)),
    Pair("a dtype in the code", call(lambda x: x.double(), X(4)), call(lambda x: x.half(), X(4)), ("graph",)),
    Pair(
        "functions of one qualified name",
        call(lambda x: F.max_pool2d(x, 2), X(1, 1, 4, 4)),
        call(lambda x: F.adaptive_max_pool2d(x, 2), X(1, 1, 4, 4)),
        ("graph",),
    ),
    Pair("dropout's chance", call(Net(p=0.5), X(2, 4)), call(Net(p=0.25), X(2, 4)), ("graph",)),
    Pair("training or not", call(Net(), X(2, 4)), call(Net().eval(), X(2, 4)), ("graph",)),
    Pair("branches swapped", call(branches, X(4)), call(swapped_branches, X(4)), ("graph",)),
    Pair(
        "autocast within",
        written("def f(x):\n    with torch.autocast('cpu', dtype=torch.bfloat16):\n        return x @ x", X(4, 4)),
        written("def f(x):\n    with torch.autocast('cpu', dtype=torch.float16):\n        return x @ x", X(4, 4)),
        ("graph",),
    ),
    Pair(
        "a note to the compiler",
        written("def f(x):\n    with torch.fx.traceback.annotate({'budget': 1}):\n        return x.sin()", X(4)),
        written("def f(x):\n    with torch.fx.traceback.annotate({'budget': 2}):\n        return x.sin()", X(4)),
        ("graph",),
    ),
    Pair(
        "a literal tensor",
        call(lambda x: x + torch.tensor([1.0, 2.0]), X(2)),
        call(lambda x: x + torch.tensor([1.0, 3.0]), X(2)),
        ("graph",),
    ),
)

INPUTS: Final = (
    Pair("another dtype", BASE, call(relu, X(4, 4).double()), ("inputs",)),
    Pair("another size", BASE, call(relu, X(4, 5)), ("inputs",)),
    Pair("another order of items", BASE, call(relu, X(4, 4).t()), ("inputs",)),
    Pair("it requires grad", BASE, call(relu, X(4, 4).requires_grad_()), ("inputs",)),
    Pair("it is a parameter", call(relu, X(4, 4).requires_grad_()), call(relu, nn.Parameter(X(4, 4))), ("inputs",)),
    Pair(
        "it is no leaf", call(relu, X(4).requires_grad_()), quietly(call(relu, X(4).requires_grad_() * 1)), ("inputs",)
    ),
    Pair("a size that is dynamic", call(relu, X(4, 3)), call(relu, marked(4)), ("inputs", "graph")),
    Pair("bounds of a size", call(relu, marked(4)), call(relu, marked(4, min=3, max=64)), ("inputs",)),
    Pair(
        "sizes that are equal",
        call(relu, X(4, 5), dynamic=True),
        call(relu, X(6, 6), dynamic=True),
        ("inputs", "graph"),
    ),
    Pair("a conjugate", call(torch.real, X(4) * 1j), call(torch.real, (X(4) * 1j).conj()), ("inputs",)),
    Pair("an offset", call(relu, torch.zeros(8)), call(relu, unaligned()), ("inputs",)),
    Pair("inference tensors", BASE, call(relu, torch.inference_mode()(lambda: X(4, 4))()), ("inputs",)),
    Pair("inputs that share memory", ADD, call(add, *halves(0)), ("aliasing",)),
    Pair("memory shared in another way", call(add, *halves(4)), call(add, *halves(8)), ("inputs", "aliasing")),
)

FLAGS: Final = (
    Pair("no grad", BASE, under(torch.no_grad, BASE), ("flags",)),
    Pair("autocast", BASE, under(lambda: torch.autocast("cpu", dtype=torch.bfloat16), BASE), ("flags",)),
    Pair(
        "another autocast",
        under(lambda: torch.autocast("cpu", dtype=torch.bfloat16), BASE),
        under(lambda: torch.autocast("cpu", dtype=torch.float16), BASE),
        ("flags",),
    ),
    Pair(
        "the dtype of an autocast that names none",
        written("def f(x):\n    with torch.autocast('cpu'):\n        return x @ x", X(4, 4)),
        under(
            lambda: setting(
                lambda: torch.get_autocast_dtype("cpu"),
                lambda dtype: torch.set_autocast_dtype("cpu", dtype),
                torch.float16,
            ),
            written("def f(x):\n    with torch.autocast('cpu'):\n        return x @ x", X(4, 4)),
        ),
        ("flags",),
    ),
    Pair(
        "deterministic algorithms",
        BASE,
        under(
            lambda: setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True), BASE
        ),
        ("flags", "config"),
    ),
    Pair(
        "the default dtype",
        BASE,
        under(lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64), BASE),
        ("flags",),
    ),
    Pair("threads", BASE, under(lambda: setting(torch.get_num_threads, torch.set_num_threads, 3), BASE), ("flags",)),
    Pair(
        "precision of matmul",
        BASE,
        under(lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"), BASE),
        ("flags",),
    ),
    Pair(
        "mkldnn",
        BASE,
        under(lambda: setting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False), BASE),
        ("flags",),
    ),
    Pair(
        "kinds of attention",
        BASE,
        under(
            lambda: setting(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False), BASE
        ),
        ("flags",),
    ),
)

SETTINGS: Final = (
    Pair("inductor's settings", BASE, under(lambda: _INDUCTOR.patch({"cpp.simdlen": 256}), BASE), ("config",)),
    Pair("random numbers as eager", BASE, under(lambda: _INDUCTOR.patch(fallback_random=True), BASE), ("config",)),
    Pair("the memory budget", BASE, under(lambda: _FUNCTORCH.patch(activation_memory_budget=0.5), BASE), ("config",)),
    Pair(
        "what the compiled graph records about its origin",
        BASE,
        under(lambda: _INDUCTOR.patch({"trace.provenance_tracking_level": 2}), BASE),
        ("config",),
    ),
    Pair("an option", BASE, call(relu, X(4, 4), options={"max_autotune": True}), ("options",)),
    Pair(
        "another value of an option",
        call(relu, X(4, 4), options={"max_autotune": True}),
        call(relu, X(4, 4), options={"max_autotune": False}),
        ("options",),
    ),
)

OTHER: Final = GRAPH + INPUTS + FLAGS + SETTINGS


def list_digests() -> dict[str, str]:
    """Return the key of one side of many pairs, by its name."""
    return {pair.name: pair.one().digest for pair in SAME + INPUTS}
