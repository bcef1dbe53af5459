"""Explain origins by what no tensor shows: settings that differ, inputs changed in place, gradients kept or changed.

Many tensors may differ for one reason. Explanations of the same reason are equal, so that one origin stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Final, Literal

from holdfast.capture.compare.measure import is_filled
from holdfast.capture.compare.step_graph import ModuleCall, StepGraph, is_below, iter_modules
from holdfast.capture.stored.events import Event, OptimizerSettings, ParameterSettings, StepSettings
from holdfast.json_text import Json
from holdfast.tensors.spec import find_dtype
from holdfast.texts import list_some

Reason = Literal[
    "",
    "optimizer class",
    "optimizer setting",
    "parameter group",
    "trained",
    "frozen",
    "tied parameters",
    "module class",
    "module setting",
    "mode",
    "calls",
    "in-place change",
    "zero_grad",
    "accumulation",
    "gradient change",
    "loss",
    "data",
    "data order",
]
"""What a cause is, in one or two words; "" if only the place is known."""
_MAX_NAMED: Final = 3
_MODE: Final = "training"
_CLASS: Final = "class"
_IN_PLACE: Final = "#input"
_BEFORE: Final = "#0"
_TRAINED: Final = "trained"


@dataclass(frozen=True, slots=True)
class NamedCause:
    """Why tensors differ. Origins with equal explanations are one."""

    reason: Reason
    fqn: str
    """The module, parameter, parameter group or optimizer to inspect."""
    why: str


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """What is known of a step of both runs besides how their tensors compare."""

    names: tuple[str, str] = ("the first run", "the second run")
    ours: StepSettings = field(default_factory=StepSettings)
    theirs: StepSettings = field(default_factory=StepSettings)
    other_events: Sequence[Event] = ()
    """All events of the second run, except settings."""


class Explainer:
    """Explains the origins of one step."""

    def __init__(self, graph: StepGraph, evidence: StepEvidence) -> None:
        """Search in the first run's step and in the evidence."""
        self._graph, self._evidence = graph, evidence
        self._ours, self._theirs = evidence.ours, evidence.theirs

    @cached_property
    def _other(self) -> StepGraph:
        return StepGraph(self._evidence.other_events)

    def _say(self, ours: str, theirs: str) -> str:
        return f"{ours} in {self._evidence.names[0]} and {theirs} in {self._evidence.names[1]}"

    # Modules

    def explain_module(self, fqn: str) -> NamedCause | None:
        """Explain a module that computes something else by its own settings, or those of modules it does not call."""
        below = (name for name in self._ours.modules if is_below(name, fqn) and not self._graph.find_calls(name))
        for name in (fqn, *below):
            found = self._compare_module(name)
            if found is not None:
                return found
        return None

    def _compare_module(self, fqn: str) -> NamedCause | None:
        ours, theirs = self._ours.modules.get(fqn, {}), self._theirs.modules.get(fqn, {})
        if not ours or not theirs or ours == theirs:
            return None
        if ours.get(_CLASS) != theirs.get(_CLASS):
            return NamedCause("module class", fqn, f"its class is {self._say(ours[_CLASS], theirs[_CLASS])}")
        changes = [each for each in self._iter_changes(ours, theirs) if not each.startswith(f"{_MODE} is")]
        if changes:
            return NamedCause("module setting", fqn, "; ".join(changes))
        return self._explain_mode(fqn)

    def _explain_mode(self, fqn: str) -> NamedCause:
        """Name the outermost module that is in another mode: the call of train() or eval() was on that one."""
        outermost = fqn
        while outermost and self._find_mode(outermost.rpartition(".")[0]) is not None:
            outermost = outermost.rpartition(".")[0]
        mode = self._find_mode(outermost)
        assert mode is not None, "the module itself is in another mode"
        return NamedCause("mode", outermost, f"it is in {self._say(*mode)}")

    def _find_mode(self, fqn: str) -> tuple[str, str] | None:
        """Return the modes of a module in both runs; None if they are the same."""
        both = [settings.modules.get(fqn, {}).get(_MODE) for settings in (self._ours, self._theirs)]
        if None in both or both[0] == both[1]:
            return None
        ours, theirs = ("training mode" if mode else "evaluation mode" for mode in both)
        return ours, theirs

    def _iter_changes(self, ours: object, theirs: object) -> Iterator[str]:
        assert isinstance(ours, dict) and isinstance(theirs, dict)  # noqa: PT018  # as decoded
        for key in dict.fromkeys((*ours, *theirs)):
            if ours.get(key) != theirs.get(key):
                yield f"{key} is {self._say(_show(ours.get(key)), _show(theirs.get(key)))}"

    def explain_calls(self, fqn: str) -> NamedCause | None:
        """Explain what a module keeps from call to call by another number of calls; names the outermost such module."""
        outermost = None
        for name in (fqn, *iter_modules(fqn)):
            counts = [len(graph.find_calls(name)) for graph in (self._graph, self._other)]
            if counts[0] != counts[1] and 0 not in counts:
                outermost = name, self._say(*(f"{count} time{'s' if count > 1 else ''}" for count in counts))
        return NamedCause("calls", outermost[0], f"it is called {outermost[1]}") if outermost else None

    def explain_in_place(self, around: ModuleCall, index: int) -> NamedCause | None:
        """Explain a difference inside a call by a module in it that changes its input in place, in one run only."""
        for call in self._graph.calls.values():
            is_inside = is_below(call.fqn, around.fqn) and call.inputs and around.contains(call.inputs[0])
            if not is_inside or call.inputs[0] > index:
                continue
            other = self._other.calls.get((call.fqn, call.number))
            both = _find_in_place(self._graph, call), _find_in_place(self._other, other) if other else []
            if other is not None and both[0] != both[1]:
                has_first = bool(both[0])
                where = self._evidence.names[0 if has_first else 1], self._evidence.names[1 if has_first else 0]
                path = (both[0] or both[1])[0]
                why = f"it changes its input{path} in place in {where[0]} and not in {where[1]}"
                return NamedCause(
                    "in-place change", call.fqn, f"{why}, which changes what {_name(around.fqn)} computes"
                )
        return None

    # Optimizers and parameters

    def explain_update(self, parameter: str) -> NamedCause | None:
        """Explain a parameter that was updated otherwise."""
        ours, theirs = self._ours.parameters.get(parameter), self._theirs.parameters.get(parameter)
        if ours is None or theirs is None:
            return None
        number = ours.group.rpartition(".")[0]
        return self.explain_training(parameter) or (self.explain_optimizer(number) if ours.group else None)

    def explain_training(self, parameter: str) -> NamedCause | None:
        """Explain a parameter that is trained in one run only, or in another group; with all that changed like it."""
        words = self._describe_training(parameter)
        if words is None:
            return None
        same = [name for name in self._ours.parameters if self._describe_training(name) == words]
        reason: Reason = "trained" if words[1] == _TRAINED else "frozen" if words[0] == _TRAINED else "parameter group"
        return NamedCause(reason, self._find_called_scope(same), f"{_name_all(same)} {_be(same)} {self._say(*words)}")

    def _find_called_scope(self, names: Sequence[str]) -> str:
        """Return the innermost called module that contains all names: a list of modules is never called."""
        scope = find_scope(names)
        is_module = len(names) > 1
        return next(
            (name for name in (scope, *iter_modules(scope)) if not is_module or self._graph.find_calls(name)), ""
        )

    def _describe_training(self, parameter: str) -> tuple[str, str] | None:
        """Return in words how each run trains a parameter; None if both do the same, or one is not known."""
        ours, theirs = self._ours.parameters.get(parameter), self._theirs.parameters.get(parameter)
        if ours is None or theirs is None:
            return None
        words = _describe_state(ours, self._ours), _describe_state(theirs, self._theirs)
        if words == (_TRAINED, _TRAINED):
            words = f"in param_groups.{ours.group}", f"in param_groups.{theirs.group}"
        elif _TRAINED not in words:
            return None
        return words if words[0] != words[1] else None

    def explain_any_training(self) -> NamedCause | None:
        """Explain a difference of all gradients by parameters that are trained in one run only."""
        for name, ours in self._ours.parameters.items():
            theirs = self._theirs.parameters.get(name)
            if theirs is not None and theirs.requires_grad != ours.requires_grad:
                return self.explain_training(name)
        return None

    def explain_optimizer(self, number: str) -> NamedCause | None:
        """Explain updates by the class of an optimizer, or by its settings."""
        ours, theirs = self._ours.optimizers.get(number), self._theirs.optimizers.get(number)
        if ours is None or theirs is None or ours == theirs:
            return None
        changes = [*self._iter_group_changes(number, ours, theirs)]
        text = "; ".join(dict.fromkeys(change for _, change in changes))
        if ours.class_name != theirs.class_name:
            why = f"its class is {self._say(ours.class_name, theirs.class_name)}"
            fqn = f"optimizers.{number}" if number else "optimizer"
            return NamedCause("optimizer class", fqn, f"{why}; {text}" if text else why)
        return NamedCause("optimizer setting", changes[0][0], text)

    def _iter_group_changes(
        self, number: str, ours: OptimizerSettings, theirs: OptimizerSettings
    ) -> Iterator[tuple[str, str]]:
        prefix = f"param_groups.{number}." if number else "param_groups."
        for index, (first, second) in enumerate(zip_longest(ours.groups, theirs.groups)):
            if first is None or second is None:
                counts = self._say(str(len(ours.groups)), str(len(theirs.groups)))
                yield f"{prefix}{index}", f"the number of parameter groups is {counts}"
                return
            # Only keys of both: another class has other settings.
            shared = ({key: each[key] for key in first if key in second} for each in (first, second))
            yield from ((f"{prefix}{index}", change) for change in self._iter_changes(*shared))

    def explain_tie(self, parameter: str) -> NamedCause | None:
        """Explain the gradient of a parameter by another one that is tied to it in one run only."""
        for settings, other in ((self._ours, self._theirs), (self._theirs, self._ours)):
            for name, first in settings.tied.items():
                is_known = name in other.parameters or name in other.tied
                if parameter in (name, first) and is_known and other.tied.get(name) != first:
                    names = self._evidence.names if settings is self._ours else self._evidence.names[::-1]
                    why = f"it is tied to {first} in {names[0]} and not in {names[1]}"
                    return NamedCause("tied parameters", name, why)
        return None

    # Gradients of parameters

    def explain_kept(self, parameter: str) -> NamedCause | None:
        """Explain a gradient by one of an earlier backward pass that was not cleared, in one run only."""
        kept = self._kept
        if (parameter in kept[0]) == (parameter in kept[1]):
            return None
        bad = 0 if parameter in kept[0] else 1
        names = [name for name in kept[bad] if name not in kept[1 - bad]]
        ours, theirs = self._evidence.names[bad], self._evidence.names[1 - bad]
        why = f"gradients of an earlier backward pass were not cleared in {ours}, and were in {theirs}"
        return NamedCause("zero_grad", self._find_scope_of_grads(names), f"{why}: {_name_all(names)}")

    @cached_property
    def _kept(self) -> tuple[dict[str, None], dict[str, None]]:
        """By run, the parameters that had a gradient other than zero before the first backward pass."""
        return _find_kept(self._graph), _find_kept(self._other)

    def explain_change(self, parameter: str) -> NamedCause | None:
        """Explain a gradient that is equal after the backward pass, and differs when the optimizer uses it."""
        passes = [len(self._find_sums(graph, parameter)) for graph in (self._graph, self._other)]
        if not passes[0] or not passes[1]:
            return None
        bad = [name for name, indices in self._graph.param_grads.items() if self._is_final_bad(indices)]
        scope = self._find_scope_of_grads(bad)
        if passes[0] != passes[1]:
            ours = f"{passes[0]} backward pass{'es' if passes[0] > 1 else ''}"
            why = f"gradients are the sum of {self._say(ours, f'of {passes[1]}')}"
            return NamedCause("accumulation", scope, why)
        changed = [{name for name in bad if self._is_changed(graph, name)} for graph in (self._graph, self._other)]
        only = [[name for name in bad if name in changed[side] - changed[1 - side]] for side in (0, 1)]
        why = f"gradients of {_name_all(bad)} are equal after the backward pass and differ before the optimizer's step"
        if not only[0] and not only[1]:
            group = self._find_groups(bad)
            how = "changed after the backward pass in both, but not in the same way"
            how = f"those of {group} are {how}" if group else how
        else:
            side = 0 if only[0] else 1
            group = self._find_groups(only[side])
            first, second = self._evidence.names if side == 0 else self._evidence.names[::-1]
            how = f"changed after the backward pass in {first} and not in {second}"
            if group or len(only[side]) < len(bad):
                how = f"those of {group or _name_all(only[side])} are {how}"
            scope = scope if group or len(only[side]) == len(bad) else self._find_scope_of_grads(only[side])
        why = f"{why}: {how}, for example by clipping or scaling"
        return NamedCause("gradient change", group or scope, why)

    def _find_groups(self, names: Sequence[str]) -> str:
        """Return the parameter groups that consist of exactly these parameters; "" if none do, or all groups do."""
        groups = {name: each.group for name, each in self._ours.parameters.items() if each.group}
        found = {groups.get(name, "") for name in names}
        members = {name for name, group in groups.items() if group in found and name in self._graph.param_grads}
        if found == set(groups.values()) or members != set(names):
            return ""
        return ", ".join(f"param_groups.{group}" for group in sorted(found))

    def _is_final_bad(self, indices: Sequence[int]) -> bool:
        return any(not self._graph.events[each].site.path and self._graph.is_bad(each) for each in indices)

    def _find_scope_of_grads(self, names: Sequence[str]) -> str:
        return "" if len(names) == len(self._graph.param_grads) else find_scope(names)

    def _find_sums(self, graph: StepGraph, parameter: str) -> list[Event]:
        return [graph.events[each] for each in graph.param_grads.get(parameter, ()) if is_sum(graph.events[each])]

    def _is_changed(self, graph: StepGraph, parameter: str) -> bool:
        sums = self._find_sums(graph, parameter)
        final = [graph.events[each] for each in graph.param_grads[parameter] if not graph.events[each].site.path]
        return bool(final) and final[-1].has_bytes_of(sums[-1]) is False


def is_sum(event: Event) -> bool:
    """Return whether an event is the gradient of a parameter after a backward pass, before the optimizer's step."""
    return event.site.kind == "param_grad" and event.site.path.startswith("#") and event.site.path != _BEFORE


def find_scope(names: Sequence[str]) -> str:
    """Return the innermost module that contains all names; a single name itself."""
    if len(names) == 1:
        return names[0]
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared: list[str] = []
    for column in columns:
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return ".".join(shared)


def find_step_with(event: Event, steps: Sequence[int], read: Callable[[int], Sequence[Event]]) -> int | None:
    """Return another step in which the same argument of the model has the bytes of an event; the nearest first."""
    site = event.site
    for step in sorted(steps, key=lambda step: abs(step - site.step)):
        for other in read(step) if step != site.step else ():
            is_same_site = (other.site.kind, other.site.fqn, other.site.path) == (site.kind, site.fqn, site.path)
            if is_same_site and other.has_bytes_of(event) and other.shape == event.shape:
                return step
    return None


def _find_kept(graph: StepGraph) -> dict[str, None]:
    firsts = ((name, graph.events[indices[0]]) for name, indices in graph.param_grads.items())
    return {name: None for name, event in firsts if event.site.path == _BEFORE and not _is_zero(event)}


def _find_in_place(graph: StepGraph, call: ModuleCall) -> list[str]:
    """Return the paths of the inputs that a call has changed: recorded as such, or an output in the same memory."""
    events = graph.events
    paths = [events[out].site.path.removeprefix(_IN_PLACE) for out in call.outputs if is_changed_input(events[out])]
    for each in call.inputs:
        given = events[each]
        for out in call.outputs:
            made = events[out]
            is_same_memory = given.alias == made.alias >= 0 and given.shape == made.shape
            if is_same_memory and given.has_bytes_of(made) is False and not is_changed_input(made):
                paths.append(given.site.path)
    return paths


def is_changed_input(event: Event) -> bool:
    """Return whether an output is an input that the module has changed in place."""
    return event.site.kind == "output" and event.site.path.startswith(_IN_PLACE)


def _is_zero(event: Event) -> bool:
    size_bytes = find_dtype(event.dtype).itemsize
    for size in event.shape:
        size_bytes *= size
    return is_filled(event, b"\0", size_bytes)


def _describe_state(parameter: ParameterSettings, settings: StepSettings) -> str:
    """Return whether a parameter is trained; without a recorded optimizer, one that requires gradients is."""
    if not parameter.requires_grad:
        return "frozen"
    return _TRAINED if parameter.group or not settings.optimizers else "in no optimizer"


def _show(value: Json) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return str(value)


def _name_all(names: Sequence[str]) -> str:
    """Return a single name, or the number of names and the first of them."""
    return names[0] if len(names) == 1 else f"{len(names)} parameters ({list_some(names, _MAX_NAMED)})"


def _be(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _name(fqn: str) -> str:
    return fqn or "the model"
