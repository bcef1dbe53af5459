"""Classify events that differ as origins or propagated, by what each is computed from, states included."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from holdfast.capture.compare.explain import Explainer, NamedCause, Reason, StepEvidence, is_changed_input, is_sum
from holdfast.capture.compare.step_graph import ModuleCall, Standing, StepGraph, is_below, iter_modules
from holdfast.capture.stored.events import Event, EventKind, Phase

_SEPARATORS: Final = ".:/["
"""Characters that may follow the name of a parameter in the name of an optimizer state."""
_GROUPS: Final = "param_groups."
"""Prefix of the names of parameter groups."""
STATE: Final = frozenset({"parameter", "buffer", "optimizer", "rng"})
"""Kinds of events that keep their value from one step to the next."""
_USED: Final = frozenset({"parameter", "buffer"})
"""Kinds of state that a forward pass computes with."""


@dataclass(frozen=True, slots=True)
class LastState:
    """When a state was last observed, and how it compared with the other run's."""

    kind: EventKind
    standing: Standing
    step: int
    phase: Phase


class States:
    """How each state of one rank was last observed, and which modules contain states that differ."""

    def __init__(self) -> None:
        self._last: dict[str, LastState] = {}
        self._updated: dict[str, LastState] = {}
        """States observed in the optimizer phase of this step: their values after the update."""
        self._bad_below: Counter[str] = Counter()
        """By module, the number of parameters and buffers in it that differ."""
        self._bad: dict[str, frozenset[str]] = {}
        """The parameters and buffers that differ, each with the modules that contain it under any of its names."""
        self._tied: defaultdict[str, list[str]] = defaultdict(list)
        self._of_parameter: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def set_tied(self, tied: Mapping[str, str]) -> None:
        """Set the other names of parameters, each with the name that has the state."""
        self._tied.clear()
        for other, name in tied.items():
            self._tied[name].append(other)

    def find_names(self, name: str) -> tuple[str, ...]:
        """Return all names of a parameter."""
        return (name, *self._tied.get(name, ()))

    def find(self, name: str) -> LastState | None:
        """Return how a state was last observed."""
        return self._updated.get(name) or self._last.get(name)

    def find_before(self, name: str) -> LastState | None:
        """Return how a state was observed before the optimizer of this step ran."""
        return self._last.get(name)

    def find_of_parameter(self, parameter: str) -> list[LastState]:
        """Return how the optimizer's states of a parameter were observed before this step."""
        return [self._last[name] for name in self._of_parameter.get(parameter, ()) if name in self._last]

    def find_below(self, module: str) -> tuple[tuple[str, Standing], ...]:
        """Return the parameters and buffers in a module and everything below it."""
        return tuple(
            (each, last.standing)
            for name, last in self._last.items()
            if last.kind in _USED
            for each in self.find_names(name)
            if is_below(each, module)
        )

    def has_bad(self, module: str = "") -> bool:
        """Return whether a parameter or buffer in a module differs; by default, in the whole model."""
        return self._bad_below[module] > 0

    def iter_bad(self) -> Iterator[str]:
        """Yield the parameters and buffers that differ, under all of their names."""
        for name in self._bad:
            yield from self.find_names(name)

    def note(self, event: Event, standing: Standing) -> None:
        """Remember how a state was observed; a value after the optimizer's update counts only from the next step on."""
        site = event.site
        name = find_name(event)
        if site.kind == "optimizer":
            self._of_parameter[self.find_parameter(event)][name] = None
        last = LastState(site.kind, standing, site.step, site.phase)
        if site.phase == "optimizer":
            self._updated[name] = last
        else:
            self._keep(name, last)

    def end_step(self) -> None:
        """Make the values after the optimizer's update the last known ones."""
        for name, last in self._updated.items():
            self._keep(name, last)
        self._updated = {}

    def _keep(self, name: str, last: LastState) -> None:
        self._last[name] = last
        is_bad = last.kind in _USED and last.standing == "differs"
        if is_bad == (name in self._bad):
            return
        if is_bad:
            self._bad[name] = frozenset(module for each in self.find_names(name) for module in iter_modules(each))
            self._bad_below.update(self._bad[name])
        else:
            self._bad_below.subtract(self._bad.pop(name))

    def find_parameter(self, event: Event) -> str:
        """Return the parameter that an optimizer state belongs to: its name, or a prefix of it."""
        fqn = name = event.site.fqn
        if event.site.path:
            return fqn
        while name:
            last = self.find(name)
            if last and last.kind == "parameter":
                return name
            name = name[: max(0, *(name.rfind(sign) for sign in _SEPARATORS))]
        return fqn.rpartition(".")[0] or fqn


def is_setting(event: Event) -> bool:
    """Return whether an event is a setting of a parameter group, such as the learning rate: set, not computed."""
    return event.site.kind == "optimizer" and event.site.fqn.startswith(_GROUPS) and bool(event.site.path)


def find_optimizer(event: Event) -> str:
    """Return the number of the optimizer that a setting belongs to; "" if there is only one."""
    return event.site.fqn.removeprefix(_GROUPS).rpartition(".")[0]


def find_name(event: Event) -> str:
    """Return the name of a state, including its path."""
    return event.site.fqn + event.site.path


@dataclass(frozen=True, slots=True)
class Words:
    """The words for a bad and a good event in explanations."""

    bad: str = "differs"
    good: str = "equal"


@dataclass(frozen=True, slots=True)
class _Hidden:
    """The first event that is close but not equal: where a difference within the tolerance comes from."""

    event: Event
    explanation: NamedCause | None


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an event differs: an earlier event caused it, or it is an origin, and then what produced it."""

    is_origin: bool
    fqn: str = ""
    """The module, parameter or state to inspect."""
    step: int = 0
    phase: Phase = "forward"
    kind: EventKind = "output"
    why: str = ""
    reason: Reason = ""
    seen: str = ""
    """Where the first tensor differs, if that is not the module, parameter or state to inspect."""
    source: str = ""
    inputs: tuple[int, ...] = ()
    """Indices of the events it was computed from, none of which differs."""
    parameters: tuple[tuple[str, Standing], ...] = ()
    """Parameters and buffers it was computed with, and how each compares with the other run's."""
    maybe: tuple[str, ...] = ()
    """Other modules that may be the origin; the recording does not show which."""


_PROPAGATED: Final = Cause(is_origin=False)
NOWHERE: Final = 99
"""A stage after all others: nothing differs."""


def find_stage(event: Event) -> int:
    """Return the stage of a step that an event belongs to; 0 for what each rank computes by itself.

    Later stages follow a collective: what ranks reduce together differs on all of them if one rank differed before.
    """
    site = event.site
    if site.kind == "param_grad" and not site.path:
        return 2 if site.phase == "optimizer" else 1
    return 3 if site.kind in ("parameter", "optimizer") and site.phase == "optimizer" else 0


def find_first_stage(graph: StepGraph) -> int:
    """Return the earliest stage in which an event differs; NOWHERE if none does."""
    bad = (find_stage(event) for index, event in enumerate(graph.events) if graph.is_bad(index))
    return min(bad, default=NOWHERE)


class OriginFinder:
    """Classifies the events of one rank, step by step; remembers the states and origins of earlier steps."""

    def __init__(self, words: Words | None = None) -> None:
        self._words = words or Words()
        self._states = States()
        self._bad_since: dict[str, int] = {}
        """By parameter or module, the last step in which its gradient or an input differed."""
        self._bad_step = -1
        self._has_origin = False
        """Whether an origin was found."""
        self._trained: set[str] = set()
        """Parameters that had a gradient in some step."""
        self._graph = StepGraph(())
        self._explainer = self._last_explainer = Explainer(self._graph, StepEvidence())
        self._hidden: _Hidden | None = None
        self._hidden_cause: NamedCause | None = None
        """What explains the event that is traced: it is the first beyond the tolerance, and an earlier one is close."""
        self._explained: set[tuple[Reason, str]] = set()
        """Reasons and names of the origins so far that are explained."""

    def is_given(self, graph: StepGraph, index: int) -> bool:
        """Return whether a tensor was not computed in the run, so that there is no rounding to allow for."""
        event = graph.events[index]
        site = event.site
        if site.kind == "rng" or is_setting(event):
            return True
        if site.kind in ("parameter", "buffer"):
            return site.phase != "optimizer" and self._is_untouched(event, self._states.find(find_name(event)))
        return site.kind == "input" and index < graph.first_output and graph.find_enclosing(index) is None

    def _is_untouched(self, event: Event, last: LastState | None) -> bool:
        """Return whether nothing changed a state since it was last observed."""
        if last is None:
            return True
        is_trained = event.site.fqn in self._trained and last.phase != "optimizer"
        return event.site.kind == "parameter" and last.standing == "equal" and not is_trained

    def classify(
        self, graph: StepGraph, *, elsewhere: int = NOWHERE, evidence: StepEvidence | None = None
    ) -> dict[int, Cause]:
        """Return the cause of each event that differs, by index.

        `elsewhere` is the earliest stage in which another rank differs: what comes later here may come from there.
        """
        self._graph, found = graph, {}
        evidence = evidence or StepEvidence()
        self._last_explainer, self._explainer = self._explainer, Explainer(graph, evidence)
        self._states.set_tied(evidence.ours.tied)
        for index, event in enumerate(graph.events):
            if graph.is_bad(index):
                is_elsewhere = elsewhere < find_stage(event)
                found[index] = _PROPAGATED if is_elsewhere else self._reveal(self._trace(index, event))
            self._note(index, event)
        self._states.end_step()
        self._trained |= graph.param_grads.keys()
        return _note_shared_cause(found)

    def _note(self, index: int, event: Event) -> None:
        site, standing = event.site, self._graph.standings[index]
        if site.kind in STATE:
            self._states.note(event, standing)
        if standing == "close" and self._hidden is None:
            self._hidden = _Hidden(event, self._explain_close(index, event))
        elif standing == "differs" and site.kind not in STATE:
            self._bad_step = site.step
            if site.kind in ("param_grad", "input"):
                self._bad_since[site.fqn] = site.step

    def _trace(self, index: int, event: Event) -> Cause:
        kind, phase = event.site.kind, event.site.phase
        if kind == "output":
            return self._trace_output(index, event)
        if kind == "input":
            return self._trace_input(index, event)
        if kind == "op" and phase != "backward":
            return self._trace_op(index, event)
        if kind == "grad":
            return self._trace_grad(index, event)
        if kind == "param_grad":
            return self._trace_param_grad(index, event)
        if kind in STATE:
            return self._trace_state(index, event)
        return self._trace_rest(index, event, f"{kind} {{bad}} though nothing before it does")

    def _make(
        self, event: Event, why: str, *, inputs: Iterable[int] = (), module: str | None = None, reason: Reason = ""
    ) -> Cause:
        """Return an origin, unless the event is drift; `{bad}` and `{good}` in `why` are replaced by `Words`."""
        indices = tuple(inputs)
        parameters = self._states.find_below(module) if module is not None else ()
        standings = {self._graph.standings[index] for index in indices} | {standing for _, standing in parameters}
        if "close" in standings and self._has_origin:
            # After the runs have diverged, a close input is drift from the first origin, so this is no second one.
            return _PROPAGATED
        if "close" in standings and self._hidden:
            self._hidden_cause = self._hidden.explanation
        self._has_origin = True
        good = f"{self._words.good} within tolerance" if "close" in standings else self._words.good
        site = event.site
        return Cause(
            is_origin=True,
            fqn=site.fqn if module is None else module,
            step=site.step,
            phase=site.phase,
            kind=site.kind,
            why=why.format(bad=self._words.bad, good=good),
            reason=reason,
            source=event.source,
            inputs=indices,
            parameters=parameters,
        )

    def _explain_close(self, index: int, event: Event) -> NamedCause | None:
        """Explain the first event that is close but not equal, if a call computed it."""
        if event.site.kind == "output":
            return self._explainer.explain_module(event.site.fqn)
        around = self._graph.find_enclosing(index) if event.site.kind == "input" else None
        return self._explainer.explain_module(around.fqn) if around else None

    def _reveal(self, found: Cause) -> Cause:
        """Return the first origin as that of the first difference, which settings explain though it is small."""
        hidden, explanation, self._hidden_cause = self._hidden, self._hidden_cause, None
        if hidden is None or explanation is None or not found.is_origin:
            return found
        site = hidden.event.site
        self._explained.add((explanation.reason, explanation.fqn))
        return replace(
            found,
            fqn=explanation.fqn,
            step=site.step,
            phase=site.phase,
            why=f"{explanation.why}; what it computes is {self._words.good} only within tolerance",
            reason=explanation.reason,
            seen=f"first beyond the tolerance in step {found.step}, {found.fqn or 'the model'}: {found.why}",
            source=hidden.event.source,
        )

    def _explain(self, found: Cause, explanation: NamedCause | None) -> Cause:
        """Return an origin with its explanation; if that explains an earlier origin, this one follows from it."""
        if explanation is None or not found.is_origin or self._hidden_cause:
            return found
        key = (explanation.reason, explanation.fqn)
        if key in self._explained:
            return _PROPAGATED
        self._explained.add(key)
        if explanation.fqn == found.fqn:
            return replace(found, why=f"{found.why}: {explanation.why}", reason=explanation.reason)
        seen = f"first seen in {found.fqn or 'the model'}: {found.why}"
        return replace(found, fqn=explanation.fqn, why=explanation.why, reason=explanation.reason, seen=seen)

    def _is_bad_before(self, index: int) -> bool:
        return any(True for _ in self._graph.iter_bad(0, index))

    def _is_bad_inside(self, call: ModuleCall, index: int, *, but: tuple[str, int]) -> bool:
        """Return whether an event inside a call differs before `index`; events of the call `but` are left out."""
        start = call.inputs[-1] + 1 if call.inputs else 0
        events = self._graph.events
        for bad in self._graph.iter_bad(start, index):
            site = events[bad].site
            is_inside = is_below(site.fqn, call.fqn) or events[bad].parent == call.fqn
            if is_inside and site.kind in ("input", "output", "op") and (site.fqn, site.call) != but:
                return True
        return False

    def _trace_output(self, index: int, event: Event) -> Cause:
        site, graph = event.site, self._graph
        call = graph.calls.get((site.fqn, site.call))
        if call is None or not call.inputs:
            why = "output {bad} though nothing before it does (its inputs were not recorded)"
            return self._trace_rest(index, event, why)
        is_propagated = (
            any(map(graph.is_bad, call.inputs))
            or self._is_bad_inside(call, index, but=(site.fqn, site.call))
            or self._states.has_bad(site.fqn)
        )
        if is_propagated:
            return _PROPAGATED
        why = "output {bad} though inputs and parameters are {good}"
        if not self._states.find_below(site.fqn):
            why = "output {bad} though inputs are {good} (no parameters of it were recorded)"
        if is_changed_input(event):
            why = f"what it makes of its {site.path[1:]} in place {{bad}} though its inputs were {{good}}"
            return replace(self._make(event, why, inputs=call.inputs, module=site.fqn), reason="in-place change")
        found = self._make(event, why, inputs=call.inputs, module=site.fqn)
        return self._explain_call(found, call, index)

    def _explain_call(self, found: Cause, call: ModuleCall, index: int) -> Cause:
        """Explain an origin inside a call; only of origins, because a search takes time."""
        if not found.is_origin:
            return found
        explainer = self._explainer
        return self._explain(found, explainer.explain_in_place(call, index) or explainer.explain_module(call.fqn))

    def _trace_input(self, index: int, event: Event) -> Cause:
        site, graph = event.site, self._graph
        around = graph.find_enclosing(index)
        if around is None:
            is_made = any(graph.events[bad].site.kind == "output" for bad in graph.iter_bad(0, index))
            return _PROPAGATED if is_made else self._make(event, "input {bad} by itself", reason="data")
        is_propagated = (
            any(map(graph.is_bad, around.inputs))
            or self._is_bad_inside(around, index, but=(site.fqn, site.call))
            or any(graph.find_owner(name) == around.fqn for name in self._states.iter_bad())
        )
        if is_propagated:
            return _PROPAGATED
        why = f"what it passes to {site.fqn} {{bad}} though its inputs and everything before are {{good}}"
        return self._explain_call(self._make(event, why, inputs=around.inputs, module=around.fqn), around, index)

    def _trace_op(self, index: int, event: Event) -> Cause:
        graph = self._graph
        call = graph.find_enclosing(index)
        why = f"{event.module or 'operation'} {{bad}} though inputs, parameters and operations before it are {{good}}"
        if call is None:
            return self._trace_rest(index, event, why)
        is_propagated = any(map(graph.is_bad, call.inputs)) or self._states.has_bad(call.fqn)
        if is_propagated or self._is_bad_inside(call, index, but=("", -1)):
            return _PROPAGATED
        return self._explain_call(self._make(event, why, inputs=call.inputs, module=call.fqn), call, index)

    def _trace_rest(self, index: int, event: Event, why: str) -> Cause:
        """Classify an event whose inputs are not known: it is an origin if nothing before it differs."""
        is_propagated = self._is_bad_before(index) or self._states.has_bad()
        return _PROPAGATED if is_propagated else self._make(event, why)

    def _trace_grad(self, index: int, event: Event) -> Cause:
        """Classify the gradient of an output: the backward pass of the call that consumes this output computed it."""
        graph = self._graph
        causes = (bad for bad in graph.iter_bad(0, index) if graph.events[bad].site.kind not in ("param_grad", "rng"))
        if any(True for _ in causes) or self._states.has_bad():
            return _PROPAGATED
        consumer, maybe = self._find_consumer(index)
        if consumer is None:
            why = "gradient that comes from outside {bad} though the forward pass is {good}"
            return self._make(event, why, module=self._find_outermost(index), reason="loss")
        why = f"gradient that it gives to {event.site.fqn} {{bad}} though that of its outputs is {{good}}"
        grads = graph.grads.get((consumer.fqn, consumer.number), [])
        found = self._make(event, why, inputs=(*grads, *consumer.inputs), module=consumer.fqn)
        names = dict.fromkeys(call.fqn for call in maybe if call.fqn != consumer.fqn)
        found = replace(_assign_to_call(found, graph.events, consumer), maybe=tuple(names))
        return self._explain(found, self._explainer.explain_module(consumer.fqn))

    def _find_consumer(self, index: int) -> tuple[ModuleCall | None, Sequence[ModuleCall]]:
        """Return the call whose backward pass computed a gradient, and other candidates."""
        graph, out = self._graph, self._graph.find_output(index)
        if out is None:
            return None, ()
        out, consumers = self._follow(out)
        around = graph.find_enclosing(out)
        # A call that returns the output unchanged shares its gradient, so go outwards. But if another call inside it
        # consumes the output, the gradient passes through that one first.
        while around and (same := self._find_same(around, out)) is not None:
            if any(around.contains(call.inputs[0]) for call in consumers):
                break
            grads = graph.grads.get((around.fqn, around.number), ())
            if grads and not any(map(graph.is_bad, grads)):
                # The gradient was right when it entered this module, and wrong when it reached the module inside.
                return around, ()
            out, around = same, graph.find_enclosing(same)
        later = graph.find_later(out, around)[:1] if around and not consumers else []
        blamed = [call for call in (consumers or later) if self._has_bad_grads(call)]
        if blamed:
            return blamed[0], blamed[1:]
        return (consumers[0], consumers[1:]) if consumers else (around, later)

    def _follow(self, out: int) -> tuple[int, list[ModuleCall]]:
        """Return an output and its consumers, past calls that return it unchanged and so share its gradient."""
        graph = self._graph
        while True:
            consumers = graph.find_consumers(out)
            bad = (call for call in consumers if any(map(graph.is_bad, graph.grads.get((call.fqn, call.number), ()))))
            # Only a result that comes later counts, so the loop ends.
            unchanged = next((same for call in bad if (same := self._find_same(call, out)) is not None), None)
            if unchanged is None or unchanged <= out:
                return out, consumers
            out = unchanged

    def _find_outermost(self, index: int) -> str:
        """Return the outermost module that returns this output unchanged as its own."""
        graph, out = self._graph, self._graph.find_output(index)
        fqn = graph.events[index].site.fqn
        around = graph.find_enclosing(out) if out is not None else None
        while out is not None and around and (out := self._find_same(around, out)) is not None:
            fqn, around = around.fqn, graph.find_enclosing(out)
        return fqn

    def _find_same(self, call: ModuleCall, out: int) -> int | None:
        """Return the output of a call that has the same bytes as `out`; then both have the same gradient."""
        events, wanted = self._graph.events, self._graph.events[out]
        same = (
            each for each in call.outputs if events[each].has_bytes_of(wanted) and events[each].shape == wanted.shape
        )
        return next(same, None)

    def _has_bad_grads(self, call: ModuleCall) -> bool:
        graph = self._graph
        for name, indices in graph.param_grads.items():
            if call.fqn in self._find_owners(name) and any(map(graph.is_bad, indices)):
                return True
        return False

    def _trace_param_grad(self, index: int, event: Event) -> Cause:
        graph, name = self._graph, event.site.fqn
        earlier = [other for other in graph.param_grads[name] if other < index]
        if any(map(graph.is_bad, earlier)):
            return _PROPAGATED
        if event.site.path == "#0" and self._has_origin:
            return _PROPAGATED
        if not event.site.path and any(is_sum(graph.events[other]) for other in earlier):
            return self._trace_final_grad(event, earlier)
        owners = self._find_owners(name)
        calls = [call for owner in owners for call in graph.find_calls(owner)]
        grads = [grad for call in calls for grad in graph.grads.get((call.fqn, call.number), ())]
        inputs = [each for call in calls for each in call.inputs]
        if not grads:
            why = f"gradient of {name} {{bad}} though nothing before it does (no gradient of outputs was recorded)"
            found = self._trace_grads_only(index, event, why)
        elif any(map(graph.is_bad, (*grads, *inputs))) or any(map(self._states.has_bad, owners)):
            return _PROPAGATED
        else:
            why = f"gradient of {name} {{bad}} though inputs, parameters and the gradient of its outputs are {{good}}"
            found = self._make(event, why, inputs=(*grads, *inputs), module=owners[0])
            found = _assign_to_call(found, graph.events, calls[0]) if found.is_origin else found
        explainer = self._explainer
        return self._explain(found, explainer.explain_kept(name) or explainer.explain_tie(name))

    def _find_owners(self, name: str) -> list[str]:
        """Return the called modules that contain a parameter; of a tied one, under each name if possible directly."""
        names = self._states.find_names(name)
        direct = [parent for each in names if self._graph.find_calls(parent := each.rpartition(".")[0])]
        found = direct or [owner for each in names if (owner := self._graph.find_owner(each)) is not None]
        return list(dict.fromkeys(found))

    def _trace_final_grad(self, event: Event, earlier: Sequence[int]) -> Cause:
        """Classify a gradient as the optimizer uses it, which is equal after the backward passes."""
        graph, name = self._graph, event.site.fqn
        sums = (each for indices in graph.param_grads.values() for each in indices if is_sum(graph.events[each]))
        if any(map(graph.is_bad, sums)):
            # Clipping by norm couples all gradients.
            return _PROPAGATED
        why = f"gradient of {name} {{bad}} though it is {{good}} after the backward pass"
        found = self._make(event, why, inputs=[each for each in earlier if is_sum(graph.events[each])])
        explainer = self._explainer
        return self._explain(found, explainer.explain_any_training() or explainer.explain_change(name))

    def _trace_grads_only(self, index: int, event: Event, why: str) -> Cause:
        found = self._trace_rest(index, event, why)
        owner = self._graph.find_owner(event.site.fqn)
        calls = self._graph.find_calls(owner) if owner is not None else ()
        return _assign_to_call(found, self._graph.events, calls[0]) if found.is_origin and calls else found

    def _trace_state(self, index: int, event: Event) -> Cause:
        site = event.site
        name = find_name(event)
        last = self._states.find(name)
        if last and last.standing == "differs":
            return _PROPAGATED
        if is_setting(event):
            found = replace(self._make(event, f"{name} {{bad}} by itself"), phase="optimizer")
            return self._explain(found, self._explainer.explain_optimizer(find_optimizer(event)))
        if site.kind == "rng":
            is_later = last is not None and self._bad_step >= last.step
            return _PROPAGATED if is_later else self._make(event, "random state {bad} by itself")
        if site.kind == "buffer":
            owner = self._graph.find_owner(site.fqn) or ""
            is_made = last is not None and self._bad_since.get(owner, -1) >= last.step
            return _PROPAGATED if is_made else self._trace_buffer(event, owner, last)
        if site.kind == "parameter" and site.phase != "optimizer":
            return self._trace_parameter(event, last)
        return self._trace_update(index, event)

    def _trace_buffer(self, event: Event, owner: str, last: LastState | None) -> Cause:
        """Classify a buffer; if the settings of its module explain it, the module computed it in the last step."""
        found = self._make(event, "buffer {bad} by itself")
        if last is None or not found.is_origin:
            return found
        explainer = self._last_explainer
        explanation = explainer.explain_module(owner) or explainer.explain_calls(owner)
        if explanation is None:
            return found
        if explanation.reason == "calls" and any(reason == "accumulation" for reason, _ in self._explained):
            return _PROPAGATED
        return self._explain(replace(found, step=last.step), explanation)

    def _trace_parameter(self, event: Event, last: LastState | None) -> Cause:
        """Classify a parameter as observed before the forward pass."""
        name = event.site.fqn
        if last is None or self._is_untouched(event, last) or last.phase == "optimizer":
            found = self._make(event, "parameter {bad} by itself")
            # An update that only one run has shows nothing about the other.
            is_update_known = last is not None and last.phase == "optimizer" and last.standing != "missing"
            explanation = None if is_update_known else self._last_explainer.explain_training(name)
            if last is None or explanation is None:
                return found
            return self._explain(replace(found, step=last.step, phase="optimizer"), explanation)
        bad_step = self._bad_since.get(name, -1) if self._graph.param_grads.get(name) else self._bad_step
        if bad_step >= last.step:
            return _PROPAGATED
        why = "parameter {bad} after the step though its gradient and its value before are {good}"
        found = replace(self._make(event, why), step=last.step, phase="optimizer", kind="optimizer")
        return self._explain(found, self._last_explainer.explain_update(name))

    def _trace_update(self, index: int, event: Event) -> Cause:
        """Classify a parameter, or a state of the optimizer, as observed after the optimizer's step."""
        graph, site = self._graph, event.site
        name = self._states.find_parameter(event) if site.kind == "optimizer" else site.fqn
        grads = graph.param_grads.get(name, [])
        before, states = self._states.find_before(name), self._states.find_of_parameter(name)
        standings = {last.standing for last in (*states, *([before] if before else []))}
        if any(map(graph.is_bad, grads)) or "differs" in standings:
            return _PROPAGATED
        if self._is_bad_earlier(index, is_known=bool(grads)):
            return _PROPAGATED
        known = ["its gradient"] if grads else []
        known += ["its value before"] if before else []
        known += ["the optimizer's last recorded state"] if states else []
        lack = "" if states else "; the optimizer's state before the step was not recorded in both runs"
        what = "parameter" if site.kind == "parameter" else f"the optimizer's {site.fqn}{site.path}"
        why = f"{what} {{bad}} after the step though {_join(known)} {{good}}{lack}"
        found = replace(self._make(event, why, inputs=grads), phase="optimizer", kind="optimizer")
        return self._explain(found, self._explainer.explain_update(name))

    def _is_bad_earlier(self, index: int, *, is_known: bool) -> bool:
        """Return whether a setting of the optimizer differs; or, if no gradient is known, anything before the step."""
        events = self._graph.events
        bad = (events[each] for each in self._graph.iter_bad(0, index))
        return any(is_setting(event) or (not is_known and event.site.phase != "optimizer") for event in bad)


def _note_shared_cause(found: dict[int, Cause]) -> dict[int, Cause]:
    """Add to the first gradient origin that other parameters have one too: many faults at once are unlikely."""
    grads = [index for index, each in found.items() if each.is_origin and each.kind == "param_grad"]
    if len({found[index].fqn for index in grads}) < 2:  # in a single module, that module is the cause
        return found
    first, more = found[grads[0]], len(grads) - 1
    others = f"{more} other parameter{'s' if more > 1 else ''}"
    why = f"{first.why}; the same holds for {others}: something may have changed all gradients after the backward pass"
    return found | {grads[0]: replace(first, why=why)}


def _join(parts: Sequence[str]) -> str:
    if not parts:
        return "everything before it is"
    return f"{parts[0]} is" if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]} are"


def _assign_to_call(found: Cause, events: Sequence[Event], call: ModuleCall) -> Cause:
    """Return an origin with the module and the source line of the call whose backward pass it belongs to."""
    first = events[(*call.inputs, *call.outputs)[0]]
    return replace(found, fqn=call.fqn, phase="backward", source=first.source)
