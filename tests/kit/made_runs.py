"""Events and runs that are created by hand, for tests that need no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from holdfast.capture.stored.events import Event, EventKind, Phase, Site
from holdfast.capture.stored.observed import observe
from holdfast.capture.stored.runs import Run, RunFacts
from holdfast.digest import hash_bytes
from tests.kit.runs_in_memory import make_run


def make_event(
    seq: int, fqn: str, kind: EventKind = "output", *, digest: bytes = b"", shape: tuple[int, ...] = (2,), **more: Any
) -> Event:
    """Make an event that has no tensor."""
    phase: Phase = more.pop("phase", "forward")
    site = Site(more.pop("step", 0), phase, kind, fqn, more.pop("call", 0), more.pop("path", ""))
    rank, dtype = more.pop("rank", 0), more.pop("dtype", "float32")
    return Event(seq, site, rank, dtype, shape, digest or fqn.encode(), **more)


def hash_elsewhere(event: Event) -> Event:
    """Return an event as it is recorded at level "digest" of a tensor that is hashed on its device."""
    return event._replace(digest=b"", blake3=hash_bytes(event.digest), leaf="", stats=None)


Observation = tuple[str, EventKind, torch.Tensor] | tuple[str, EventKind, torch.Tensor, Mapping[str, Any]]


def make_tensor_run(
    *ranks: Iterable[Observation], name: str = "run", environment: Mapping[str, Any] | None = None
) -> Run:
    """Make a run of tensors, in order, for each rank."""
    events, tensors = [], {}
    for rank, observations in enumerate(ranks):
        for seq, (fqn, kind, tensor, *more) in enumerate(observations):
            leaf = f"{rank}/{seq}"
            observed = observe(tensor)
            event = make_event(seq, fqn, kind, shape=observed.shape, rank=rank, leaf=leaf, **(more[0] if more else {}))
            events.append(event._replace(digest=observed.digest(), dtype=observed.dtype_name))
            tensors[leaf] = tensor
    facts = RunFacts(name, environment=environment or {}, world=len(ranks))
    return make_run(facts, events, tensors)


WEIGHT: Final = torch.arange(12.0).reshape(4, 3)


def shard(rank: int, tensor: torch.Tensor = WEIGHT) -> dict[str, Any]:
    """Return the placement of a rank that has two rows."""
    return {"placement": "Shard(dim=0)", "global_shape": tuple(tensor.shape), "offsets": (2 * rank, 0)}


def sharded_rank(rank: int, weight: torch.Tensor = WEIGHT) -> list[Observation]:
    """Return the observations of a rank that has two rows of a weight."""
    part = weight[2 * rank : 2 * rank + 2].clone()
    return [("lin.weight", "parameter", part, shard(rank))]
