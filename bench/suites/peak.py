"""Measures how much memory saving and loading take besides the state: the high-water mark of a separate process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeVar

import holdfast
from bench.kit.measure import TINY, Goal, Result, Sizes
from bench.kit.peers import CONTENT_STORE, DCP, HOLDFAST, SNAPSHOT, Peer, find_peers
from bench.kit.resident import measure_rise
from bench.kit.states import Shape, State, count_state, make_empty, make_state, plan_large, verify_state
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES

_SPARE_BYTES: Final = 64 << 20
_TINY_BYTES: Final = 60
PER_ENTRY: Final[Mapping[str, float | None]] = {"save": 600.0, "load": 1020.0, "load in place": None}
"""Bytes that a tiny tensor should cost besides its own, by operation; a loaded one and its name take about 720.

None: it is measured, and there is no goal.
"""
_TIMEOUT_S: Final = 300
_SEED: Final = 31
Found = TypeVar("Found")


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure save, load, load in place and a background save; the other formats for comparison."""
    shape = plan_large(sizes)
    # DCP is measured with one thread count only, and the content store is left out.
    others = [peer.name for peer in find_peers() if peer not in (*DCP[1:], CONTENT_STORE)]
    found = _run_apart([HOLDFAST.name], shape, work) | _run_apart(others, shape, work)
    results = [_make_row(operation, shape, _pick(found, operation)) for operation in ALL]
    tiny = plan_tiny(sizes)
    found = {name: _run_each_apart(name, tiny, work) for name in [HOLDFAST.name, *others]}
    return results + [_make_entry_row(operation, tiny, _pick(found, operation)) for operation in PER_ENTRY]


def plan_tiny(sizes: Sizes) -> Shape:
    """Plan 100,000 tensors of 60 bytes, or fewer for a smaller run."""
    count = max(16, 100_000 * sizes.save_bytes // (1 << 30))
    return Shape(f"{count} x {_TINY_BYTES} B", (_TINY_BYTES,) * count)


def _pick(found: Mapping[str, Mapping[str, int]], operation: str) -> dict[str, int]:
    return {name: rises[operation] for name, rises in found.items()}


def _save(peer: Peer, folder: Path, state: State) -> int:
    return measure_rise(lambda: peer.save(folder, state))


def _load(peer: Peer, folder: Path, state: State) -> int:
    found: list[State] = []
    rise = measure_rise(lambda: found.append(peer.load(folder, state)))
    verify_state(found[0], state, who=peer.name)
    # The tensors that were asked for are not extra.
    return rise - count_state(state)


def _fill(peer: Peer, folder: Path, state: State) -> int:
    target = make_empty(state)
    for tensor in target.values():
        tensor.fill_(1)  # allocates its pages now, or they would count as extra
    rise = measure_rise(lambda: peer.fill(folder, target))
    verify_state(target, state, who=peer.name)
    return rise


def _save_async(peer: Peer, folder: Path, state: State) -> int:
    with holdfast.open(folder / "async") as store:
        return measure_rise(lambda: store.save_async(SNAPSHOT, dict(state), staging="budget").wait())


# In this order: what the first saves, the next two load.
FOR_PEERS: Final[Mapping[str, Callable[[Peer, Path, State], int]]] = {
    "save": _save,
    "load": _load,
    "load in place": _fill,
}
ALL: Final = {**FOR_PEERS, 'save_async(staging="budget")': _save_async}


def _make_entry_row(operation: str, shape: Shape, rises: Mapping[str, int]) -> Result:
    """Return the bytes per tensor besides its own; for a load, the tensors and names that it returns are included."""
    count = len(shape.sizes)
    others = ", ".join(f"{name} {size / count:.0f}" for name, size in rises.items() if name != HOLDFAST.name and size)
    return Result(
        f"peak extra memory per tensor of {operation}, {shape.name}",
        rises[HOLDFAST.name] / count,
        "B",
        "bytes per entry" if PER_ENTRY[operation] else "",
        PER_ENTRY[operation],
        Goal("ratio", "<=", 1.0) if PER_ENTRY[operation] else None,
        others,
    )


def _make_row(operation: str, shape: Shape, rises: Mapping[str, int]) -> Result:
    limit = DEFAULT_BUDGET_BYTES + _SPARE_BYTES
    others = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in rises.items() if name != HOLDFAST.name and size)
    return Result(
        f"peak extra memory of {operation}, {shape.name}",
        rises[HOLDFAST.name] / 1e6,
        "MB",
        "budget and 64 MiB",
        limit / 1e6,
        Goal("ratio", "<=", 1.0),
        others,
    )


def _run_apart(names: Sequence[str], shape: Shape, work: Path) -> dict[str, dict[str, int]]:
    """Measure in a new process: what this one has freed would be used again, and not be seen."""
    return _apply_apart(measure_here, names, shape, work)


def _run_each_apart(name: str, shape: Shape, work: Path) -> dict[str, int]:
    """Measure each operation in a separate process: a load would reuse memory that a save before it has freed."""
    with TemporaryDirectory(dir=work) as folder:
        return {each: _apply_apart(measure_alone, each, name, shape, Path(folder)) for each in FOR_PEERS}


def _apply_apart(act: Callable[..., Found], *arguments: object) -> Found:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply_async(act, arguments).get(_TIMEOUT_S)


def measure_alone(operation: str, name: str, shape: Shape, folder: Path) -> int:
    """Measure one operation in this process, after a small trial that imports all modules."""
    peer = next(peer for peer in [HOLDFAST, *find_peers()] if peer.name == name)
    small = make_state(plan_large(TINY), seed=_SEED)
    with TemporaryDirectory(dir=folder.parent) as other:
        peer.save(Path(other), small)
        if operation != "save":
            FOR_PEERS[operation](peer, Path(other), small)
    return FOR_PEERS[operation](peer, folder, make_state(shape, seed=_SEED))


def measure_here(names: Sequence[str], shape: Shape, work: Path) -> dict[str, dict[str, int]]:
    """Measure each operation in this process, after a small trial that imports all modules."""
    peers = [peer for peer in [HOLDFAST, *find_peers()] if peer.name in names]
    rises = {peer.name: dict.fromkeys(ALL, 0) for peer in peers}
    for tried in (plan_large(TINY), shape):
        state = make_state(tried, seed=_SEED)
        for peer in peers:
            with TemporaryDirectory(dir=work) as folder:
                for operation, act in (ALL if peer is HOLDFAST else FOR_PEERS).items():
                    rises[peer.name][operation] = act(peer, Path(folder), state)
    return rises
