"""Which of the events that differ are where it began: rules for what each kind of event comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from holdfast.capture.compare.states import STATE, LastState, States, find_name, is_setting
from holdfast.capture.compare.step_graph import ModuleCall, Standing, StepGraph, is_below
from holdfast.capture.stored.events import Event, EventKind, Phase


@dataclass(frozen=True, slots=True)
class Words:
    """How it is said that one thing is wrong and another right."""

    bad: str = "differs"
    good: str = "equal"


@dataclass(frozen=True, slots=True)
class Cause:
    """What one event that differs comes from: something before it, or nothing, and then who made it differ."""

    is_origin: bool
    fqn: str = ""
    """The module, parameter or state to look at."""
    step: int = 0
    phase: Phase = "forward"
    kind: EventKind = "output"
    why: str = ""
    source: str = ""
    inputs: tuple[int, ...] = ()
    """Places of what it was made from, none of which differs."""
    parameters: tuple[tuple[str, Standing], ...] = ()
    """What it was made with, and how that is to the other run's."""
    maybe: tuple[str, ...] = ()
    """Modules that it may be as well, as far as the recording tells."""


_PASSED_ON: Final = Cause(is_origin=False)
NOWHERE: Final = 99


def find_stage(event: Event) -> int:
    """Return where in a step an event lies among what ranks do together; 0 for what each does by itself.

    What ranks reduce together differs on all of them if one of them differs before.
    """
    site = event.site
    if site.kind == "param_grad":
        return 2 if site.phase == "optimizer" else 1
    return 3 if site.kind in ("parameter", "optimizer") and site.phase == "optimizer" else 0


class Trail:
    """What one rank has gone through so far: judges one step after the other."""

    def __init__(self, words: Words | None = None) -> None:
        """Know of nothing."""
        self._words = words or Words()
        self._states = States()
        self._bad_since: dict[str, int] = {}
        """By parameter or module, the last step in which its gradient or its inputs differed."""
        self._bad_step = -1
        self._is_tainted = False
        """Whether an origin was found."""
        self._trained: set[str] = set()
        """Parameters that have had gradients."""
        self._scene = StepGraph(())

    def is_given(self, scene: StepGraph, place: int) -> bool:
        """Tell whether nothing recorded has computed a tensor, so that there is no rounding to allow for."""
        event = scene.events[place]
        site = event.site
        if site.kind == "rng" or is_setting(event):
            return True
        if site.kind in ("parameter", "buffer"):
            return site.phase != "optimizer" and self._is_untouched(event, self._states.find(find_name(event)))
        return site.kind == "input" and place < scene.first_output and scene.find_enclosing(place) is None

    def _is_untouched(self, event: Event, seen: LastState | None) -> bool:
        """Tell whether nothing has changed a state since it was last seen."""
        if seen is None:
            return True
        is_trained = event.site.fqn in self._trained and seen.phase != "optimizer"
        return event.site.kind == "parameter" and seen.standing == "equal" and not is_trained

    def judge(self, scene: StepGraph, *, elsewhere: int = NOWHERE) -> dict[int, Cause]:
        """Return by place what the events that differ come from; `elsewhere`: how early other ranks differ."""
        self._scene, found = scene, {}
        for place, event in enumerate(scene.events):
            if scene.is_bad(place):
                found[place] = _PASSED_ON if elsewhere < find_stage(event) else self._trace(place, event)
            self._note(place, event)
        self._states.end_step()
        self._trained |= scene.param_grads.keys()
        return _say_shared(found)

    def _note(self, place: int, event: Event) -> None:
        site, standing = event.site, self._scene.standings[place]
        if site.kind in STATE:
            self._states.note(event, standing)
        elif standing == "differs":
            self._bad_step = site.step
            if site.kind in ("param_grad", "input"):
                self._bad_since[site.fqn] = site.step

    def _trace(self, place: int, event: Event) -> Cause:
        kind, phase = event.site.kind, event.site.phase
        if kind == "output":
            return self._trace_output(place, event)
        if kind == "input":
            return self._trace_input(place, event)
        if kind == "op" and phase != "backward":
            return self._trace_op(place, event)
        if kind == "grad":
            return self._trace_grad(place, event)
        if kind == "param_grad":
            return self._trace_param_grad(place, event)
        if kind in STATE:
            return self._trace_state(place, event)
        return self._trace_rest(place, event, f"{kind} {{bad}} though nothing before it does")

    def _make(self, event: Event, why: str, *, inputs: Iterable[int] = (), module: str | None = None) -> Cause:
        """Return an origin, unless it is but drift; `{bad}` and `{good}` stand for how that is said."""
        places = tuple(inputs)
        parameters = self._states.find_below(module) if module is not None else ()
        standings = {self._scene.standings[place] for place in places} | {standing for _, standing in parameters}
        if "close" in standings and self._is_tainted:
            # Once runs have parted, what is close is on its way to be apart: that is no second beginning.
            return _PASSED_ON
        self._is_tainted = True
        good = f"{self._words.good} within tolerance" if "close" in standings else self._words.good
        site = event.site
        return Cause(
            is_origin=True,
            fqn=site.fqn if module is None else module,
            step=site.step,
            phase=site.phase,
            kind=site.kind,
            why=why.format(bad=self._words.bad, good=good),
            source=event.source,
            inputs=places,
            parameters=parameters,
        )

    def _is_bad_before(self, place: int) -> bool:
        return any(True for _ in self._scene.iter_bad(0, place))

    def _is_bad_inside(self, call: ModuleCall, place: int, *, but: tuple[str, int]) -> bool:
        """Tell whether something differs that lies in a call, before an event and apart from that event's own call."""
        start = call.inputs[-1] + 1 if call.inputs else 0
        events = self._scene.events
        for bad in self._scene.iter_bad(start, place):
            site = events[bad].site
            is_inside = is_below(site.fqn, call.fqn) or events[bad].parent == call.fqn
            if is_inside and site.kind in ("input", "output", "op") and (site.fqn, site.call) != but:
                return True
        return False

    def _trace_output(self, place: int, event: Event) -> Cause:
        site, scene = event.site, self._scene
        call = scene.calls.get((site.fqn, site.call))
        if call is None or not call.inputs:
            why = "output {bad} though nothing before it does (its inputs were not recorded)"
            return self._trace_rest(place, event, why)
        is_passed_on = (
            any(map(scene.is_bad, call.inputs))
            or self._is_bad_inside(call, place, but=(site.fqn, site.call))
            or self._states.has_bad(site.fqn)
        )
        if is_passed_on:
            return _PASSED_ON
        is_known = bool(self._states.find_below(site.fqn))
        why = "output {bad} though inputs and parameters are {good}"
        if not is_known:
            why = "output {bad} though inputs are {good} (no parameters of it were recorded)"
        return self._make(event, why, inputs=call.inputs, module=site.fqn)

    def _trace_input(self, place: int, event: Event) -> Cause:
        site, scene = event.site, self._scene
        around = scene.find_enclosing(place)
        if around is None:
            is_made = any(scene.events[bad].site.kind == "output" for bad in scene.iter_bad(0, place))
            return _PASSED_ON if is_made else self._make(event, "input {bad} by itself")
        is_passed_on = (
            any(map(scene.is_bad, around.inputs))
            or self._is_bad_inside(around, place, but=(site.fqn, site.call))
            or any(scene.find_owner(name) == around.fqn for name in self._states.iter_bad())
        )
        if is_passed_on:
            return _PASSED_ON
        why = f"what it passes to {site.fqn} {{bad}} though its inputs and all before are {{good}}"
        return self._make(event, why, inputs=around.inputs, module=around.fqn)

    def _trace_op(self, place: int, event: Event) -> Cause:
        scene = self._scene
        call = scene.find_enclosing(place)
        why = f"{event.module or 'operation'} {{bad}} though inputs, parameters and operations before it are {{good}}"
        if call is None:
            return self._trace_rest(place, event, why)
        is_passed_on = any(map(scene.is_bad, call.inputs)) or self._states.has_bad(call.fqn)
        if is_passed_on or self._is_bad_inside(call, place, but=("", -1)):
            return _PASSED_ON
        return self._make(event, why, inputs=call.inputs, module=call.fqn)

    def _trace_rest(self, place: int, event: Event, why: str) -> Cause:
        """Judge what it is not known of what it was made from: by what comes before it."""
        is_passed_on = self._is_bad_before(place) or self._states.has_bad()
        return _PASSED_ON if is_passed_on else self._make(event, why)

    def _trace_grad(self, place: int, event: Event) -> Cause:
        """Judge the gradient of an output: the backward pass of whoever takes that output has made it."""
        scene = self._scene
        made_from = (
            bad for bad in scene.iter_bad(0, place) if scene.events[bad].site.kind not in ("param_grad", "rng")
        )
        if any(True for _ in made_from) or self._states.has_bad():
            return _PASSED_ON
        taker, maybe = self._find_taker(place)
        if taker is None:
            why = "gradient that comes from outside {bad} though the forward pass is {good}"
            return self._make(event, why, module=self._find_outermost(place))
        why = f"gradient that it gives to {event.site.fqn} {{bad}} though that of its outputs is {{good}}"
        grads = scene.grads.get((taker.fqn, taker.number), [])
        found = self._make(event, why, inputs=(*grads, *taker.inputs), module=taker.fqn)
        names = dict.fromkeys(call.fqn for call in maybe if call.fqn != taker.fqn)
        return replace(_place_at(found, scene.events, taker), maybe=tuple(names))

    def _find_taker(self, place: int) -> tuple[ModuleCall | None, Sequence[ModuleCall]]:
        """Return the call whose backward pass has made a gradient, and those whose it may be as well."""
        scene, out = self._scene, self._scene.find_output(place)
        if out is None:
            return None, ()
        out, takers = self._follow(out)
        around = scene.find_enclosing(out)
        # What is taken inside goes on to there first, even if it comes out unchanged in the end.
        while around and (same := self._find_same(around, out)) is not None:
            if any(around.holds(call.inputs[0]) for call in takers):
                break
            grads = scene.grads.get((around.fqn, around.number), ())
            if grads and not any(map(scene.is_bad, grads)):
                # It came in right and has reached the module inside wrong.
                return around, ()
            out, around = same, scene.find_enclosing(same)
        later = scene.find_later(out, around)[:1] if around and not takers else []
        blamed = [call for call in (takers or later) if self._has_bad_grads(call)]
        if blamed:
            return blamed[0], blamed[1:]
        return (takers[0], takers[1:]) if takers else (around, later)

    def _follow(self, out: int) -> tuple[int, list[ModuleCall]]:
        """Return where an output goes, past calls that give it back as it is and so share its gradient."""
        scene = self._scene
        while True:
            takers = scene.find_takers(out)
            bad = (call for call in takers if any(map(scene.is_bad, scene.grads.get((call.fqn, call.number), ()))))
            # Of the call's results only one that comes later, so this ends.
            passed_on = next((same for call in bad if (same := self._find_same(call, out)) is not None), None)
            if passed_on is None or passed_on <= out:
                return out, takers
            out = passed_on

    def _find_outermost(self, place: int) -> str:
        """Return the outermost module that gives an output of a module inside of it as its own."""
        scene, out = self._scene, self._scene.find_output(place)
        fqn = scene.events[place].site.fqn
        around = scene.find_enclosing(out) if out is not None else None
        while out is not None and around and (out := self._find_same(around, out)) is not None:
            fqn, around = around.fqn, scene.find_enclosing(out)
        return fqn

    def _find_same(self, call: ModuleCall, out: int) -> int | None:
        """Return the result of a call that is an output of another as it is; then both have one gradient."""
        events, given = self._scene.events, self._scene.events[out]
        same = (
            each for each in call.outputs if (events[each].digest, events[each].shape) == (given.digest, given.shape)
        )
        return next(same, None)

    def _has_bad_grads(self, call: ModuleCall) -> bool:
        scene = self._scene
        for name, places in scene.param_grads.items():
            if scene.find_owner(name) == call.fqn and any(map(scene.is_bad, places)):
                return True
        return False

    def _trace_param_grad(self, place: int, event: Event) -> Cause:
        scene, name = self._scene, event.site.fqn
        earlier = [other for other in scene.param_grads[name] if other < place]
        if any(map(scene.is_bad, earlier)):
            return _PASSED_ON
        owner = scene.find_owner(name)
        calls = scene.find_calls(owner) if owner is not None else ()
        grads = [grad for call in calls for grad in scene.grads.get((call.fqn, call.number), ())]
        inputs = [each for call in calls for each in call.inputs]
        if not grads:
            why = f"gradient of {name} {{bad}} though nothing before it does (no gradient of outputs was recorded)"
            return self._trace_grads_only(place, event, why)
        if any(map(scene.is_bad, (*grads, *inputs))) or (owner is not None and self._states.has_bad(owner)):
            return _PASSED_ON
        assert owner is not None, "what has calls has a name"
        if earlier and event.site.phase == "optimizer":
            return self._make(event, f"gradient of {name} {{bad}} though it was {{good}} after the backward pass")
        why = f"gradient of {name} {{bad}} though inputs, parameters and the gradient of its outputs are {{good}}"
        found = self._make(event, why, inputs=(*grads, *inputs), module=owner)
        return _place_at(found, scene.events, calls[0])

    def _trace_grads_only(self, place: int, event: Event, why: str) -> Cause:
        found = self._trace_rest(place, event, why)
        owner = self._scene.find_owner(event.site.fqn)
        calls = self._scene.find_calls(owner) if owner is not None else ()
        return _place_at(found, self._scene.events, calls[0]) if found.is_origin and calls else found

    def _trace_state(self, place: int, event: Event) -> Cause:
        site = event.site
        name = find_name(event)
        seen = self._states.find(name)
        if seen and seen.standing == "differs":
            return _PASSED_ON
        if is_setting(event):
            return replace(self._make(event, f"{name} {{bad}} by itself"), phase="optimizer")
        if site.kind == "rng":
            is_later = seen is not None and self._bad_step >= seen.step
            return _PASSED_ON if is_later else self._make(event, "random state {bad} by itself")
        if site.kind == "buffer":
            owner = self._scene.find_owner(site.fqn) or ""
            is_made = seen is not None and self._bad_since.get(owner, -1) >= seen.step
            return _PASSED_ON if is_made else self._make(event, "buffer {bad} by itself")
        if site.kind == "parameter" and site.phase != "optimizer":
            return self._trace_parameter(event, seen)
        return self._trace_update(place, event)

    def _trace_parameter(self, event: Event, seen: LastState | None) -> Cause:
        """Judge a parameter as it is before the forward pass."""
        if seen is None or self._is_untouched(event, seen) or seen.phase == "optimizer":
            return self._make(event, "parameter {bad} by itself")
        name = event.site.fqn
        bad_step = self._bad_since.get(name, -1) if self._scene.param_grads.get(name) else self._bad_step
        if bad_step >= seen.step:
            return _PASSED_ON
        why = "parameter {bad} after the step though its gradient and what it was before are {good}"
        return replace(self._make(event, why), step=seen.step, phase="optimizer", kind="optimizer")

    def _trace_update(self, place: int, event: Event) -> Cause:
        """Judge a parameter, or a state of the optimizer, after the optimizer's step."""
        scene, site = self._scene, event.site
        name = self._states.find_parameter(event) if site.kind == "optimizer" else site.fqn
        grads = scene.param_grads.get(name, [])
        before, states = self._states.find_before(name), self._states.find_of_parameter(name)
        standings = {seen.standing for seen in (*states, *([before] if before else []))}
        if any(map(scene.is_bad, grads)) or "differs" in standings:
            return _PASSED_ON
        if self._is_bad_earlier(place, is_known=bool(grads)):
            return _PASSED_ON
        known = ["its gradient"] if grads else []
        known += ["what it was before"] if before else []
        known += ["the optimizer's state when it was last seen"] if states else []
        lack = "" if states else "; the optimizer's state before the step is not known of both runs"
        what = "parameter" if site.kind == "parameter" else f"the optimizer's {site.fqn}{site.path}"
        why = f"{what} {{bad}} after the step though {_join(known)} {{good}}{lack}"
        return replace(self._make(event, why, inputs=grads), phase="optimizer", kind="optimizer")

    def _is_bad_earlier(self, place: int, *, is_known: bool) -> bool:
        """Tell whether a setting of the optimizer differs; or anything before it, if no gradient is known."""
        events = self._scene.events
        bad = (events[each] for each in self._scene.iter_bad(0, place))
        return any(is_setting(event) or (not is_known and event.site.phase != "optimizer") for event in bad)


def _say_shared(found: dict[int, Cause]) -> dict[int, Cause]:
    """Say of the first gradient of a parameter that others are alike: one fault in many modules at once is rare."""
    grads = [place for place, each in found.items() if each.is_origin and each.kind == "param_grad"]
    if len({found[place].fqn for place in grads}) < 2:  # in one module it is that module's
        return found
    first, more = found[grads[0]], len(grads) - 1
    others = f"{more} other parameter{'s' if more > 1 else ''}"
    why = f"{first.why}; so it is with {others}: something may have changed all gradients after the backward pass"
    return found | {grads[0]: replace(first, why=why)}


def _join(parts: Sequence[str]) -> str:
    if not parts:
        return "all before it is"
    return f"{parts[0]} is" if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]} are"


def _place_at(found: Cause, events: Sequence[Event], call: ModuleCall) -> Cause:
    """Return an origin in the backward pass with the module and the line of the call that it belongs to."""
    first = events[(*call.inputs, *call.outputs)[0]]
    return replace(found, fqn=call.fqn, phase="backward", source=first.source)
