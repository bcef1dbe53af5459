"""The backend for torch.compile: each graph that dynamo traces comes from the store, or is compiled and goes there."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch

from holdfast.compile_cache import inductor
from holdfast.compile_cache.artifacts.prefetch import Prefetch
from holdfast.compile_cache.artifacts.trust import Trust, read_secret
from holdfast.compile_cache.artifacts.why import Explanation
from holdfast.compile_cache.cache import CompileCache, CompiledCall
from holdfast.compile_cache.counters import CacheStatistics
from holdfast.compile_cache.key.inputs import may_share
from holdfast.compile_cache.key.key import GraphKey, Uncacheable, UnknownCode, make_key
from holdfast.compile_cache.single_flight import WAIT_S, Waiting
from holdfast.errors import StoreError
from holdfast.repo.handle.repository import Repository

_log = logging.getLogger(__name__)

Strict = bool | Literal["hit"]


class CompilerOptions(TypedDict, total=False):
    """What may be asked of a compiler; see `make_compiler`."""

    mode: str | None
    options: Mapping[str, Any] | None
    strict: Strict
    trust: bool
    key_file: str | os.PathLike[str] | None
    versions: Mapping[str, str] | None
    wait_s: float
    import_behind: bool


def make_compiler(
    repo: Repository,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    strict: Strict = False,
    trust: bool = False,
    key_file: str | os.PathLike[str] | None = None,
    versions: Mapping[str, str] | None = None,
    wait_s: float = WAIT_S,
    import_behind: bool = False,
) -> Compiler:
    """Make a backend for `torch.compile` that keeps compiled graphs in a repository.

    Args:
        repo: where they are kept.
        mode: as of `torch.compile`, such as "max-autotune".
        options: settings of the compiler, as of `torch.compile`.
        strict: raise CompileCacheError for graphs that cannot be kept and entries that cannot be used, instead of
            compiling; "hit" also for graphs that are not there.
        trust: load whatever the store holds. Without, entries must be signed, or the store must be this user's alone.
        key_file: holds the secret that entries are signed with.
        versions: a version for each custom operator (`"ns::op"`) whose code the cache cannot see.
        wait_s: how long to wait for another process that compiles the same graph.
        import_behind: import torch's compiler by a thread. It saves a second if the model takes that long to load;
            but Python imports that meet in two threads can fail, so nothing else may import parts of torch meanwhile.
    """
    cache = CompileCache(
        repo, trust=Trust(secret=read_secret(key_file), everything=trust), waiting=Waiting(wait_s=wait_s)
    )
    compiler = Compiler(cache, options=inductor.read_options(mode, options), strict=strict, versions=versions)
    if import_behind:
        threading.Thread(target=inductor.find_obstacle, name="holdfast-import", daemon=True).start()
    return compiler


class Compiler:
    """A backend for `torch.compile`. Cache trouble never fails the program that uses it, unless it is strict."""

    __name__ = "holdfast"

    def __init__(
        self,
        cache: CompileCache,
        *,
        options: Mapping[str, Any] | None = None,
        strict: Strict = False,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Take graphs from `cache`, and compile others with these settings."""
        self.cache = cache
        self._options = dict(options or {})
        self._strict = strict
        self._versions = dict(versions or {})

    @property
    def statistics(self) -> CacheStatistics:
        """What it has done so far."""
        return self.cache.statistics

    def explain(self) -> tuple[Explanation, ...]:
        """Say of each graph that was lately missed why: how it differs from the nearest that is stored."""
        return self.cache.explain()

    def prefetch(self, keys: Iterable[str] = ()) -> Prefetch:
        """Read artifacts in the background: of these keys (see `cache.used`), or of beginnings of keys, or all."""
        return self.cache.prefetch(keys)

    def __eq__(self, other: object) -> bool:
        """Tell whether what the one has compiled can serve for the other: then dynamo does not compile again."""
        return isinstance(other, Compiler) and self._identify() == other._identify()

    def __hash__(self) -> int:
        """Agree with `==`."""
        return hash((id(self.cache.repo), self._strict))

    def _identify(self) -> tuple[object, ...]:
        return id(self.cache.repo), self._options, self._strict, self._versions

    def __call__(
        self,
        graph: torch.fx.GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> CompiledCall:
        """Return the compiled graph; called by dynamo."""
        settings = {**self._options, **inductor.read_options(mode, options)}
        obstacle = inductor.find_obstacle()
        if obstacle:
            return self._bypass(obstacle, graph, inputs, settings)
        try:
            with self.cache.counters.timed("key"):
                key = make_key(graph, inputs, options=settings, versions=self._versions)
        except UnknownCode as error:
            return self._bypass(error.reason, graph, inputs, settings, use_caches=False)
        except Uncacheable as error:
            return self._bypass(error.reason, graph, inputs, settings)
        except Exception as error:  # noqa: BLE001 - a graph of a kind that nobody thought of is compiled as usual
            _log.warning("no key could be made for a graph: %r", error)
            return self._bypass(f"its key could not be made ({type(error).__name__})", graph, inputs, settings)
        return _Asked(self.cache, graph, inputs, settings, key, self._strict).answer()

    def _bypass(
        self,
        reason: str,
        graph: torch.fx.GraphModule,
        inputs: Sequence[Any],
        options: dict[str, Any],
        *,
        use_caches: bool = True,
    ) -> CompiledCall:
        self.cache.counters.count_bypass(reason)
        if self._strict:
            raise inductor.make_error(f"strict: a graph cannot be kept in the compile cache: {reason}")
        _log.info("a graph is compiled without the cache: %s", reason)
        with self.cache.counters.timed("compile"):
            # Torch's caches tell neither inputs that share memory from others, nor code that was edited from what it
            # was before: they would serve what is wrong.
            may_use = use_caches and not may_share(inputs)
            return inductor.compile_plainly(graph, inputs, options, use_caches=may_use)


class _Asked:
    """One graph that dynamo asks for, under a key."""

    def __init__(
        self,
        cache: CompileCache,
        graph: torch.fx.GraphModule,
        inputs: Sequence[Any],
        options: dict[str, Any],
        key: GraphKey,
        strict: Strict,
    ) -> None:
        self._cache = cache
        self._counters = cache.counters
        self._graph = graph
        self._inputs = inputs
        self._options = options
        self._key = key
        self._strict = strict
        self._guards: tuple[str, ...] = ()

    def answer(self) -> CompiledCall:
        """Load the graph, or wait for who compiles it, or compile and save it."""
        try:
            run = self._find()
        except StoreError as error:
            return self._compile_alone(error)
        if run is not None:
            return run
        if self._strict == "hit":
            self._cache.remember_miss(self._key, self._guards)
            self._counters.count("miss")
            raise inductor.make_error(f"strict='hit': {self._describe_miss()}")
        with self._cache.compile_once(self._key, self._find) as turn:
            self._counters.add_seconds("wait", turn.waited_s)
            if turn.found is not None:
                self._counters.count("waited")
                return turn.found
            return self._compile()

    def _find(self) -> CompiledCall | None:
        before = self._counters.read()
        sought = self._cache.find(self._key, self._inputs, self._options)
        self._guards = sought.guards
        after = self._counters.read()
        if self._strict and (after.corrupt, after.refused) != (before.corrupt, before.refused):
            raise inductor.make_error(
                "strict: an entry of the compile cache cannot be used; the warning before says why"
            )
        return sought.run

    def _compile(self) -> CompiledCall:
        try:
            with self._counters.timed("compile"):
                made = inductor.compile_graph(
                    self._graph,
                    self._inputs,
                    options=self._options,
                    tag=self._key.digest,
                    system=self._key.digests["system"],
                )
        except Exception as error:
            if inductor.is_for_dynamo(error):
                self._counters.count("restart")
            raise
        self._cache.remember_miss(self._key, self._guards)
        self._counters.count("miss")
        if self._guards:
            self._counters.count("guard_miss")
        why_not = self._cache.keep(self._key, made)
        if not why_not:
            self._counters.count("saved")
        else:
            self._counters.count_not_saved(why_not)
            if self._strict:
                raise inductor.make_error(f"strict: a graph was compiled and not saved: {why_not}")
        return made.run

    def _compile_alone(self, error: StoreError) -> CompiledCall:
        self._counters.count_bypass(f"the store cannot be read ({type(error).__name__})")
        if self._strict:
            raise inductor.make_error(f"strict: the compile cache cannot be read: {error}") from error
        _log.warning("the compile cache cannot be read, graphs are compiled: %s", error)
        with self._counters.timed("compile"):
            return inductor.compile_plainly(self._graph, self._inputs, self._options)

    def _describe_miss(self) -> str:
        url, name = self._cache.repo.store.url, self._key.digest[:12]
        if self._guards:
            return f"{url} has the graph {name} for other sizes only: {' | '.join(self._guards)[:500]}"
        return f"{url} does not have the graph {name}; `explain()` of the compiler tells what differs from the nearest"
