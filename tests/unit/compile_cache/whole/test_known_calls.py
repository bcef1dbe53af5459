"""Whatever can change what a call computes gives another key, and is noticed at the next call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.compile_cache.whole.known_calls import CallDescription, find_sharing

_SOURCE = """
import math
import torch
from torch import nn
import torch.nn.functional as F

SCALE = 2.0
TABLE = {"bias": 1.0, "steps": [1, 2]}

def helper(x, power=2):
    return x.pow(power) + TABLE["bias"]

def make_closure(limit):
    def clamp(x):
        return x.clamp(max=limit)
    return clamp

clamp = make_closure(3.0)

class Part(nn.Module):
    factor = 0.5
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
    def scaled(self, x):
        return x * self.factor
    @property
    def twice(self):
        return 2
    def forward(self, x):
        return self.scaled(self.linear(x)) - self.mean * self.twice

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])
        self.norm = nn.LayerNorm(4)
        self.rate = 0.25
        self.names = ["a", "b"]
        self.drop = nn.Dropout(0.1)
    def forward(self, x, flag=True):
        for part in self.parts:
            x = F.gelu(part(x))
        if flag:
            x = helper(x) * SCALE
        return clamp(self.drop(self.norm(x))) * self.rate * len(self.names)
"""


def _load(folder: Path, source: str) -> ModuleType:
    name = f"described_{abs(hash((str(folder), source)))}"
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    code = compile(source, str(path), "exec")
    exec(code, vars(module))
    return module


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    loaded = _load(tmp_path, _SOURCE)
    yield loaded
    del sys.modules[loaded.__name__]


def _describe(net: Any, *args: Any, **kwargs: Any) -> CallDescription:
    return CallDescription(net, args, kwargs, {})


def _key(net: Any, *args: Any, **kwargs: Any) -> str:
    try:
        return _describe(net, *args, **kwargs).key.digest
    except Uncacheable as error:
        return error.reason


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("F.gelu(part(x))", "F.relu(part(x))"),
        ("x.pow(power) +", "x.pow(power) -"),
        ("power=2", "power=3"),
        ("SCALE = 2.0", "SCALE = 2.5"),
        ('"bias": 1.0', '"bias": 1.5'),
        ("factor = 0.5", "factor = 0.75"),
        ("return x * self.factor", "return x / self.factor"),
        ("        return 2\n", "        return 3\n"),
        ("make_closure(3.0)", "make_closure(4.0)"),
        ("x.clamp(max=limit)", "x.clamp(min=limit)"),
        ("flag=True", "flag=False"),
        ("self.rate = 0.25", "self.rate = 0.5"),
        ('["a", "b"]', '["a", "b", "c"]'),
        ("nn.LayerNorm(4)", "nn.LayerNorm(4, eps=1e-3)"),
        ("nn.LayerNorm(4)", "nn.RMSNorm(4)"),
        ("nn.Dropout(0.1)", "nn.Dropout(0.2)"),
        ("nn.Linear(4, 4)", "nn.Linear(4, 4, bias=False)"),
        ("[Part(), Part()]", "[Part(), Part(), Part()]"),
    ],
)
def test_edited_source_gives_another_key(tmp_path: Path, before: str, after: str) -> None:
    assert before in _SOURCE
    one, other = _load(tmp_path, _SOURCE), _load(tmp_path, _SOURCE.replace(before, after))

    assert _key(one.Net(), X) != _key(other.Net(), X)


def test_comments_and_names_of_local_variables_do_not_change_the_key(tmp_path: Path) -> None:
    one = _load(tmp_path, _SOURCE)
    other = _load(
        tmp_path, "# a comment\n" + _SOURCE.replace("for part in", "for each in").replace("part(x)", "each(x)")
    )

    assert _key(one.Net(), X) == _key(other.Net(), X)


def _hook(*args: Any) -> None:
    pass


_CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "training flag": lambda module, net: net.eval(),
    "training flag of a part": lambda module, net: net.parts[0].eval(),
    "module attribute": lambda module, net: setattr(net, "rate", 0.5),
    "new module attribute": lambda module, net: setattr(net, "other", 1),
    "list of a module": lambda module, net: net.names.append("c"),
    "dtype": lambda module, net: net.double(),
    "dtype of one parameter": lambda module, net: setattr(net.norm.weight, "data", net.norm.weight.data.double()),
    "shape of a parameter": lambda module, net: setattr(net.parts[0], "linear", nn.Linear(4, 4, bias=False)),
    "requires_grad": lambda module, net: net.norm.weight.requires_grad_(False),
    "a parameter that becomes a buffer": lambda module, net: _replace_weight(net),
    "a shared parameter": lambda module, net: setattr(net.parts[0].linear, "weight", net.parts[1].linear.weight),
    "memory that is shared": lambda module, net: setattr(net.parts[0], "mean", net.parts[1].mean.view(4)),
    "forward hook": lambda module, net: net.norm.register_forward_hook(_hook),
    "forward pre-hook": lambda module, net: net.register_forward_pre_hook(_hook),
    "backward hook": lambda module, net: net.norm.register_full_backward_hook(_hook),
    "another part": lambda module, net: net.parts.append(module.Part()),
    "forward of an object": lambda module, net: setattr(net, "forward", lambda x: x),
    "forward of a class": lambda module, net: setattr(module.Part, "forward", lambda self, x: x),
    "method of a class": lambda module, net: setattr(module.Part, "scaled", lambda self, x: x),
    "class attribute": lambda module, net: setattr(module.Part, "factor", 3.0),
    "property": lambda module, net: setattr(module.Part, "twice", property(lambda self: 3)),
    "global": lambda module, net: setattr(module, "SCALE", 3.0),
    "global function": lambda module, net: setattr(module, "helper", lambda x: x),
    "code of a function": lambda module, net: setattr(module.helper, "__code__", (lambda x, power=2: x).__code__),
    "default of a function": lambda module, net: setattr(module.helper, "__defaults__", (3,)),
    "value in a global dictionary": lambda module, net: module.TABLE.update(bias=2.0),
    "nested list": lambda module, net: module.TABLE["steps"].append(3),
    "closure": lambda module, net: setattr(module.clamp.__closure__[0], "cell_contents", 9.0),
    "a name that hides a builtin": lambda module, net: setattr(module, "len", lambda x: 7),
    "dynamic size": lambda module, net: setattr(net.norm.weight, "_dynamo_dynamic_indices", {0}),
    "function of torch": lambda module, net: setattr(F, "gelu", F.relu),
    "function of torch, replaced by yours": lambda module, net: setattr(F, "layer_norm", lambda *a, **k: a[0]),
    "method of torch's module": lambda module, net: setattr(nn.Linear, "forward", lambda self, x: x),
    "method of tensors": lambda module, net: setattr(torch.Tensor, "clamp", lambda self, **k: self),
}


def _replace_weight(net: Any) -> None:
    weight = net.norm.weight
    del net.norm.weight
    net.norm.register_buffer("weight", weight.detach())


@pytest.fixture
def restored_torch() -> Iterator[None]:
    names = ((F, "gelu"), (F, "layer_norm"), (nn.Linear, "forward"))
    saved = [(owner, name, getattr(owner, name)) for owner, name in names]
    yield
    for owner, name, value in saved:
        setattr(owner, name, value)
    if "clamp" in vars(torch.Tensor):
        del torch.Tensor.clamp


@pytest.mark.usefixtures("restored_torch")
@pytest.mark.parametrize("change", _CHANGES)
def test_every_change_is_noticed_at_the_next_call_and_gives_another_key(module: ModuleType, change: str) -> None:
    net = module.Net()
    call = _describe(net, X)
    assert not call.is_stale()
    assert call.match((X,), {}) is not None

    _CHANGES[change](module, net)

    assert call.is_stale() or call.match((X,), {}) is None
    assert _key(net, X) != call.key.digest


@pytest.mark.parametrize(
    "args",
    [
        (torch.ones(3, 4),),
        (torch.ones(2, 4, dtype=torch.float64),),
        (torch.ones(4, 2).T,),
        (torch.ones(2, 4, requires_grad=True),),
        (torch.ones(2, 4), True),
        (torch.ones(2, 4), 1),
        ([torch.ones(2, 4)],),
        (nn.Parameter(torch.ones(2, 4)),),
        (torch.ones(2, 4, device="meta"),),
        (),
    ],
    ids=str,
)
def test_other_arguments_have_another_key(module: ModuleType, args: tuple[Any, ...]) -> None:
    net = module.Net()
    call = _describe(net, X)

    assert call.match(args, {}) is None
    assert _key(net, *args) != call.key.digest


def test_equal_arguments_have_the_same_key_and_are_recognised(module: ModuleType) -> None:
    net = module.Net()
    call = _describe(net, X, flag=True)
    other = torch.zeros(2, 4)

    found = call.match((other,), {"flag": True})

    assert found is not None
    assert found[-1] is other
    assert _key(net, other, flag=True) == call.key.digest


def test_another_object_with_the_same_code_and_shapes_has_the_same_key(module: ModuleType) -> None:
    assert _key(module.Net(), X) == _key(module.Net(), X)


def test_equal_parts_in_another_order_have_the_same_key_but_are_described_again(module: ModuleType) -> None:
    net = module.Net()
    call = _describe(net, X)

    net.parts._modules.update({"0": net.parts[1], "1": net.parts[0]})

    assert call.is_stale()
    assert _key(net, X) == call.key.digest


def test_the_same_tensor_twice_is_another_call_than_two_tensors() -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    x, y = torch.ones(2), torch.ones(2)
    call = _describe(add, x, y)

    assert call.match((x, x), {}) is None
    assert _key(add, x, x) != call.key.digest


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("cpu"),
        torch.autograd.detect_anomaly,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        torch.autograd.forward_ad.dual_level,
        torch.utils._python_dispatch.TorchDispatchMode,
        torch._C.DisableTorchFunction,
    ],
    ids=range(9),
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_modes_of_torch_are_part_of_a_call(module: ModuleType, mode: Callable[[], Any]) -> None:
    net = module.Net()
    call = _describe(net, X)

    with mode():
        assert call.match((X,), {}) is None
        assert _key(net, X) != call.key.digest


def test_global_settings_of_torch_are_part_of_a_call(module: ModuleType) -> None:
    net = module.Net()
    call = _describe(net, X)
    torch.use_deterministic_algorithms(True)
    try:
        assert call.match((X,), {}) is None
        assert _key(net, X) != call.key.digest
    finally:
        torch.use_deterministic_algorithms(False)


def test_hooks_for_all_modules_are_refused(module: ModuleType) -> None:
    net = module.Net()
    call = _describe(net, X)
    handle = nn.modules.module.register_module_forward_hook(_hook)
    try:
        assert call.match((X,), {}) is None
        assert _key(net, X) == "hooks are registered for all modules"
    finally:
        handle.remove()


def test_tensors_that_share_memory_are_listed_with_their_offsets() -> None:
    x = torch.zeros(8)

    assert find_sharing([x[:4], torch.zeros(2), x[4:]]) == [[[0, 0], [2, 16]]]
