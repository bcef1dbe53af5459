"""What the backend returns to dynamo, with a fake compiler."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from holdfast.compile_cache import cache, inductor
from holdfast.compile_cache.artifacts import storing, trust
from holdfast.compile_cache.backend import Compiler, make_compiler
from holdfast.compile_cache.choices import CompilerOptions
from holdfast.compile_cache.inductor import CompiledGraph
from holdfast.compile_cache.key_parts import GraphKey, Uncacheable, UnknownCode
from holdfast.errors import CompileCacheError, StoreError, StoreFull
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository, open_repository
from tests.kit.compile_artifacts import make_artifact, make_key, store_artifact
from tests.kit.hooking import Hook, hooked
from tests.kit.patience import PATIENCE_S

GRAPH = torch.fx.GraphModule({}, torch.fx.Graph())


class Again(Exception):
    """The error with which the fake compiler makes dynamo trace again."""


@dataclass
class FakeTorch:
    """Replaces the compiler of torch 2.13. Guards are the text of the only size that they are valid for."""

    obstacle: str = ""
    compiled: list[str] = field(default_factory=list)
    loaded: list[bytes] = field(default_factory=list)
    guards: str = ""
    why_not_saved: str = ""
    error: Exception | None = None

    def find_obstacle(self) -> str:
        return self.obstacle

    def lift_tensors(self, graph: object) -> None:
        return None

    def compile_graph(self, graph: object, inputs: object, *, options: object, tag: str, system: str) -> CompiledGraph:
        if self.error:
            raise self.error
        self.compiled.append(tag)
        if self.why_not_saved:
            return CompiledGraph(_return("compiled"), None, why_not_saved=self.why_not_saved)
        return CompiledGraph(_return("compiled"), b"graph", self.guards, {"k": b"library"}, 3.0)

    def load_graph(self, graph: bytes, kernels: object, options: object) -> Callable[..., Any]:
        self.loaded.append(graph)
        if graph != b"graph":
            raise ValueError("not a graph\nof mine")
        return _return("loaded")

    def evaluate_guards(self, guards: str, inputs: Sequence[object], *, install: bool) -> bool:
        return not guards or guards == str(inputs[0])

    def is_for_dynamo(self, error: Exception) -> bool:
        return isinstance(error, Again)


def _return(what: str) -> Callable[[], str]:
    return lambda: what


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(inductor, "load_torch", lambda: fake)
    monkeypatch.setattr(inductor, "compile_plainly", lambda graph, inputs, options, **_: _return("plain"))
    monkeypatch.setattr(inductor, "make_key", lambda graph, inputs, options, versions: make_key())
    return fake


@pytest.fixture
def repo() -> Repository:
    return open_repository(MemoryStore(), create=True)


def _compile(compiler: Compiler, *inputs: object, **options: Any) -> str:
    said: str = compiler(GRAPH, list(inputs), **options)()
    return said


def test_a_missing_graph_is_compiled_and_saved_and_then_loaded(fake: FakeTorch, repo: Repository) -> None:
    first, second = make_compiler(repo), make_compiler(repo)

    said = _compile(first), _compile(second)

    assert said == ("compiled", "loaded")
    assert (first.statistics.miss, first.statistics.saved) == (1, 1)
    assert (second.statistics.hit, second.statistics.seconds_saved) == (1, 3.0)
    assert first.cache.used == second.cache.used == (make_key().digest,)


@pytest.mark.parametrize(("error", "uses_caches"), [(Uncacheable("odd"), True), (UnknownCode("odd"), False)])
@pytest.mark.usefixtures("fake")
def test_torchs_caches_are_not_used_if_code_has_no_digest(
    monkeypatch: pytest.MonkeyPatch, hook: Hook, repo: Repository, error: Uncacheable, *, uses_caches: bool
) -> None:
    seen: list[bool] = []

    def refuse(*_: object, **__: object) -> GraphKey:
        raise error

    def compile_plainly(*_: object, use_caches: bool) -> Callable[[], str]:
        seen.append(use_caches)
        return _return("plain")

    hook(inductor, "make_key", refuse)
    monkeypatch.setattr(inductor, "compile_plainly", compile_plainly)

    assert _compile(make_compiler(repo)) == "plain"
    assert seen == [uses_caches]


def test_entries_for_other_sizes_are_a_guard_miss(fake: FakeTorch, repo: Repository) -> None:
    compiler = make_compiler(repo)

    said = []
    for size in (8, 9, 8, 9):
        fake.guards = str(size)
        said.append(_compile(compiler, size))

    assert said == ["compiled", "compiled", "loaded", "loaded"]
    assert (compiler.statistics.miss, compiler.statistics.guard_miss) == (2, 1)
    assert "8" in compiler.explain()[1].headline


def test_an_obstacle_or_a_graph_without_a_key_is_compiled_as_usual(fake: FakeTorch, repo: Repository) -> None:
    compiler = make_compiler(repo)

    fake.obstacle = "torch is too new"
    said = [_compile(compiler)]
    fake.obstacle = ""
    with hooked(inductor, "make_key", _raise(Uncacheable("it holds a hook"))):
        said.append(_compile(compiler))
    with hooked(inductor, "make_key", _raise(ZeroDivisionError())):
        said.append(_compile(compiler))

    assert said == ["plain"] * 3
    assert compiler.statistics.bypass == {
        "torch is too new": 1,
        "it holds a hook": 1,
        "its key could not be made (ZeroDivisionError)": 1,
    }


def test_a_torch_that_the_cache_does_not_support_is_reported_once(
    fake: FakeTorch, repo: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.98.0")
    compilers = [make_compiler(repo), make_compiler(repo)]

    said = [_compile(compiler) for compiler in compilers for _ in range(2)]

    sentence = "the compile cache does not support torch 2.98, only 2.13 and 2.15; graphs are compiled but not saved"
    assert said == ["plain"] * 4
    assert [compiler.statistics.bypass for compiler in compilers] == [{sentence: 2}] * 2
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [sentence]


def _raise(error: Exception) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> Any:
        raise error

    return fail


def test_an_entry_that_cannot_be_loaded_is_counted_and_warned_of_once(
    fake: FakeTorch, repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    store_artifact(repo, make_artifact(graph=b"bad"))
    compiler = make_compiler(repo)
    fake.guards = "8"

    said = _compile(compiler, 8), _compile(compiler, 8)

    assert said == ("compiled", "loaded")
    assert (compiler.statistics.corrupt, compiler.statistics.miss, compiler.statistics.hit) == (1, 1, 1)
    assert fake.loaded == [b"bad", b"graph"]
    assert caplog.text.count("cannot be used, so the graph is compiled: not a graph") == 1


def test_an_untrusted_entry_is_refused_and_never_loaded(
    fake: FakeTorch, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_artifact(repo)
    monkeypatch.setattr(trust, "check_store_trust", lambda store, found: "the store is somebody's")

    refusing, trusting = make_compiler(repo), make_compiler(repo, options=CompilerOptions(trust=True))

    assert (_compile(refusing), fake.loaded) == ("compiled", [])
    assert refusing.statistics.refused == 1
    assert _compile(trusting) == "loaded"


def test_a_graph_is_compiled_if_the_store_cannot_be_read(fake: FakeTorch, repo: Repository, hook: Hook) -> None:
    hook(cache, "iter_variants", _raise(StoreError("the line is cut")))
    compiler, strict = make_compiler(repo), make_compiler(repo, options=CompilerOptions(strict=True))

    assert _compile(compiler) == "plain"
    assert compiler.statistics.bypass == {"the store cannot be read (StoreError)": 1}
    with pytest.raises(CompileCacheError, match="cannot be read: the line is cut"):
        _compile(strict)


def test_graphs_that_cannot_be_saved_are_counted_by_reason(fake: FakeTorch, repo: Repository) -> None:
    compiler, strict = make_compiler(repo), make_compiler(repo, options=CompilerOptions(strict=True))
    fake.why_not_saved = "it has a socket"

    assert _compile(compiler) == "compiled"
    assert compiler.statistics.not_saved == {"it has a socket": 1}
    with pytest.raises(CompileCacheError, match="compiled but could not be saved: it has a socket"):
        _compile(strict)


def test_a_full_store_saves_nothing_and_raises_nothing(fake: FakeTorch, repo: Repository, hook: Hook) -> None:
    hook(storing, "write_artifact", _raise(StoreFull("no room")))
    compiler = make_compiler(repo)

    assert _compile(compiler) == "compiled"
    assert compiler.statistics.not_saved == {"it could not be saved (StoreFull)": 1}


def test_a_restart_is_raised_and_no_process_waits_for_it(fake: FakeTorch, repo: Repository) -> None:
    compiler = make_compiler(repo)
    fake.error = Again()

    with pytest.raises(Again):
        _compile(compiler)
    fake.error = None

    assert _compile(compiler) == "compiled"
    assert (compiler.statistics.restart, compiler.statistics.miss) == ({"torch's compiler raised Again": 1}, 1)


def test_an_error_of_the_compiler_is_raised_and_not_counted(fake: FakeTorch, repo: Repository) -> None:
    compiler = make_compiler(repo)
    fake.error = ZeroDivisionError()

    with pytest.raises(ZeroDivisionError):
        _compile(compiler)

    assert (compiler.statistics.restart, compiler.statistics.miss) == ({}, 0)


def test_strict_refuses_a_bypass_and_a_bad_entry(fake: FakeTorch, repo: Repository) -> None:
    strict = make_compiler(repo, options=CompilerOptions(strict=True))

    fake.obstacle = "torch is too new"
    with pytest.raises(CompileCacheError, match="strict: a graph cannot be cached: torch is too new"):
        _compile(strict)
    fake.obstacle = ""
    store_artifact(repo, make_artifact(graph=b"bad"))
    with pytest.raises(CompileCacheError, match="an entry of the compile cache cannot be used"):
        _compile(strict)

    assert fake.compiled == []


def test_strict_hit_names_the_missing_graph_or_the_sizes_that_are_stored(fake: FakeTorch, repo: Repository) -> None:
    serving = make_compiler(repo, options=CompilerOptions(strict="hit"))

    with pytest.raises(CompileCacheError, match=f"does not have graph {make_key().digest[:12]}"):
        _compile(serving, 8)
    store_artifact(repo, make_artifact(guards="9"))
    with pytest.raises(CompileCacheError, match="only for other sizes; their guards: 9"):
        _compile(serving, 8)

    assert _compile(serving, 9) == "loaded"
    assert fake.compiled == []


def test_prefetched_artifacts_are_loaded_without_the_store(fake: FakeTorch, repo: Repository, hook: Hook) -> None:
    store_artifact(repo, replace(make_artifact(), graph=b"graph"))
    compiler = make_compiler(repo)
    fetched = compiler.prefetch([make_key().digest[:8]])

    assert fetched.wait(60)
    assert fetched.num_artifacts == 1
    hook.forbid(cache, "iter_variants")
    assert _compile(compiler) == "loaded"


def test_a_prefetch_of_nothing_ends(fake: FakeTorch, repo: Repository) -> None:
    fetched = make_compiler(repo).prefetch(["f" * 64])

    assert fetched.wait(60)
    assert fetched.num_artifacts == 0


def test_unknown_options_are_refused_by_name(repo: Repository) -> None:
    with pytest.raises(RuntimeError, match="unknown compiler options: no_such_thing"):
        make_compiler(repo, options=CompilerOptions(options={"no-such-thing": 1}))


def test_the_options_of_a_call_override_those_of_the_compiler(
    fake: FakeTorch, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def see(graph: object, inputs: object, *, options: object, versions: object) -> GraphKey:
        seen.append((options, versions))
        return make_key()

    monkeypatch.setattr(inductor, "make_key", see)
    compiler = make_compiler(
        repo, options=CompilerOptions(options={"max_autotune": False, "debug": True}, versions={"a::b": "1"})
    )

    _compile(compiler, mode="max-autotune-no-cudagraphs")

    assert seen == [({"max_autotune": True, "debug": True, "coordinate_descent_tuning": True}, {"a::b": "1"})]


def test_compilers_with_the_same_settings_are_equal_so_that_dynamo_does_not_compile_again(repo: Repository) -> None:
    one, same = make_compiler(repo), make_compiler(repo)
    others = [
        make_compiler(repo, options=CompilerOptions(strict=True)),
        make_compiler(open_repository(MemoryStore(), create=True)),
    ]

    assert one == same
    assert hash(one) == hash(same)
    assert all(one != other for other in others)


def test_the_compiler_of_torch_is_imported_in_the_background(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = threading.Event()
    monkeypatch.setattr(inductor, "find_obstacle", imported.set)

    make_compiler(repo, options=CompilerOptions(import_in_background=True))

    assert imported.wait(PATIENCE_S)


def test_a_deep_copy_of_a_compiler_is_the_compiler_itself(repo: Repository) -> None:
    compiler = make_compiler(repo)

    assert copy.deepcopy({"backend": compiler})["backend"] is compiler
