"""Runs, sites and events as JSON and as names, in one form for `holdfast run` and `holdfast serve`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.capture.stored.events import Event, Site, Stats
from holdfast.json_text import Json
from holdfast.texts import format_utc

if TYPE_CHECKING:
    from holdfast.capture.stored.runs import RunFacts


def describe_run(facts: RunFacts) -> dict[str, Json]:
    """Return the facts of a run as JSON."""
    return {
        "name": facts.name,
        "status": facts.status,
        "world": facts.world,
        "started": format_utc(facts.started_s),
        "environment": dict(facts.environment),
        "notes": list(facts.notes),
    }


def describe_site(site: Site) -> dict[str, Json]:
    """Return a site as JSON."""
    return {
        "step": site.step,
        "phase": site.phase,
        "kind": site.kind,
        "fqn": site.fqn,
        "call": site.call,
        "path": site.path,
    }


def label_site(site: Site) -> str:
    """Return the name of a site in a table: its module, the argument or result, and the call if not the first."""
    return f"{site.fqn or '(the model)'}{site.path}" + (f" #{site.call}" if site.call else "")


def describe_event(event: Event) -> dict[str, Json]:
    """Return an event as JSON, with its statistics if they were recorded."""
    return {
        **describe_site(event.site),
        "rank": event.rank,
        "seq": event.seq,
        "dtype": event.dtype,
        "shape": list(event.shape),
        "digest": event.digest.hex(),
        "blake3": event.blake3.hex(),
        "level": name_level(event),
        "module": event.module,
        "source": event.source,
        "recompute": event.recompute,
        "placement": event.placement,
        "stats": _describe_stats(event.stats) if event.stats else None,
    }


def name_level(event: Event) -> str:
    """Return the level at which an event was recorded: full, stats or digest."""
    return "full" if event.leaf else "stats" if event.stats else "digest"


def _describe_stats(stats: Stats) -> dict[str, Json]:
    return {
        "minimum": _spell(stats.minimum),
        "maximum": _spell(stats.maximum),
        "mean": _spell(stats.mean),
        "norm": _spell(stats.norm),
        "zero": stats.zero,
        "nan": stats.nan,
        "inf": stats.inf,
    }


def _spell(value: float) -> float | str:
    """Return a number, or its text if it is not finite, which JSON cannot express."""
    return value if math.isfinite(value) else str(value)
