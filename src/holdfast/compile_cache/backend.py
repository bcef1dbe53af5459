"""The `torch.compile` backend: loads each graph that dynamo traces from the store, or compiles and saves it."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from holdfast.compile_cache import inductor
from holdfast.compile_cache.artifacts.prefetch import Prefetch
from holdfast.compile_cache.artifacts.trust import Trust, read_secret
from holdfast.compile_cache.artifacts.why import Explanation
from holdfast.compile_cache.cache import CompileCache, CompiledCall
from holdfast.compile_cache.choices import CompilerOptions, Strict
from holdfast.compile_cache.counters import CacheStatistics
from holdfast.compile_cache.key.inputs import may_share
from holdfast.compile_cache.key_parts import GraphKey, Uncacheable, UnknownCode
from holdfast.compile_cache.single_flight import WaitOptions
from holdfast.errors import CompileCacheError, StoreError
from holdfast.repo.handle.repository import Repository

_log = logging.getLogger(__name__)

_STRICT_BYPASS: Final = "strict: a graph cannot be cached"


def make_compiler(repo: Repository, options: CompilerOptions | None = None) -> Compiler:
    """Make a backend for `torch.compile` that stores compiled graphs in a repository."""
    options = options or CompilerOptions()
    # Here and not when dynamo calls: a torch that is not known may wrap errors of backends.
    if options.strict and (unsupported := inductor.find_unsupported()):
        raise CompileCacheError(f"{_STRICT_BYPASS}: {unsupported}")
    trust = Trust(secret=read_secret(options.key_file), everything=options.trust)
    cache = CompileCache(repo, trust=trust, waiting=WaitOptions(wait_s=options.wait_s))
    chosen = inductor.read_options(options.mode, options.options)
    compiler = Compiler(cache, options=chosen, strict=options.strict, versions=options.versions)
    if options.import_in_background:
        threading.Thread(target=inductor.find_obstacle, name="holdfast-import", daemon=True).start()
    return compiler


class Compiler:
    """A backend for `torch.compile`. If the cache fails, graphs are compiled as usual, unless `strict` is set."""

    __name__ = "holdfast"

    def __init__(
        self,
        cache: CompileCache,
        *,
        options: Mapping[str, Any] | None = None,
        strict: Strict = False,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Load graphs from `cache`; compile missing ones with `options`. See `make_compiler` for the rest."""
        self.cache = cache
        self._options = dict(options or {})
        self._strict = strict
        self._versions = dict(versions or {})

    def __repr__(self) -> str:
        """Show the store of the cache."""
        return f"<Compiler with the cache in {self.cache.repo.store.url}>"

    @property
    def statistics(self) -> CacheStatistics:
        """Counts and times of everything done so far."""
        return self.cache.statistics

    def explain(self) -> tuple[Explanation, ...]:
        """Return, for each recent miss, how its key differs from the nearest stored one."""
        return self.cache.explain()

    def prefetch(self, keys: Iterable[str] = ()) -> Prefetch:
        """Read artifacts in the background: those of `keys`, whole or prefixes (see `cache.used`), or all if empty."""
        return self.cache.prefetch(keys)

    def make_key(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> GraphKey:
        """Return the key of a graph. Raises Uncacheable."""
        return inductor.make_key(graph, inputs, options=self._options, versions=self._versions)

    def __eq__(self, other: object) -> bool:
        """Return whether graphs compiled by either can be used by both. Dynamo then does not compile again."""
        return isinstance(other, Compiler) and self._identify() == other._identify()

    def __hash__(self) -> int:
        """Return equal hashes for compilers that are equal."""
        return hash((id(self.cache.repo), self._strict))

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiler:
        """Return the same object: its cache has one lock and one set of counters. Lightning copies what it compiles."""
        return self

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
        """Return the compiled graph. Dynamo calls this."""
        settings = {**self._options, **inductor.read_options(mode, options)}
        obstacle = inductor.find_obstacle()
        if obstacle:
            _warn_once(obstacle)
            return self._bypass(obstacle, graph, inputs, settings)
        try:
            with self.cache.counters.timed("key"):
                lifted = inductor.lift_tensors(graph)
                asked, given = (graph, inputs) if lifted is None else (lifted.graph, [*lifted.tensors, *inputs])
                key = inductor.make_key(asked, given, options=settings, versions=self._versions)
        except UnknownCode as error:
            return self._bypass(error.reason, graph, inputs, settings, use_caches=False)
        except Uncacheable as error:
            return self._bypass(error.reason, graph, inputs, settings)
        except Exception as error:  # noqa: BLE001 - a graph of an unforeseen kind is compiled as usual
            _log.warning("cannot make a cache key for a graph, so it is compiled without the cache: %r", error)
            return self._bypass(f"its key could not be made ({type(error).__name__})", graph, inputs, settings)
        run = _Request(self.cache, asked, given, settings, key, self._strict).answer()
        return run if lifted is None else lifted.bind(run)

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
            raise inductor.make_strict_error(f"{_STRICT_BYPASS}: {reason}")
        _log.info("compiling a graph without the cache: %s", reason)
        with self.cache.counters.timed("compile"):
            # Torch's caches ignore whether inputs share memory and whether user code was edited, so they could return
            # a wrong graph in both cases.
            may_use = use_caches and not may_share(inputs)
            return inductor.compile_plainly(graph, inputs, options, use_caches=may_use)


@functools.cache
def _warn_once(obstacle: str) -> None:
    """Log, once in a process, why no graph can be cached."""
    _log.warning("%s", obstacle)


class _Request:
    """One graph that dynamo requests, and its key."""

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
        """Load the graph, or wait for the process that is compiling it, or compile and save it."""
        try:
            run = self._find()
        except StoreError as error:
            return self._compile_without_store(error)
        if run is not None:
            return run
        if self._strict == "hit":
            self._cache.remember_miss(self._key, self._guards)
            self._counters.count("miss")
            raise inductor.make_strict_error(f"strict='hit': {self._describe_miss()}")
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
            raise inductor.make_strict_error(
                "strict: an entry of the compile cache cannot be used; the warning logged before this gives the reason"
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
                self._counters.count_restart(f"torch's compiler raised {inductor.describe_error(error)}")
            raise
        self._cache.remember_miss(self._key, self._guards)
        self._counters.count("miss")
        if self._guards:
            self._counters.count("guard_miss")
        why_not_saved = self._cache.save(self._key, made)
        if not why_not_saved:
            self._counters.count("saved")
        else:
            self._counters.count_not_saved(why_not_saved)
            if self._strict:
                raise inductor.make_strict_error(
                    f"strict: a graph was compiled but could not be saved: {why_not_saved}"
                )
        return made.run

    def _compile_without_store(self, error: StoreError) -> CompiledCall:
        self._counters.count_bypass(f"the store cannot be read ({type(error).__name__})")
        if self._strict:
            raise inductor.make_strict_error(f"strict: the compile cache cannot be read: {error}") from error
        _log.warning("the compile cache cannot be read, so the graph is compiled: %s", error)
        with self._counters.timed("compile"):
            return inductor.compile_plainly(self._graph, self._inputs, self._options)

    def _describe_miss(self) -> str:
        url, name = self._cache.repo.store.url, self._key.digest[:12]
        if self._guards:
            return f"{url} has graph {name} only for other sizes; their guards: {' | '.join(self._guards)[:500]}"
        return (
            f"{url} does not have graph {name}; compiler.explain() shows how it differs from the nearest stored graph"
        )
