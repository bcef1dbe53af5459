"""Recording a run: what flows through a model, step by step, into the store, while it trains as if nobody looked."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, Unpack

import torch

from holdfast.capture.record.drill import Drill
from holdfast.capture.record.forms import iter_paths
from holdfast.capture.record.hooks import ModuleHooks, Removable
from holdfast.capture.record.observer import CallSite, Observer, find_source
from holdfast.capture.record.options import Options, RecordOptions, make_options
from holdfast.capture.record.points import find_points
from holdfast.capture.record.replay import Replayed, ReplayOptions, replay
from holdfast.capture.record.selfcheck import Checked, check_step
from holdfast.capture.record.spool import RunIdentity, Spool
from holdfast.capture.record.weights import Weights
from holdfast.capture.stored.events import Level
from holdfast.capture.stored.runs import Run, read_run
from holdfast.capture.stored.segments import iter_segments, verify_run_name
from holdfast.errors import NameInUse
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.record import Json
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.snapshot.save.environment import describe_environment

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
_MAX_NAMED: Final = 5


def record(
    repo: Repository,
    name: str,
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    **choices: Unpack[RecordOptions],
) -> Recorder:
    """Make a recording, to be put around a training loop by `with`.

    A step ends when every optimizer has stepped, or with `rec.step()`. Results are not changed, and no trouble with
    the store reaches the training: it is a warning, and a note in the run.

    Args:
        repo: where to; the run is a series of snapshots, so a crash keeps what was committed.
        name: of the run; no part of it begins with "@".
        model: the module that is called; wrappers have no part in the names of what is in it.
        optimizer: one, several, or none.
        choices:
            level: "digest", "stats" or "full", or patterns of names with a level each, of which the first counts.
            include, exclude: patterns of names of modules and parameters.
            kinds: what is recorded of them: "input output grad parameter buffer param_grad optimizer rng op log".
            steps: "0-9,20,100:1000:100", numbers, or a function of the step.
            max_bytes: of copies in all; then only digests and numbers are taken.
            queue_bytes: of copies that wait to be written; when_full: "block" until some are, "degrade" to numbers,
                or "raise".
            compiled: "boundary" records compiled modules from outside, "eager" runs them uncompiled, "tap" compiles
                operations into them that show results and gradients; so it must begin before they are compiled.
            drill: names of modules that are looked into, operation by operation.
            overwrite: replace a run of that name.
            first_step: the number of the first step, of a run that was resumed.
            segment_steps, segment_s: after how many steps or seconds what was seen is committed.
            bins: of histograms.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    return Recorder(repo, verify_run_name(name), model, optimizers, make_options(choices))


class Recorder:
    """A recording under way: a context manager. Made by `record`."""

    def __init__(
        self,
        repo: Repository,
        name: str,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        options: Options,
    ) -> None:
        """Touch nothing yet."""
        self.name = name
        self._repo = repo
        self._model = model
        self._optimizers = optimizers
        self._options = options
        self._points = find_points(model, compiled=options.compiled)
        origin = RunIdentity(name, *_find_rank(), time.time(), describe_run(model, optimizers))
        self._spool = Spool(repo, origin, queue_bytes=options.queue_bytes, bins=options.bins)
        self._eye = Observer(self._spool, options)
        self._weights = Weights(self._eye, self._points, optimizers)
        self._hooks = ModuleHooks(self._eye, self._begin)
        self._drill = Drill(self._eye, self._hooks.find_innermost)
        self._stack = ExitStack()
        self._handles: list[Removable] = []
        self._is_begun = self._is_ended = self._is_hushed = False
        self._stepped: set[int] = set()
        self._logged: defaultdict[str, int] = defaultdict(int)
        self._pid = os.getpid()

    # A recording as a context

    def __enter__(self) -> Self:
        """Hook the model; raises NameInUse if there is a run of that name."""
        self._clear_name()
        try:
            self._install()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unhook everything, then commit what is left; waits for that."""
        self._remove()
        if os.getpid() != self._pid:
            return
        if self._is_begun:
            self._finish_step()
        if error is not None:
            self._eye.notes.append(f"ended by {type(error).__name__}: {error}"[:400])
        self._note_uncalled()
        self._spool.seal(tuple(self._eye.notes), is_last=error is None)
        self._spool.wait()
        if error is None:
            self._eye.tell_failures()

    def _clear_name(self) -> None:
        rank, _ = _find_rank()
        found = [record for segment, record in iter_segments(self._repo, self.name) if segment.rank == rank]
        if found and not self._options.overwrite:
            raise NameInUse(
                f"there is a run {self.name!r} in {self._repo.store.url}; choose another name, or overwrite=True",
                name=self.name,
            )
        if found:
            self._repo.verify_same()
        for record in found:
            delete_snapshot(self._repo.store, record.name)

    def _install(self) -> None:
        if self._options.compiled == "eager":
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        for boundary in self._points.boundaries:
            self._eye.note(
                f"{boundary or 'the model'} is compiled: it is recorded from outside, hooks cannot fire inside;"
                " compiled='eager' runs it uncompiled and sees all, compiled='tap' sees results inside"
            )
        drilled = dict.fromkeys(self._options.drill, False)
        for point in self._points.modules:
            if point.fqn in drilled:
                drilled[point.fqn] = True
                self._drill.install(point)
            self._hooks.install(point)
        for name, is_found in drilled.items():
            if not is_found:
                self._eye.note(f"drill={name!r}: there is no such module to look into")
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_update))
            self._handles.append(optimizer.register_step_post_hook(self._after_update))

    def _remove(self) -> None:
        self._hooks.remove()
        self._drill.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.close()

    def _note_uncalled(self) -> None:
        """Say which modules were never seen: they may have run inside of a compiled function."""
        if not self._hooks.called:
            return
        missed = [
            point.fqn
            for point in self._points.modules
            if point.fqn not in self._hooks.called and self._eye.find_level("output", point.fqn) is not Level.OFF
        ]
        if missed:
            more = f" and {len(missed) - _MAX_NAMED} more" if len(missed) > _MAX_NAMED else ""
            self._eye.notes.append(
                f"never called: {', '.join(missed[:_MAX_NAMED])}{more}; hooks fire neither inside of compiled code, nor"
                " where another module only uses the parameters"
            )

    # What the user may call

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be recorded so far."""
        return tuple(self._eye.notes)

    @property
    def new_bytes(self) -> int:
        """How many bytes the store has got that it did not hold before."""
        return self._spool.new_bytes

    def step(self) -> None:
        """End the step, if the optimizer has not done so."""
        try:
            if self._is_begun and not self._is_ended:
                if not self._stepped and self._eye.is_open:
                    self._weights.see_all_grads()
                self._is_ended = True
        except Exception as error:  # noqa: BLE001  # a mistake of ours must not end the training
            self._eye.fail(error)

    def log(self, name: str, value: object) -> None:
        """Record a tensor, or all in a tree of them, under a name of your own: in the step that is under way."""
        if os.getpid() != self._pid or not self._hooks.is_on:
            return
        try:
            if not self._is_begun:
                self._begin()
            level = self._eye.find_level("log", name) if self._eye.is_open else Level.OFF
            if level is Level.OFF:
                return
            tree = torch.tensor(value, dtype=torch.float64) if isinstance(value, float | int) else value
            where = CallSite("custom", "log", name, self._logged[name], source=find_source())
            self._logged[name] += 1
            for path, tensor in iter_paths(tree):
                self._eye.see(tensor, where, level, path)
        except Exception as error:  # noqa: BLE001  # as above
            self._eye.fail(error)

    def flush(self) -> None:
        """Commit what was recorded so far, and wait for that."""
        # After the end nothing is left, and a segment after the last one would make the run unfinished.
        if self._hooks.is_on:
            self._spool.seal(self.notes)
        self._spool.wait()
        self._eye.tell_failures()

    def read(self) -> Run:
        """Return the run as far as it is recorded."""
        self.flush()
        return read_run(self._repo, self.name)

    def replay(self, fqn: str, step: int, **options: Unpack[ReplayOptions]) -> Replayed:
        """Run a module of the model on the inputs that were recorded, and compare what it returns; see `replay`."""
        found = next((point.module for point in self._points.modules if point.fqn == fqn), None)
        module = found if found is not None else self._model.get_submodule(fqn)
        with self._silence():
            return replay(self.read(), module, fqn, step, **options)

    def selfcheck(self, function: Callable[[], object]) -> Checked:
        """Run one step with and without recording, from the same state, and tell whether results are the same."""
        scratch = open_repository(MemoryStore(), create=True)
        options = replace(self._options, steps=lambda step: True)

        def start() -> Recorder:
            return Recorder(scratch, self.name, self._model, self._optimizers, options)

        with self._silence():
            return check_step(function, self._model, self._optimizers, start)

    @contextmanager
    def _silence(self) -> Iterator[None]:
        """Record nothing meanwhile; hooks stay where they are."""
        was_open, self._eye.is_open, self._is_hushed = self._eye.is_open, False, True
        try:
            yield
        finally:
            self._eye.is_open, self._is_hushed = was_open, False

    # Steps

    def _begin(self) -> None:
        """Begin a step, if none is under way or the one that is has ended."""
        if self._is_hushed or (self._is_begun and not self._is_ended):
            return
        if self._is_begun:
            self._finish_step()
        if os.getpid() != self._pid:
            self._eye.stop()
        self._is_begun, self._is_ended = True, False
        self._stepped.clear()
        self._logged.clear()
        self._hooks.begin_step()
        self._drill.begin_step()
        if self._eye.begin_step():
            self._weights.see_state()

    def _finish_step(self) -> None:
        self._is_begun = False
        if self._options.compiled == "tap" and self._eye.is_open and self._hooks.called <= {""}:
            self._eye.note(
                "nothing was tapped: what was compiled before the recording has no taps; call torch.compiler.reset()"
                " before it. Taps change what is fused, and stay in compiled code until then"
            )
        if self._eye.is_open and self._stepped and not self._hooks.called:
            self._eye.note(
                "no module was called: another model is trained, or this one inside of compiled code, where hooks"
                " cannot fire; compiled='eager' runs it uncompiled and sees all"
            )
        self._eye.end_step()

    # Optimizers

    def _before_update(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        if self._is_hushed:
            return
        try:
            # Whoever calls no module that is hooked begins here.
            self._begin()
            if self._eye.is_open:
                self._weights.see_grads(optimizer)
        except Exception as error:  # noqa: BLE001  # as above
            self._eye.fail(error)

    def _after_update(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        if self._is_hushed:
            return
        try:
            if self._eye.is_open:
                self._weights.see_update(optimizer)
            self._stepped.add(id(optimizer))
            if self._is_begun and len(self._stepped) == len(self._optimizers):
                self._is_ended = True
        except Exception as error:  # noqa: BLE001  # as above
            self._eye.fail(error)


def _find_rank() -> tuple[int, int]:
    """Return this process's rank, and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def describe_run(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Json]:
    """Return what is worth comparing first when two runs differ."""
    return {
        **describe_environment(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
        "accelerator": str(torch.accelerator.current_accelerator() or ""),
        "seed": str(torch.initial_seed()),
        "model": type(model).__name__,
        "training": model.training,
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
    }
