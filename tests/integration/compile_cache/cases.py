"""Cases to compile. Each is a function of the compile function and returns all tensors that could be wrong."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

Compile = Callable[..., Any]


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.mlp(x)
        return y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


class Broken(nn.Module):
    """Two graphs, separated by code that dynamo cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        y: Tensor = torch.sigmoid(self.second(x))
        return y


def step(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Return all tensors that a training step creates or changes."""
    torch.manual_seed(7)
    model.zero_grad()
    y = run(x)
    y.float().square().mean().backward()  # type: ignore[no-untyped-call]  # torch's
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [y, *gradients, *model.buffers()]


def _make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def infer_mlp(compile_: Compile) -> list[Tensor]:
    model = _make_mlp()
    with torch.no_grad():
        return [compile_(model)(torch.randn(8, 16))]


def train_mlp(compile_: Compile) -> list[Tensor]:
    model = _make_mlp()
    return step(model, compile_(model), torch.randn(8, 16))


def many_sizes(compile_: Compile) -> list[Tensor]:
    run = compile_(lambda x, y: (x @ y).relu().sum(0), dynamic=True)
    return [run(torch.randn(size, 16), torch.randn(16, 4)) for size in (5, 9, 33)]


def other_sizes(compile_: Compile) -> list[Tensor]:
    run = compile_(lambda a, b: (a @ b).relu().sum(0), dynamic=True)
    return [run(torch.randn(size, 16), torch.randn(16, 4)) for size in (50, 7)]


def train_block(compile_: Compile) -> list[Tensor]:
    model = Block()
    return step(model, compile_(model), torch.randn(2, 8, 32))


def train_cnn(compile_: Compile) -> list[Tensor]:
    convolution = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(*convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return step(model, compile_(model), torch.randn(4, 3, 16, 16))


def train_tied(compile_: Compile) -> list[Tensor]:
    model = Tied()
    return step(model, compile_(model), torch.randint(20, (4, 6)))


def train_dropout(compile_: Compile) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    return step(model, compile_(model), torch.randn(8, 16))


def train_broken(compile_: Compile) -> list[Tensor]:
    model = Broken()
    return step(model, compile_(model), torch.randn(4, 8))


def train_autocast(compile_: Compile) -> list[Tensor]:
    model = _make_mlp()
    run = compile_(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return step(model, run, torch.randn(8, 16))


def infer_inference_mode(compile_: Compile) -> list[Tensor]:
    model = _make_mlp().eval()
    with torch.inference_mode():
        return [compile_(model)(torch.randn(8, 16)).clone()]


def infer_autotuned(compile_: Compile) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    with torch.no_grad():
        return [compile_(model, mode="max-autotune")(torch.randn(32, 64))]


def train_restart(compile_: Compile) -> list[Tensor]:
    """With dynamic=True, the norm's epsilon is first an input; then the compiler makes dynamo trace again."""
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32))
    return step(model, compile_(model, dynamic=True), torch.randn(8, 16))


def _train_normed(compile_: Compile, size: int) -> list[Tensor]:
    model = nn.LayerNorm(32)
    x = torch.randn(size, 32, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    return step(model, compile_(model), x)


def train_few_rows(compile_: Compile) -> list[Tensor]:
    return _train_normed(compile_, 16)


def train_many_rows(compile_: Compile) -> list[Tensor]:
    return _train_normed(compile_, 5000)


def mutated_input(compile_: Compile) -> list[Tensor]:
    def add(total: Tensor, x: Tensor) -> Tensor:
        total.add_(x.sum())
        return total * 2

    total, run = torch.zeros(4), compile_(add)
    return [run(total, torch.randn(8)), run(total, torch.randn(8)), total]


def autograd_function(compile_: Compile) -> list[Tensor]:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    x = torch.randn(8, requires_grad=True)
    double: Callable[[Tensor], Tensor] = Double.apply
    y = compile_(lambda x: double(x).sin())(x)
    y.sum().backward()
    assert x.grad is not None
    return [y, x.grad]


def train_optimizer(compile_: Compile) -> list[Tensor]:
    """A whole training step in one function: the graphs of model and optimizer."""
    model = _make_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        return loss

    run = compile_(train)
    losses = [run(torch.randn(8, 16)) for _ in range(3)]
    state = [each[name] for each in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [*losses, *model.parameters(), *state]


class Stack(nn.Module):
    """An embedding, and layers of one kind between it and a head."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(32, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class NumberedBlock(Block):
    """Reads its number, which decides nothing, so that dynamo traces each layer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        if self.number < 0:
            raise ValueError("layers are numbered from 0")
        return super().forward(x)


def _train_stack(compile_: Compile, layers: list[nn.Module]) -> list[Tensor]:
    """Train with each layer compiled for itself."""
    model = Stack(layers)
    run = copy.copy(model)
    run._modules = {**model._modules, "layers": nn.ModuleList(map(compile_, layers))}
    return step(model, run, torch.randint(20, (2, 8)))


def train_2_layers(compile_: Compile) -> list[Tensor]:
    return _train_stack(compile_, [Block() for _ in range(2)])


def train_6_layers(compile_: Compile) -> list[Tensor]:
    return _train_stack(compile_, [Block() for _ in range(6)])


def train_12_layers(compile_: Compile) -> list[Tensor]:
    return _train_stack(compile_, [Block() for _ in range(12)])


def train_numbered_layers(compile_: Compile) -> list[Tensor]:
    with torch._dynamo.config.patch(recompile_limit=12):
        return _train_stack(compile_, [NumberedBlock(number) for number in range(12)])


def train_layers_from_data(compile_: Compile) -> list[Tensor]:
    """Four layers of one kind. The input of the first needs no gradient, so it has another backward."""
    layers = [Block() for _ in range(4)]
    run = nn.Sequential(*(compile_(layer) for layer in layers))
    return step(nn.Sequential(*layers), run, torch.randn(2, 8, 32))


def train_region(compile_: Compile) -> list[Tensor]:
    """One graph that calls the graph of a layer four times."""

    @torch.compiler.nested_compile_region
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        return y

    class Region(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = call(self.layer, x)
            return y

    model = Stack([Region(Block()) for _ in range(4)])
    return step(model, compile_(model), torch.randint(20, (2, 8)))


def hooked(compile_: Compile) -> list[Tensor]:
    """A graph that cannot be cached."""
    x = torch.randn(8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        y: Tensor = compile_(torch.sin)(x)
    y.sum().backward()  # type: ignore[no-untyped-call]  # torch's
    assert x.grad is not None
    return [y, x.grad]


CASES: Final[dict[str, Callable[[Compile], list[Tensor]]]] = {
    case.__name__: case
    for case in (
        infer_mlp,
        train_mlp,
        many_sizes,
        other_sizes,
        train_block,
        train_cnn,
        train_tied,
        train_dropout,
        train_broken,
        train_autocast,
        infer_inference_mode,
        infer_autotuned,
        train_restart,
        train_few_rows,
        train_many_rows,
        mutated_input,
        autograd_function,
        train_optimizer,
        train_2_layers,
        train_6_layers,
        train_12_layers,
        train_numbered_layers,
        train_layers_from_data,
        train_region,
        hooked,
    )
}


@contextlib.contextmanager
def afresh() -> Iterator[None]:
    """Run a case as in a new process, except that modules are already imported."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
