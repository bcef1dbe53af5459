"""Answers about one recorded run, whose events are read once and remembered by the state of all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from holdfast.json_text import Json
from holdfast.repo.handle.repository import Repository
from holdfast.serving.answer import HttpAnswer, answer_json
from holdfast.serving.listing import WatchedListing
from holdfast.serving.remembered import RememberedValues
from holdfast.serving.request import ApiRequest

if TYPE_CHECKING:
    from holdfast.serving.answers.runs import RunOutline

_MAX_REMEMBERED_EVENTS: Final = 100_000
"""Events of all runs that are kept in memory, about 1 KiB each; a run with more is kept alone, and only in part."""
_MAX_CHOSEN: Final = 400_000
"""Positions of events that filters have chosen."""
_MAX_FOUND: Final = 64
_MAX_STEP: Final = 10**18 - 1


class RunsApi:
    """Answers requests about one recorded run. Safe in any thread."""

    def __init__(self, repo: Repository, listing: WatchedListing, heavy: AbstractContextManager[Any]) -> None:
        """Answer about a repository; `heavy` limits what is computed at once."""
        self._repo = repo
        self._listing = listing
        self._heavy = heavy
        self._outlines: RememberedValues[tuple[str, str], RunOutline] = RememberedValues(
            _MAX_REMEMBERED_EVENTS, size_of=lambda outline: outline.size + 100
        )
        self._chosen: RememberedValues[tuple[str, str, str, int | None], Sequence[int]] = RememberedValues(
            _MAX_CHOSEN, size_of=lambda positions: len(positions) + 100
        )
        self._found: RememberedValues[tuple[str, str], dict[str, Json]] = RememberedValues(_MAX_FOUND)
        self.answers: Mapping[str, Callable[[ApiRequest], HttpAnswer]] = {
            "run": self._answer_run,
            "events": self._answer_events,
            "nonfinite": self._answer_nonfinite,
        }

    def _find_key(self, request: ApiRequest) -> tuple[str, str]:
        """Return what changes whenever a part of a run is stored, and the name of the run."""
        return self._listing.read().runs_mark, request.read_required("name")

    def _read(self, key: tuple[str, str]) -> RunOutline:
        from holdfast.serving.answers.runs import read_outline

        def read() -> RunOutline:
            with self._heavy:
                return read_outline(self._repo, key[1])

        return self._outlines.find_or_compute(key, read)

    def _answer_run(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.runs import describe_outline

        return answer_json(describe_outline(self._read(self._find_key(request))))

    def _answer_events(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.runs import MAX_EVENTS, choose_events, describe_events

        page = request.read_page(200, most=MAX_EVENTS)
        step = request.read_number("step", 0, most=_MAX_STEP) if request.read_text("step") else None
        text = request.read_text("filter").strip()
        key = self._find_key(request)
        outline = self._read(key)
        chosen = self._chosen.find_or_compute((*key, text, step), lambda: choose_events(outline, text, step))
        with self._heavy:
            return answer_json(describe_events(outline, chosen, step, *page))

    def _answer_nonfinite(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.runs import describe_nonfinite

        key = self._find_key(request)
        outline = self._read(key)

        def find() -> dict[str, Json]:
            with self._heavy:
                return describe_nonfinite(outline)

        return answer_json(self._found.find_or_compute(key, find))
