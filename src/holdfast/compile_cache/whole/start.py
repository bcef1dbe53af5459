"""A compiled callable that later processes start without dynamo; everything else is compiled as usual."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from holdfast.compile_cache.artifacts.artifact import Artifact, read_artifact
from holdfast.compile_cache.artifacts.catalog import DAY_S, StoredVariant, iter_variants
from holdfast.compile_cache.artifacts.trust import Trust, read_secret
from holdfast.compile_cache.counters import CacheCounters, CacheStatistics
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.compile_cache.whole.known_calls import CallDescription, KnownCall
from holdfast.compile_cache.whole.program import Program, decode_program, encode_program
from holdfast.compile_cache.whole.running import LoadedProgram
from holdfast.compile_cache.whole.state import find_obstacle
from holdfast.errors import CompileCacheError, Corrupt, HoldfastError, NewerFormat, NotFound, Untrusted
from holdfast.json_text import Json
from holdfast.repo.handle.repository import Repository
from holdfast.snapshot.gc_pause import pause_gc

if TYPE_CHECKING:
    from holdfast.compile_cache.choices import CompilerOptions, Strict

_log = logging.getLogger(__name__)

_MAX_ENTRIES: Final = 8
"""How many ways to call are remembered, such as training and evaluation."""
_MAX_ATTEMPTS: Final = 16
"""After this many calls that were not found in the store, other new calls are compiled as usual without a look-up."""
REASON: Final = "as a whole: "
"""Starts the reasons in `statistics.not_saved` why a callable was not stored."""


class OrdinaryCall(Protocol):
    """The callable, compiled as usual."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""

    def record(self, call: CallDescription, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordedCall:
        """Call it, and record how another process can do the same without dynamo."""


class RecordedCall(Protocol):
    """A call that was recorded."""

    result: Any
    reason: str
    """Why it cannot be stored; empty if it can."""
    program: Program | None
    kernels: Mapping[str, bytes]
    seconds: float


class WholeCall:
    """Calls a compiled callable: from the store if it is there, and otherwise as usual, which also stores it."""

    def __init__(
        self,
        callable_: Any,
        repo: Repository,
        *,
        trust: Trust,
        options: Mapping[str, Json],
        make_ordinary: Callable[[CacheCounters], OrdinaryCall],
        strict: Strict = False,
    ) -> None:
        """Make a compiled callable.

        Args:
            callable_: a module or a function.
            repo: stores programs.
            trust: which programs are loaded; new ones are signed with its secret.
            options: what the callable is compiled with, for the key.
            make_ordinary: compiles the callable as usual, and counts in the given counters.
            strict: True raises CompileCacheError for calls that cannot be stored, instead of compiling them as usual.
                "hit" also raises for calls that are not stored.
        """
        self._callable = callable_
        self._repo = repo
        self._trust = trust
        self._options = options
        self._counters = CacheCounters()
        self._ordinary = functools.cache(functools.partial(make_ordinary, self._counters))
        self._lock = threading.RLock()
        self._entries: tuple[KnownCall, ...] = ()
        self._programs: dict[str, tuple[LoadedProgram, Program]] = {}
        self._compiled: set[str] = set()
        self._attempts_left = _MAX_ATTEMPTS
        self._strict = strict
        obstacle = find_obstacle()
        if obstacle:
            self._give_up(obstacle)

    @property
    def compile_cache(self) -> WholeCall:
        """This object, which has the statistics; a compiled module has an attribute of the same name."""
        return self

    @property
    def statistics(self) -> CacheStatistics:
        """Counts and times of everything done so far; reasons why nothing was stored are in `not_saved`."""
        return self._counters.read()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled callable."""
        if torch.compiler.is_compiling():
            return self._callable(*args, **kwargs)
        for entry in self._entries:
            if entry.call.is_stale():
                self._remove(entry)
                continue
            tensors = entry.call.match(args, kwargs)
            if tensors is not None and entry.may_run(tensors):
                return self._ordinary()(*args, **kwargs) if entry.is_ordinary else entry.run(tensors)
        if self._attempts_left <= 0:
            return self._ordinary()(*args, **kwargs)
        return self._start(args, kwargs)

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call that is not like an earlier one."""
        with self._lock:
            try:
                with pause_gc():
                    with self._counters.timed("key"):
                        call = CallDescription(self._callable, args, kwargs, self._options)
                    found = None if call.key.digest in self._compiled else self._find(call)
            except Uncacheable as error:
                self._refuse(error.reason)
                return self._ordinary()(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the call must not fail because it cannot be described
                _log.warning("cannot start a callable as a whole, so it is compiled as usual: %r", error)
                self._refuse(f"it could not be described or loaded ({type(error).__name__})")
                return self._ordinary()(*args, **kwargs)
            if call.key.digest in self._compiled:
                self._add_ordinary(call)
                return self._ordinary()(*args, **kwargs)
            if found is None:
                self._attempts_left -= 1
                if self._strict == "hit":
                    url, name = self._repo.store.url, call.key.digest[:12]
                    raise CompileCacheError(f"strict='hit': {url} does not have the callable {name} as a whole")
                return self._compile(call, args, kwargs)
            loaded, program = found
            entry = KnownCall(call, loaded, program)
            self._add(entry)
            tensors = list(call.found.walk.tensors)
            call.found.forget_arguments()
        return entry.run(tensors)

    def _compile(self, call: CallDescription, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile the callable as usual, and store it."""
        recorded = self._ordinary().record(call, args, kwargs)
        self._compiled.add(call.key.digest)
        self._add_ordinary(call)
        reason = recorded.reason
        if not reason:
            try:
                reason = self._save(call, recorded, args, kwargs)
            except Uncacheable as error:
                reason = error.reason
            except Exception as error:  # noqa: BLE001 - the call was successful, and must not fail now
                _log.warning("cannot store a callable as a whole: %r", error)
                reason = f"it could not be saved ({type(error).__name__})"
        if reason:
            self._count_reason(reason)
            _log.info("a callable was not stored as a whole: %s", reason)
        return recorded.result

    def _save(
        self, call: CallDescription, recorded: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """Prove that a program can be loaded and recognises its call, then store it. Return why not, or ""."""
        from holdfast.compile_cache.artifacts.storing import write_artifact

        assert recorded.program is not None, "a call without a reason has a program"
        data = encode_program(recorded.program)
        program = decode_program(data, "a new program")
        used = {digest for code in (program.forward, program.backward) if code for digest in code.kernels.values()}
        kernels = {name: recorded.kernels[name] for name in used}
        loaded = LoadedProgram(program, kernels)
        again = CallDescription(self._callable, args, kwargs, self._options)
        if again.key.digest != call.key.digest:
            changed = [part for part, digest in call.key.digests.items() if again.key.digests[part] != digest]
            return f"the call changes what it depends on ({', '.join(changed)})"
        prove(KnownCall(again, loaded, program), args, kwargs)
        try:
            with self._counters.timed("save"):
                artifact = Artifact(call.key, "", data, kernels, recorded.seconds)
                write_artifact(self._repo, artifact, secret=self._trust.secret)
        except (HoldfastError, OSError) as error:
            _log.warning("cannot save a compiled callable in %s: %s", self._repo.store.url, error)
            return f"it could not be saved ({type(error).__name__})"
        self._counters.count("saved")
        return ""

    def _find(self, call: CallDescription) -> tuple[LoadedProgram, Program] | None:
        """Return the program of a call: one that was loaded before, or from the store; None if there is none."""
        if call.key.digest in self._programs:
            return self._programs[call.key.digest]
        for variant in iter_variants(self._repo.store, call.key.digest):
            loaded = self._load(variant, len(call.found.walk.tensors))
            if loaded is not None:
                self._counters.count_hit(seconds_saved=variant.seconds)
                self._note_use(variant)
                self._programs[call.key.digest] = loaded
                return loaded
        return None

    def _load(self, variant: StoredVariant, num_tensors: int) -> tuple[LoadedProgram, Program] | None:
        try:
            with self._counters.timed("find"):
                artifact = read_artifact(self._repo, variant, trust=self._trust)
            with self._counters.timed("load"):
                program = decode_program(artifact.graph, variant.name)
                if not all(0 <= number < num_tensors for number in program.inputs):
                    raise Corrupt(f"{variant.name!r} refers to tensors that its call does not have", key=variant.name)
                return LoadedProgram(program, artifact.kernels), program
        except NotFound:
            return None  # deleted after it was listed
        except Untrusted as error:
            self._counters.count("refused")
            _log.warning("%s", error)
        except (Corrupt, NewerFormat) as error:
            self._counters.count("corrupt")
            _log.warning("%s cannot be used, so the callable is compiled: %s", variant.name, error)
        except Exception as error:  # noqa: BLE001 - loading runs stored code, which can raise anything
            self._counters.count("corrupt")
            _log.warning("%s cannot be loaded, so the callable is compiled: %r", variant.name, error)
        return None

    def _note_use(self, variant: StoredVariant) -> None:
        """Record in the background that a program is in use, if its record is older than a day."""
        if variant.snapshot is not None and self._repo.store.clock() - variant.snapshot.time_s > DAY_S:
            from holdfast.compile_cache.artifacts.storing import record_use

            threading.Thread(target=record_use, args=(self._repo, [variant]), name="holdfast-use", daemon=True).start()

    def _add_ordinary(self, call: CallDescription) -> None:
        """Remember that calls like this one are compiled as usual."""
        call.found.forget_arguments()
        self._add(KnownCall(call, None, None))

    def _add(self, entry: KnownCall) -> None:
        with self._lock:
            self._entries = (entry, *self._entries)[:_MAX_ENTRIES]

    def _remove(self, entry: KnownCall) -> None:
        with self._lock:
            self._entries = tuple(each for each in self._entries if each is not entry)

    def _refuse(self, reason: str) -> None:
        self._attempts_left -= 1
        self._count_reason(reason)
        _log.info("a callable is compiled as usual: %s", reason)

    def _give_up(self, reason: str) -> None:
        self._attempts_left = 0
        self._count_reason(reason)
        _log.warning("%s", reason)

    def _count_reason(self, reason: str) -> None:
        """Count a call that cannot be stored; raises CompileCacheError if that is an error."""
        self._counters.count_not_saved(REASON + reason)
        if self._strict:
            raise CompileCacheError(f"strict: the callable cannot be stored as a whole: {reason}")


class WholeModule(torch.nn.Module):
    """A compiled module. Like the module that `torch.compile` returns, it has the original one as `_orig_mod`."""

    def __init__(self, module: torch.nn.Module, call: WholeCall) -> None:
        """Call `module` by `call`."""
        super().__init__()
        self._orig_mod = module
        self.training = module.training
        self.compile_cache = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled module."""
        return self.compile_cache(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original module."""
        if name == "_orig_mod":
            return super().__getattr__(name)
        return getattr(self._orig_mod, name)


def prove(entry: KnownCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise Uncacheable unless an entry accepts its own call and rejects others."""
    if entry.call.is_stale() or entry.call.match(args, kwargs) is None:
        raise Uncacheable("its guards do not accept the call that it was compiled for")
    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        if entry.call.match(args, kwargs) is not None:
            raise Uncacheable("its guards ignore the grad mode")
    for position, value in enumerate(args):
        for other in _list_others(value):
            if entry.call.match([*args[:position], other, *args[position + 1 :]], kwargs) is not None:
                raise Uncacheable(f"its guards accept another argument {position}")
    for name, value in kwargs.items():
        for other in _list_others(value):
            if entry.call.match(args, {**kwargs, name: other}) is not None:
                raise Uncacheable(f"its guards accept another argument {name}")
    if entry.call.match([*args, None], kwargs) is not None:
        raise Uncacheable("its guards accept more arguments")


def _list_others(value: Any) -> list[Any]:
    """Return values that differ from a plain value or a tensor in a property that the guards must see."""
    if not isinstance(value, Tensor):
        return [None, not value] if isinstance(value, bool | int | float | str) else []
    other = torch.float64 if value.dtype != torch.float64 else torch.float32
    with torch.no_grad():
        found = [torch.empty_like(value, dtype=other), value.new_empty((*value.shape, 1)), value.new_empty((0, 0, 7))]
    if value.is_floating_point():
        found.append(value.detach().requires_grad_(not value.requires_grad))
    return found


def compile_whole(
    callable_: Any, repo: Repository, chosen: CompilerOptions, *, fullgraph: bool, dynamic: bool | None
) -> Any:
    """Return a compiled module or function; the arguments are those of `holdfast.compile`."""

    def make_ordinary(counters: CacheCounters) -> OrdinaryCall:
        # Imports dynamo and torch's compiler, which a start from the store does without.
        from holdfast.compile_cache.backend import make_compiler
        from holdfast.compile_cache.whole.ordinary import OrdinaryCompile

        compiler = make_compiler(repo, chosen)
        compiler.cache.counters = counters
        return OrdinaryCompile(callable_, compiler, fullgraph=fullgraph, dynamic=dynamic)

    trust = Trust(secret=read_secret(chosen.key_file), everything=chosen.trust)
    options: dict[str, Json] = {"mode": chosen.mode, "options": _describe_options(chosen), "dynamic": dynamic}
    call = WholeCall(callable_, repo, trust=trust, options=options, make_ordinary=make_ordinary, strict=chosen.strict)
    if isinstance(callable_, torch.nn.Module):
        return WholeModule(callable_, call)
    return functools.update_wrapper(call, callable_)


def _describe_options(chosen: CompilerOptions) -> Json:
    """Return the options of the compiler as text: those that are equal give equal text."""
    options = sorted((chosen.options or {}).items())
    return {name: f"{type(value).__name__} {value!r}" for name, value in options}
