"""Runs and events as JSON: every field, and numbers that JSON cannot express."""

from __future__ import annotations

import json
import math

from holdfast.capture.stored.described import describe_event, describe_run, label_site, name_level
from holdfast.capture.stored.events import Event, Site, Stats
from holdfast.capture.stored.runs import RunFacts

SITE = Site(3, "forward", "output", "layers.1", 2, "[0]")
EVENT = Event(7, SITE, 1, "float32", (2, 3), b"\x01" * 16, module="Linear", source="model.py:7")


def test_a_run_has_its_start_as_text() -> None:
    found = describe_run(RunFacts("good", {"torch": "2"}, 2, "unfinished", 0.0, ("a note",)))

    assert found == {
        "name": "good",
        "status": "unfinished",
        "world": 2,
        "started": "1970-01-01T00:00:00Z",
        "environment": {"torch": "2"},
        "notes": ["a note"],
    }


def test_a_site_is_named_by_module_path_and_call() -> None:
    assert label_site(SITE) == "layers.1[0] #2"
    assert label_site(SITE._replace(fqn="", path="", call=0)) == "(the model)"


def test_the_level_is_what_was_kept() -> None:
    stats = Stats(0.0, 1.0, 0.5, 1.0, 0, 0, 1)

    assert name_level(EVENT) == "digest"
    assert name_level(EVENT._replace(stats=stats)) == "stats"
    assert name_level(EVENT._replace(stats=stats, leaf="00000000/1")) == "full"


def test_an_event_has_its_statistics_and_what_is_not_finite_is_text() -> None:
    stats = Stats(-1.0, math.inf, math.nan, 2.0, 4, 5, 6, (1, 2))

    found = describe_event(EVENT._replace(stats=stats))

    assert found["stats"] == {
        "minimum": -1.0,
        "maximum": "inf",
        "mean": "nan",
        "norm": 2.0,
        "zero": 6,
        "nan": 4,
        "inf": 5,
    }
    assert (found["step"], found["fqn"], found["rank"], found["shape"]) == (3, "layers.1", 1, [2, 3])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert describe_event(EVENT)["stats"] is None
