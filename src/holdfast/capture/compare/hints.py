"""Hints on what may explain a difference: reordered calls, calls of one run only, tensors that were swapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.capture.compare.align import Alignment, Pair
from holdfast.capture.compare.step_graph import is_below
from holdfast.capture.stored.events import Event

_MAX_NAMED: Final = 3


class PairHints:
    """Finds hints for a pair in the other events of its step and rank."""

    def __init__(self, alignment: Alignment, *, names: tuple[str, str]) -> None:
        """Search in `alignment`; `names` are the names of both runs, for the texts."""
        self._alignment = alignment
        self._a, self._b = names
        self._calls = [pair for pair in alignment.pairs if pair.a.site.kind == pair.b.site.kind == "input"]

    def find_reordered(self, pair: Pair) -> str:
        """Return a text on calls that come before this one in one run and after it in the other; "" if none do."""
        if pair.a.site.kind != "input":
            return ""
        fqn = pair.a.site.fqn
        beside = [each for each in self._calls if not _is_related(each.a.site.fqn, fqn)]
        late = [each.a.site.fqn for each in beside if each.a.seq > pair.a.seq and each.b.seq < pair.b.seq]
        early = [each.a.site.fqn for each in beside if each.a.seq < pair.a.seq and each.b.seq > pair.b.seq]
        if not late and not early:
            return ""
        parts = [f"after {_name(late)} in {self._b} and before in {self._a}"] if late else []
        parts += [f"before {_name(early)} in {self._b} and after in {self._a}"] if early else []
        return f"calls come in another order: it is called {', and '.join(parts)}"

    def iter_notes(self, pair: Pair) -> Iterator[str]:
        """Yield further hints on a pair."""
        if pair.how != "exact":
            yield f"paired by {pair.how} with {pair.b.site.fqn or 'the model'} in {self._b}"
        for events, run, seq in (
            (self._alignment.only_a, self._a, pair.a.seq),
            (self._alignment.only_b, self._b, pair.b.seq),
        ):
            before = [event.site.fqn for event in events if event.seq < seq and event.site.kind in ("input", "output")]
            if before:
                yield f"only {run} calls {_name(before)} before it"
            same = [event for event in events if event.site.kind == "param_grad" and event.site.fqn == pair.a.site.fqn]
            if same:
                yield f"only {run} has a gradient of {same[0].site.fqn}"
        yield from self._iter_moved(pair)

    def _iter_moved(self, pair: Pair) -> Iterator[str]:
        if 0 in pair.a.shape:
            return
        other = _find_elsewhere(pair.b, [each.a for each in self._alignment.pairs])
        if other:
            yield f"it has the bytes in {self._b} that {other} has in {self._a}"


def _find_elsewhere(event: Event, others: Sequence[Event]) -> str:
    """Return the name of another event of the same kind that has the bytes of an event; "" if none has."""
    same = (event.digest, event.dtype, event.shape, event.site.kind)
    names = [
        other.site.fqn
        for other in others
        if (other.digest, other.dtype, other.shape, other.site.kind) == same and other.site.fqn != event.site.fqn
    ]
    return names[0] if names else ""


def _is_related(fqn: str, other: str) -> bool:
    return fqn == other or is_below(fqn, other) or is_below(other, fqn)


def _name(names: Sequence[str]) -> str:
    """Return the outermost of the names, at most a few of them."""
    kept = [name for name in dict.fromkeys(names) if not any(is_below(name, other) for other in names)]
    return ", ".join(kept[:_MAX_NAMED]) + (" and more" if len(kept) > _MAX_NAMED else "")
