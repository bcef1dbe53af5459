"""Compiles a callable as usual, through the compile cache, and records single calls for `WholeCall`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.config as dynamo_config

from holdfast.compile_cache.artifacts.artifact import read_artifact
from holdfast.compile_cache.artifacts.catalog import iter_variants
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.compile_cache.backend import Compiler
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.compile_cache.whole.known_calls import CallDescription
from holdfast.compile_cache.whole.program import Program
from holdfast.compile_cache.whole.recording import Recording, make_program, watch_bytecode


@dataclass(slots=True)
class CallRecord:
    """A call, and the program that repeats it or the reason why there is none."""

    result: Any
    program: Program | None = None
    reason: str = ""
    kernels: Mapping[str, bytes] = field(default_factory=dict)
    seconds: float = 0.0


class OrdinaryCompile:
    """A callable, compiled by `torch.compile`."""

    def __init__(self, callable_: Any, compiler: Compiler, *, fullgraph: bool, dynamic: bool | None) -> None:
        """Compile with `compiler`; the rest are arguments of `torch.compile`."""
        self._callable = callable_
        self._compiler = compiler
        self._recording: Recording | None = None
        self._compiled: Any = torch.compile(
            callable_,
            backend=self._compile,
            fullgraph=fullgraph,
            dynamic=dynamic,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._compiled(*args, **kwargs)

    def record(self, call: CallDescription, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallRecord:
        """Call it, and record how another process can do the same without dynamo."""
        recording = Recording(self._callable, call.found)
        started = time.monotonic()
        # Without these calls, the code around a graph consists of the call of the graph alone.
        with dynamo_config.patch(record_runtime_overhead=False):
            handle = watch_bytecode(recording)
            self._recording = recording
            try:
                result = self._compiled(*args, **kwargs)
            finally:
                self._recording = None
                handle.remove()
        record = CallRecord(result, kernels=recording.kernels, seconds=time.monotonic() - started)
        try:
            record.program = make_program(recording, result)
        except Uncacheable as error:
            record.reason = error.reason
        except Exception as error:  # noqa: BLE001 - the call was successful, and must not fail now
            record.reason = f"its program could not be made ({type(error).__name__}: {str(error)[:200]})"
        return record

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Dynamo calls this."""
        recording = self._recording
        if recording is None:
            return self._compiler(graph, inputs, **options)
        recording.note_graph(graph, inputs)
        try:
            key = self._compiler.make_key(graph, inputs).digest
        except Exception as error:  # noqa: BLE001 - the compiler reports the same error in its own way
            key = ""
            recording.refuse(getattr(error, "reason", "its graph has no key"))
        run = self._compiler(graph, inputs, **options)
        self._take_artifact(recording, key, run)

        def run_once(*values: Any) -> Any:
            found = run(*values)
            if recording is self._recording:
                recording.outputs = tuple(found)
            return found

        return run_once

    def _take_artifact(self, recording: Recording, key: str, run: Any) -> None:
        """Take the parts of a compiled graph from what torch returned, and its kernels from the store."""
        if recording.reason or not hasattr(run, "serialize"):
            recording.refuse("its graph is not stored")
            return
        try:
            recording.entry = run.serialize()
            cache = self._compiler.cache
            for variant in iter_variants(cache.repo.store, key):
                if not variant.trouble and not variant.guards:
                    # Kernels that this process has just saved or loaded; they are verified again when they are loaded.
                    recording.kernels = read_artifact(cache.repo, variant, trust=Trust(everything=True)).kernels
                    return
            recording.refuse("its graph is not stored")
        except Exception as error:  # noqa: BLE001 - the graph was compiled, and the call must not fail now
            recording.refuse(f"its graph could not be read ({type(error).__name__})")
