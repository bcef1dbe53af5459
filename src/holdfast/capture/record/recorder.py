"""The recorder: hooks a model and its optimizers, and writes their tensors to the store without changing results."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

import torch
from typing_extensions import Self

from holdfast.capture.record.hooks import Drill, InstalledHook, ModuleHooks, ParameterGrads
from holdfast.capture.record.observer import CallSite, Observer, StateObserver, find_source
from holdfast.capture.record.options import RecordOptions
from holdfast.capture.record.points import find_points, list_paths
from holdfast.capture.record.replay import Checked, Replayed, Weights, check_step, replay
from holdfast.capture.record.spool import RunIdentity, Spool
from holdfast.capture.stored.events import Level
from holdfast.capture.stored.runs import Run, read_run
from holdfast.capture.stored.segments import delete_segment, iter_segments, verify_run_name
from holdfast.distributed.talk.collectives import find_store
from holdfast.distributed.talk.store_rounds import StoreThread, StoreThreadLost
from holdfast.errors import NameInUse, Unsupported
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import new_write_id
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.snapshot.save import describe_environment
from holdfast.snapshot.stateful import Optimizers, list_optimizers, unwrap
from holdfast.texts import list_some
from holdfast.trees.apply import find_accelerator

_MAX_NAMED: Final = 5
_JOB_KEY: Final = "holdfast/recording-job"
_JOB_S: Final = 10.0
"""How long to wait for the store of the process group; the segments then name no job."""


def record(
    repo: Repository,
    name: str,
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    options: RecordOptions | None = None,
) -> Recorder:
    """Return a context manager that records a training loop into a repository, as `Store.record` does.

    A run is a series of snapshots, so a crash keeps what was committed.
    """
    # Hooks belong to torch's optimizer; a wrapper around it need not have any.
    optimizers = [unwrap(each) for each in list_optimizers(optimizer)]
    return Recorder(repo, verify_run_name(name), model, optimizers, options or RecordOptions())


class Recorder:
    """A recording in progress, used as a context manager. Returned by `record`."""

    def __init__(
        self,
        repo: Repository,
        name: str,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        options: RecordOptions,
    ) -> None:
        self.name = name
        self._repo = repo
        self._model = model
        self._optimizers = optimizers
        self._options = options
        self._points = find_points(model, compiled=options.compiled)
        recording = new_write_id()
        identity = RunIdentity(
            *(name, *_find_rank(), time.time(), describe_run(model, optimizers)),
            recording=recording,
            job=_agree_on_job(recording),
            overwrite=options.overwrite,
        )
        self._spool = Spool(repo, identity, queue_bytes=options.queue_bytes, bins=options.bins)
        self._observer = Observer(self._spool, options)
        self._state = StateObserver(self._observer, self._points, optimizers)
        self._grads = ParameterGrads(self._observer, self._points)
        self._hooks = ModuleHooks(self._observer, self._begin, self._grads.begin_backward)
        self._drill = Drill(self._observer, self._hooks.find_innermost)
        self._stack = ExitStack()
        self._handles: list[InstalledHook] = []
        self._is_begun = self._is_ended = self._is_silenced = False
        self._stepped: set[int] = set()
        self._logged: defaultdict[str, int] = defaultdict(int)
        self._pid = os.getpid()

    def __repr__(self) -> str:
        """Show the name, and whether it has ended."""
        return f"<Recorder {self.name!r}{', ended' if self._is_ended else ''}>"

    # Context manager

    def __enter__(self) -> Self:
        """Install the hooks; raises NameInUse if a run of that name exists."""
        self._clear_name()
        self._spool.begin(time.time())
        try:
            self._install()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hooks, commit the rest, and wait until it is written."""
        is_own = os.getpid() == self._pid
        if is_own and error is None:
            # A step that has ended is complete; what other code removed since then, the next one would have lacked.
            self._check_hooks(self._observer.step + (self._is_begun and self._is_ended))
        self._remove()
        if not is_own:
            return
        if self._is_begun:
            self._finish_step()
        if error is not None:
            self._observer.notes.append(f"ended by {type(error).__name__}: {error}"[:400])
        self._note_uncalled()
        self._spool.seal(tuple(self._observer.notes), is_last=error is None)
        self._spool.wait()
        if error is None:
            self._observer.report_failures()

    def _clear_name(self) -> None:
        rank, world = _find_rank()
        segments = (segment for segment, _ in iter_segments(self._repo, self.name))
        # Other ranks delete their own segments. Those of ranks that only an earlier run had are deleted here.
        found = [segment for segment in segments if segment.rank == rank or segment.rank >= world]
        if found and not self._options.overwrite:
            raise NameInUse(
                f"run {self.name!r} already exists in {self._repo.store.url};"
                " choose another name, or pass overwrite=True to replace it",
                name=self.name,
            )
        if found:
            self._repo.verify_same()
        # From the last one down: what a crash leaves is the beginning of the earlier run.
        for segment in sorted(found, key=lambda segment: segment.number, reverse=True):
            delete_segment(self._repo, segment)

    def _install(self) -> None:
        if self._options.compiled == "eager":
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        for boundary in self._points.boundaries:
            self._observer.note(
                f"{boundary or 'the model'} is compiled, and hooks do not fire inside compiled code: only its"
                " inputs and outputs are recorded; compiled='eager' runs it uncompiled and records everything,"
                " compiled='tap' records results inside"
            )
        drilled = dict.fromkeys(self._options.drill, False)
        for point in self._points.modules:
            if point.fqn in drilled:
                drilled[point.fqn] = True
                self._drill.install(point)
            self._hooks.install(point)
        for name, is_found in drilled.items():
            if not is_found:
                self._observer.note(f"drill={name!r}: the model has no such module that can be recorded")
        for optimizer in self._optimizers:
            before = optimizer.register_step_pre_hook(self._before_update)
            after = optimizer.register_step_post_hook(self._after_update)
            self._handles.append(InstalledHook("the optimizer", optimizer, "_optimizer_step_pre_hooks", before))
            self._handles.append(InstalledHook("the optimizer", optimizer, "_optimizer_step_post_hooks", after))

    def _remove(self) -> None:
        self._hooks.remove()
        self._grads.remove()
        self._drill.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.close()

    def _note_uncalled(self) -> None:
        """Note the modules that were never called: they may have run inside a compiled function."""
        if not self._hooks.called:
            return
        missed = [
            point.fqn
            for point in self._points.modules
            if point.fqn not in self._hooks.called and self._observer.find_level("output", point.fqn) is not Level.OFF
        ]
        if missed:
            self._observer.notes.append(
                f"never called: {list_some(missed, _MAX_NAMED)}; hooks do not fire inside compiled code, or"
                " when another module uses only the parameters"
            )

    # For the user

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be recorded so far, and why."""
        return tuple(self._observer.notes)

    @property
    def new_bytes(self) -> int:
        """Bytes that this recording added to the store, after deduplication."""
        return self._spool.new_bytes

    def step(self) -> None:
        """End the current step, unless the optimizers have ended it already."""
        try:
            if self._is_begun and not self._is_ended:
                if not self._stepped and self._observer.is_open:
                    self._state.observe_all_grads()
                self._end_step()
        except Exception as error:  # noqa: BLE001  # a bug in the recorder must not stop the training
            self._observer.fail(error)

    def log(self, name: str, value: object) -> None:
        """Record a number, a tensor, or all tensors of a tree in the current step, under a name of your choice."""
        if os.getpid() != self._pid or not self._hooks.is_on:
            return
        try:
            if not self._is_begun:
                self._begin()
            level = self._observer.find_level("log", name) if self._observer.is_open else Level.OFF
            if level is Level.OFF:
                return
            tree = torch.tensor(value, dtype=torch.float64) if isinstance(value, float | int) else value
            where = CallSite("custom", "log", name, self._logged[name], source=find_source())
            self._logged[name] += 1
            for path, tensor in list_paths(tree):
                self._observer.observe(tensor, where, level, path)
        except Exception as error:  # noqa: BLE001  # as above
            self._observer.fail(error)

    def flush(self) -> None:
        """Commit what was recorded so far, and wait until it is written."""
        # After the recording has ended, nothing is pending, and a segment after the last one would mark the run as
        # unfinished.
        if self._hooks.is_on:
            self._spool.seal(self.notes)
        self._spool.wait()
        self._observer.report_failures()

    def read(self) -> Run:
        """Flush, and return the run as recorded so far."""
        self.flush()
        return read_run(self._repo, self.name)

    def replay(
        self,
        fqn: str,
        step: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        call: int = 0,
        rank: int | None = None,
        weights: Weights = "recorded",
    ) -> Replayed:
        """Run a module of the model again on its recorded inputs, and compare the results; see `replay`."""
        found = next((point.module for point in self._points.modules if point.fqn == fqn), None)
        module = found if found is not None else self._model.get_submodule(fqn)
        with self._silence():
            return replay(
                self.read(), module, fqn, step, dtype=dtype, device=device, call=call, rank=rank, weights=weights
            )

    def selfcheck(self, function: Callable[[], object]) -> Checked:
        """Run one step with and without recording, from the same state, and report whether the results are equal."""
        scratch = open_repository(MemoryStore(), create=True)
        options = replace(self._options, steps=lambda step: True)

        def start() -> Recorder:
            return Recorder(scratch, self.name, self._model, self._optimizers, options)

        with self._silence():
            return check_step(function, self._model, self._optimizers, start)

    @contextmanager
    def _silence(self) -> Iterator[None]:
        """Pause recording; the hooks stay installed."""
        was_open, self._observer.is_open, self._is_silenced = self._observer.is_open, False, True
        try:
            yield
        finally:
            self._observer.is_open, self._is_silenced = was_open, False

    # Steps

    def _begin(self) -> None:
        """Begin a step, unless one is in progress."""
        if self._is_silenced:
            return
        if self._is_begun and not self._is_ended:
            # Without the optimizer's hooks, the step would never end.
            if not all(each.is_present for each in self._handles):
                self._check_hooks(self._observer.step)
            return
        if self._is_begun:
            self._finish_step()
        if os.getpid() != self._pid:
            self._observer.stop()
        self._check_hooks(self._observer.step)
        self._is_begun, self._is_ended = True, False
        self._stepped.clear()
        self._logged.clear()
        self._hooks.begin_step()
        self._grads.begin_step()
        self._drill.begin_step()
        if self._observer.begin_step():
            self._state.observe_state()

    def _end_step(self) -> None:
        self._is_ended = True
        self._check_hooks(self._observer.step)

    def _check_hooks(self, step: int) -> None:
        """Stop recording if other code has removed a hook: nothing is known of what the hook would have observed."""
        if self._observer.is_stopped or not self._hooks.is_on:
            return
        own = (each.name for each in self._handles if not each.is_present)
        found = [*self._hooks.iter_missing(), *self._grads.iter_missing(), *self._drill.iter_missing(), *own]
        if found:
            self._spool.lost_step = step
            self._observer.stop()
            self._observer.note(
                f"not recorded since step {step}: hooks were removed from"
                f" {list_some([*dict.fromkeys(found)], _MAX_NAMED)} by other code; training continues. Find the code"
                " that removes hooks, compiles a module or replaces its `forward`, and record again without it"
            )

    def _finish_step(self) -> None:
        self._is_begun = False
        if self._options.compiled == "tap" and self._observer.is_open and self._hooks.called <= {""}:
            self._observer.note(
                "no tap was called: code that was compiled before the recording has no taps; call"
                " torch.compiler.reset() before the recording starts. Taps change which operations are fused, and stay"
                " in the compiled code until the next reset"
            )
        if self._observer.is_open and self._stepped and not self._hooks.called:
            self._observer.note(
                "no module was called: the loop trains another model, or runs this one inside compiled code, where"
                " hooks do not fire; compiled='eager' runs it uncompiled and records everything"
            )
        self._observer.end_step()

    # Optimizers

    def _before_update(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        if self._is_silenced:
            return
        try:
            # If no hooked module was called, the step begins here.
            self._begin()
            if self._observer.is_open:
                self._state.observe_grads(optimizer)
        except Exception as error:  # noqa: BLE001  # as above
            self._observer.fail(error)

    def _after_update(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        if self._is_silenced:
            return
        try:
            if self._observer.is_open:
                self._state.observe_update(optimizer)
            self._stepped.add(id(optimizer))
            if self._is_begun and len(self._stepped) == len(self._optimizers):
                self._end_step()
        except Exception as error:  # noqa: BLE001  # as above
            self._observer.fail(error)


def _find_rank() -> tuple[int, int]:
    """Return this process's rank and the world size."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _agree_on_job(recording: str) -> str:
    """Return a random id that is the same on all ranks of this job; "" if their store cannot be used.

    A single rank has that of its recording.
    """
    group = torch.distributed.group.WORLD if _find_rank()[1] > 1 else None
    if group is None:
        return recording
    thread: StoreThread | None = None
    try:
        thread = StoreThread(find_store(group), name="holdfast-record-job", timeout_s=_JOB_S)
        return thread.call(lambda store: store.compare_set(_JOB_KEY, "", recording)).decode()
    except (StoreThreadLost, Unsupported):
        return ""
    finally:
        if thread is not None:
            thread.close()


def describe_run(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Json]:
    """Return the environment and settings of a run: what to compare first when two runs differ."""
    return {
        **describe_environment(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
        "accelerator": str(find_accelerator() or ""),
        "seed": str(torch.initial_seed()),
        "model": type(model).__name__,
        "training": model.training,
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
    }
