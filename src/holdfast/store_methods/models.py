"""The methods of `Store` for models that run: compiled graphs, and recorded runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import Unpack

from holdfast.display.bars import make_progress
from holdfast.progress import ProgressChoice
from holdfast.snapshot.gc_pause import pause_gc
from holdfast.store_methods.opened import OpenStore

if TYPE_CHECKING:
    import torch

    from holdfast.capture.compare.compare import DiffChoices
    from holdfast.capture.compare.result import RunDiff
    from holdfast.capture.record.options import RecordOptions as RecordChoices
    from holdfast.capture.record.recorder import Recorder
    from holdfast.capture.stored.runs import Run, RunFacts
    from holdfast.compile_cache.backend import Compiler
    from holdfast.compile_cache.backend import CompilerOptions as CompilerChoices
    from holdfast.snapshot.optimizers import Optimizers


class ModelMethods(OpenStore):
    """Cache the compiled graphs of a model, and record and compare its runs."""

    def compiler(self, **choices: Unpack[CompilerChoices]) -> Compiler:
        """Return a backend for `torch.compile` that caches compiled graphs in this store.

        Graphs are code: they load if only you can write to the store, if signed (`key_file`), or with `trust=True`.
        """
        with pause_gc():  # imports build many objects
            from holdfast.compile_cache.backend import make_compiler
        return make_compiler(self.repository, **choices)

    def record(
        self, name: str, model: torch.nn.Module, optimizer: Optimizers = None, **choices: Unpack[RecordChoices]
    ) -> Recorder:
        """Return a context manager that records the tensors of a model; `level` is "digest", "stats" or "full".

        Recording does not change results, and an error of the store does not stop the training.
        """
        from holdfast.capture.record.recorder import record

        return record(self.repository, name, model, optimizer, **choices)

    def run(self, name: str | Run) -> Run:
        """Return a recorded run by name; raises NotFound."""
        from holdfast.capture.stored.runs import read_run

        return read_run(self.repository, name) if isinstance(name, str) else name

    def runs(self) -> list[RunFacts]:
        """Return a summary of each recorded run: name, status, number of ranks, start time, notes."""
        from holdfast.capture.stored.runs import iter_runs

        return list(iter_runs(self.repository))

    def diff_runs(
        self,
        a: str | Run,
        b: str | Run,
        *,
        noise: str | Run | None = None,
        reference: str | Run | None = None,
        progress: ProgressChoice = None,
        **options: Unpack[DiffChoices],
    ) -> RunDiff:
        """Find where run `b` diverges from run `a`: the first tensor that differs although all its inputs are equal.

        Tensors are close within the tolerances of torch.testing, or `tolerance`; with `noise`, a repetition of `a`, if
        they differ about as little as `a` and `noise`; with `reference`, a more exact run, if `b` is as near as `a`.
        """
        from holdfast.capture.compare.compare import diff_runs, make_diff_options

        repeated, exact = (None if run is None else self.run(run) for run in (noise, reference))
        chosen = make_diff_options(options, self.repository.budget_bytes, make_progress(progress))
        return diff_runs(self.run(a), self.run(b), noise=repeated, reference=exact, options=chosen)
