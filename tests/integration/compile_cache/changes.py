"""Programs before and after a change, and a cache that is as right as its keys.

A `Change` consists of two programs that differ in one thing: a setting, a constant, a line of code. Each returns all
tensors that could be wrong. `SimulatedCache` stores what `aot_eager` makes of a graph under the graph's real key. If
the key leaves out what has changed, the second program gets the graph of the first, as it would from a store, and its
result differs from that of eager torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import GraphModule

from holdfast.compile_cache.backend import Compiler
from holdfast.compile_cache.inductor import lift_tensors
from holdfast.compile_cache.key.key import make_key
from holdfast.compile_cache.key_parts import GraphKey, Uncacheable

Compile = Callable[..., Any]
Program = Callable[[Compile], list[Tensor]]
"""Compiles something by the function that it is given, runs it, and returns all tensors that could be wrong."""


@dataclass(frozen=True, slots=True)
class Change:
    """Two programs that differ in one thing."""

    name: str
    before: Program
    after: Program
    is_visible: bool = True
    """Whether the change changes the result of eager torch. If not, such as `foreach`, no result may become wrong."""
    reference: Literal["eager", "aot_eager"] = "eager"
    """What is right: "aot_eager" for what torch compiles in a way that differs from eager torch, with any cache."""
    unstored: str = ""
    """Why nothing is stored; a part of the reason, or "no graph" if dynamo traces none. "" if graphs are stored."""


@dataclass(slots=True)
class SimulatedCache:
    """A backend for `torch.compile` with a cache in memory."""

    identify: Callable[[GraphKey], str] = lambda key: key.digest
    """Returns what a graph is stored under. Tests replace it by something that is not a key."""
    entries: dict[str, Callable[..., Any]] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    reasons: list[str] = field(default_factory=list)

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled graph, as `Compiler` does."""
        try:
            lifted = lift_tensors(graph)
            asked, given = (graph, inputs) if lifted is None else (lifted.graph, [*lifted.tensors, *inputs])
            name = self.identify(make_key(asked, given, options={}, versions={}))
        except Uncacheable as error:
            self.reasons.append(error.reason)
            made: Callable[..., Any] = aot_eager(graph, list(inputs))
            return made
        if name in self.entries:
            self.hits += 1
        else:
            self.entries[name] = aot_eager(asked, list(given))
            self.misses += 1  # not counted if the compiler makes dynamo trace again
        return self.entries[name] if lifted is None else lifted.bind(self.entries[name])


class StoreCache:
    """A backend that compiles with inductor and stores what it makes; with the counts of a `SimulatedCache`."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled graph."""
        return self._compiler(graph, inputs)

    @property
    def hits(self) -> int:
        return self._compiler.statistics.hit

    @property
    def misses(self) -> int:
        return self._compiler.statistics.miss

    @property
    def reasons(self) -> list[str]:
        return [*self._compiler.statistics.bypass, *self._compiler.statistics.not_saved]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a program, eager and compiled."""

    eager: list[Tensor]
    right: list[Tensor]
    """Equal to `eager`, unless torch itself compiles the program in a way that differs from it."""
    compiled: list[Tensor]
    hits: int
    misses: int
    reasons: Sequence[str] = ()


def run_program(program: Program, cache: SimulatedCache | StoreCache, *, reference: str = "eager") -> Outcome:
    """Run a program eagerly, and compiled with a cache."""
    hits, misses, num_reasons = cache.hits, cache.misses, len(cache.reasons)
    eager = _run(program, lambda function: function)
    right = eager if reference == "eager" else _run(program, functools.partial(torch.compile, backend=reference))
    compiled = _run(program, functools.partial(torch.compile, backend=cache))
    return Outcome(eager, right, compiled, cache.hits - hits, cache.misses - misses, cache.reasons[num_reasons:])


def _run(program: Program, compile_: Compile) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return [tensor.detach().clone() for tensor in program(compile_)]


def search(change: Change, cache: SimulatedCache | StoreCache) -> list[str]:
    """Run both programs, then the first one again, and return what is wrong."""
    programs = (change.before, change.after, change.before)
    return judge(change, *(run_program(each, cache, reference=change.reference) for each in programs))


def judge(change: Change, before: Outcome, after: Outcome, again: Outcome) -> list[str]:
    """Return what is wrong with the outcomes of three runs: before the change, after it, and before it again."""
    wrong = []
    for role, outcome in (("before", before), ("after", after), ("again", again)):
        if not are_close(outcome.compiled, outcome.right):
            wrong.append(f"{role}: {_show(outcome.compiled)} for {_show(outcome.right)}")
    if are_close(before.eager, after.eager) == change.is_visible:
        wrong.append("eager results are equal" if change.is_visible else "eager results differ")
    return wrong + _judge_use(change, before, again)


def _judge_use(change: Change, before: Outcome, again: Outcome) -> list[str]:
    """Return what is wrong with the use of the cache; a search in which nothing is stored would find nothing."""
    if change.unstored:
        expected = change.unstored == "no graph" or any(change.unstored in reason for reason in before.reasons)
        return [] if expected and not before.misses + again.hits else [f"not unstored for {change.unstored}: {before}"]
    if before.reasons:
        return [f"not stored: {before.reasons[0]}"]
    if not before.misses or again.misses or again.hits != before.misses + before.hits:
        return [f"misses and hits: {before.misses} and {before.hits}, again {again.misses} and {again.hits}"]
    return []


def are_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal but for rounding."""
    return len(ours) == len(theirs) and all(
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        for one, other in zip(ours, theirs, strict=True)
    )


def _show(tensors: Sequence[Tensor]) -> str:
    return str([tensor.flatten()[:4].tolist() for tensor in tensors[:4]])
