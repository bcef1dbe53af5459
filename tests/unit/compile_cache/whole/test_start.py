"""A callable starts from the store, or is compiled as usual: never with a wrong result, never with an error of ours."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.compile_cache.artifacts.catalog import iter_artifacts
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.compile_cache.choices import Strict
from holdfast.compile_cache.counters import CacheCounters
from holdfast.compile_cache.whole.known_calls import CallDescription
from holdfast.compile_cache.whole.program import GeneratedCode, Program
from holdfast.compile_cache.whole.start import WholeCall, WholeModule
from holdfast.errors import CompileCacheError
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository, open_repository
from tests.kit.hooking import Hook

X = torch.arange(8.0).reshape(2, 4)
_PROGRAM = Program(
    inputs=(1,),
    num_outputs=1,
    result={"output": 0},
    mutated=(),
    changes_inputs=False,
    disable_autocast=False,
    forward=GeneratedCode("def call(args):\n    x, = args\n    args.clear()\n    return (x * 3,)\n", {}, (), ()),
    backward=None,
    autograd=None,
)


class _Triple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor([3.0]))
        self.note = "x"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * 3
        return y


@dataclass
class _Record:
    result: Any
    program: Program | None
    reason: str = ""
    kernels: Mapping[str, bytes] = field(default_factory=dict)
    seconds: float = 2.0


@dataclass
class _Ordinary:
    """Stands for the usual compilation, and counts its calls."""

    module: Any
    program: Program | None = _PROGRAM
    reason: str = ""
    calls: int = 0
    recorded: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module(*args, **kwargs)

    def record(self, call: CallDescription, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Record:
        self.recorded += 1
        return _Record(self.module(*args, **kwargs), self.program, self.reason)


@pytest.fixture
def repo() -> Repository:
    return open_repository(MemoryStore(), create=True)


def _make(repo: Repository, ordinary: _Ordinary, *, strict: Strict = False) -> WholeCall:
    def make_ordinary(counters: CacheCounters) -> _Ordinary:
        return ordinary

    return WholeCall(ordinary.module, repo, trust=Trust(), options={}, make_ordinary=make_ordinary, strict=strict)


def test_the_second_process_runs_what_the_first_has_stored(repo: Repository) -> None:
    with torch.no_grad():
        first = _Ordinary(_Triple())
        assert torch.equal(_make(repo, first)(X), X * 3)
        second = _Ordinary(_Triple())
        call = _make(repo, second)
        assert torch.equal(call(X), X * 3)
        assert torch.equal(call(X + 1), (X + 1) * 3)

    assert (first.recorded, second.recorded, second.calls) == (1, 0, 0)
    assert (call.statistics.hit, call.statistics.seconds_saved) == (1, 2.0)


@pytest.mark.parametrize("kind", [ABCMeta("Abstract", (), {}), Sized], ids=["a class of the user", "a class of Python"])
def test_a_class_that_is_registered_with_another_is_noticed_at_the_next_call(repo: Repository, kind: type[Any]) -> None:
    class Part:
        pass

    def scale(x: Tensor) -> Tensor:
        return x * 5 if isinstance(Part(), kind) else x * 3

    with torch.no_grad():
        _make(repo, _Ordinary(scale, replace(_PROGRAM, inputs=(0,))))(X)
        call = _make(repo, _Ordinary(scale, replace(_PROGRAM, inputs=(0,))))
        assert torch.equal(call(X), X * 3)
        assert call.statistics.hit == 1
        kind.register(Part)

        assert torch.equal(call(X), X * 5)
        assert torch.equal(_make(repo, _Ordinary(scale, replace(_PROGRAM, inputs=(0,))))(X), X * 5)


def test_the_first_process_calls_the_compiled_callable_again(repo: Repository) -> None:
    ordinary = _Ordinary(_Triple())
    call = _make(repo, ordinary)
    with torch.no_grad():
        call(X)
        call(X)

    assert (ordinary.recorded, ordinary.calls) == (1, 1)
    assert (call.statistics.saved, call.statistics.hit) == (1, 0)


@pytest.mark.parametrize("change", ["note", "factor", "training", "shape", "grad"])
def test_a_change_after_a_start_from_the_store_is_compiled_as_usual(repo: Repository, change: str) -> None:
    with torch.no_grad():
        _make(repo, _Ordinary(_Triple()))(X)
        ordinary = _Ordinary(_Triple())
        call = _make(repo, ordinary)
        call(X)
        match change:
            case "note":
                ordinary.module.note = "y"
            case "factor":
                ordinary.module.register_buffer("factor", torch.zeros(2))
            case "training":
                ordinary.module.eval()
        call(X[:1] if change == "shape" else X)
    if change == "grad":
        call(X)

    assert ordinary.recorded == 1


def test_the_reason_why_nothing_was_stored_is_counted(repo: Repository) -> None:
    call = _make(repo, _Ordinary(_Triple(), None, "dynamo made 2 graphs"))
    with torch.no_grad():
        assert torch.equal(call(X), X * 3)

    assert call.statistics.not_saved == {"as a whole: dynamo made 2 graphs": 1}
    assert list(iter_artifacts(repo.store)) == []


def test_a_call_that_cannot_be_described_is_compiled_as_usual(repo: Repository) -> None:
    ordinary = _Ordinary(_Triple())
    ordinary.module.register_forward_hook(lambda *args: None)
    call = _make(repo, ordinary)

    assert torch.equal(call(X), X * 3)
    assert ordinary.calls == 1
    assert next(iter(call.statistics.not_saved)).startswith("as a whole: the callable has a module with hooks")


def test_if_strict_a_call_that_cannot_be_described_or_stored_is_an_error(repo: Repository) -> None:
    hooked = _Ordinary(_Triple())
    hooked.module.register_forward_hook(lambda *args: None)
    with pytest.raises(CompileCacheError, match=r"strict: the callable cannot be stored as a whole: .*with hooks"):
        _make(repo, hooked, strict=True)(X)
    assert hooked.calls == 0

    broken = _make(repo, _Ordinary(_Triple(), None, "dynamo made 2 graphs"), strict=True)
    with torch.no_grad(), pytest.raises(CompileCacheError, match="dynamo made 2 graphs"):
        broken(X)


def test_a_strict_hit_is_an_error_if_it_is_missing(repo: Repository) -> None:
    ordinary = _Ordinary(_Triple())
    with torch.no_grad(), pytest.raises(CompileCacheError, match=r"strict='hit': memory:.* does not have the callable"):
        _make(repo, ordinary, strict="hit")(X)
    assert ordinary.calls == 0

    with torch.no_grad():
        _make(repo, ordinary)(X)
        assert torch.equal(_make(repo, _Ordinary(_Triple()), strict="hit")(X), X * 3)


def test_a_program_that_cannot_be_loaded_is_compiled_as_usual(repo: Repository, hook: Hook) -> None:
    with torch.no_grad():
        _make(repo, _Ordinary(_Triple()))(X)
        hook(resolve_name("holdfast.compile_cache.whole.start"), "LoadedProgram", _raise)
        ordinary = _Ordinary(_Triple())
        call = _make(repo, ordinary)

        assert torch.equal(call(X), X * 3)

    assert (ordinary.recorded, call.statistics.corrupt) == (1, 1)


def _raise(*args: Any) -> None:
    raise OSError("no such library")


def test_a_callable_with_ever_new_arguments_is_compiled_as_usual_for_good(repo: Repository) -> None:
    ordinary = _Ordinary(_Triple(), None, "no")
    call = _make(repo, ordinary)
    with torch.no_grad():
        for size in range(20):
            call(torch.ones(size))

    assert (ordinary.recorded, ordinary.calls) == (16, 4)


def test_a_compiled_module_has_the_attributes_of_the_original(repo: Repository) -> None:
    ordinary = _Ordinary(_Triple())
    module = WholeModule(ordinary.module, _make(repo, ordinary))

    assert module.note == "x"
    assert list(module.state_dict()) == ["_orig_mod.factor"]
    assert not module.eval()._orig_mod.training
    with torch.no_grad():
        assert torch.equal(module(X), X * 3)
    assert module.compile_cache.statistics.saved == 1
