"""Makes modules the same on all ranks: compares names, shapes and dtypes, and sends one rank's tensors to all."""

from __future__ import annotations

import difflib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from holdfast.digest import hash_bytes
from holdfast.distributed.talk.collectives import Collectives
from holdfast.distributed.talk.failures import name_ranks
from holdfast.distributed.talk.sending import BUCKET_BYTES, Sender, open_carrier
from holdfast.errors import Mismatch, Unsupported
from holdfast.repo.format.record import canonical_json
from holdfast.snapshot.into.in_place import is_ordinary

_LISTED: Final = 50


class ContainsNames(Protocol):
    """Tells of a name whether it contains it."""

    def __contains__(self, name: object, /) -> bool:
        """Tell whether it contains the name."""


Ignore = Iterable[str | torch.Tensor] | ContainsNames
"""What is left out: names and tensors, or whatever tells of a name whether it is."""
TensorFacts = list[Any]
"""What must be the same on all ranks, in words."""


def sync_module_states(
    module: torch.nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    src: int = 0,
    ignore: Ignore = (),
    buffers: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_s: float = 300.0,
    collective: bool = True,
) -> None:
    """Give all ranks the parameters, and buffers, that rank `src` of the group has; all ranks must call this.

    Raises Mismatch, on all of them and before anything is sent, if names, shapes, dtypes or devices differ. If sending
    fails, RankError; the group works on, but for one that had to send from its devices: make that anew.

    Args:
        module: the same on all ranks but for its values; each has all of it.
        process_group: the default one, if it is not given.
        src: a rank of the group.
        ignore: names, or tensors of the module, that stay as they are; a name that it does not have is warned of.
        buffers: send buffers, too.
        bucket_bytes: how much memory sending may take.
        timeout_s: how long a rank may give no sign of life.
        collective: False does this in one process alone, for code that runs with and without other ranks.
    """
    tensors = _list_states(module, ignore, buffers=buffers)
    with Collectives(process_group, timeout_s=timeout_s, name="sync", use_dist=collective) as ranks:
        problems = gather_differences(ranks, {name: [*_tell(each), each.device.type] for name, each in tensors.items()})
        if not problems:
            # By name: the order in which modules list their tensors may be another on each rank.
            ordered = [tensors[name] for name in sorted(tensors)]
            devices = {each.device.type for each in ordered}
            with open_carrier(ranks, timeout_s=timeout_s, group=process_group, devices=devices) as carrier:
                sender = Sender(ranks, carrier, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
                sender.run("sync", lambda: sender.send(ordered, src))
    _refuse(problems)


def verify_shapes_across_ranks(
    tensors: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor] | torch.Tensor],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = 300.0,
    collective: bool = True,
) -> None:
    """Raise Mismatch, on all ranks, unless all have tensors of the same names, shapes and dtypes.

    Of a module, these are its parameters and buffers; tensors without names are named by their positions, as in "[0]".
    The error names each that differs, and who has what. With collective=False there is nobody to compare with.
    """
    if isinstance(tensors, torch.nn.Module):
        tensors = [*tensors.named_parameters(), *tensors.named_buffers()]
    table = {name: _tell(each) for name, each in _name_all(tensors).items()}
    with Collectives(process_group, timeout_s=timeout_s, name="shapes", use_dist=collective) as ranks:
        problems = gather_differences(ranks, table)
    _refuse(problems)


def _name_all(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor] | torch.Tensor],
) -> dict[str, torch.Tensor]:
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return dict((f"[{at}]", each) if isinstance(each, torch.Tensor) else each for at, each in enumerate(tensors))


def gather_differences(ranks: Collectives, table: Mapping[str, TensorFacts]) -> list[str]:
    """Return a line for each name of which not all ranks tell the same, the same lines on all ranks."""
    tables = gather_tables(ranks, table)
    if tables is None:
        return []
    problems = []
    for name in sorted({name for each in tables for name in each}):
        views: dict[str, list[int]] = defaultdict(list)
        for rank, each in enumerate(tables):
            views[" ".join(map(str, each[name])) if name in each else "nothing"].append(rank)
        if len(views) > 1:
            held = ", ".join(f"{view} on {name_ranks(found)}" for view, found in views.items())
            problems.append(f"{name}: {held}")
    return problems


def gather_tables(ranks: Collectives, table: Mapping[str, TensorFacts]) -> list[dict[str, TensorFacts]] | None:
    """Return the tables of all ranks; None, which costs next to nothing, if they are the same."""
    digest = hash_bytes(canonical_json(dict(sorted(table.items()))))
    if len(set(ranks.all_gather("compare", lambda: digest))) == 1:
        return None
    return ranks.all_gather("differences", lambda: dict(table))


def _tell(tensor: torch.Tensor) -> TensorFacts:
    return [str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape))]


def _refuse(problems: Sequence[str]) -> None:
    if not problems:
        return
    more = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    shown = "\n  ".join(problems[:_LISTED])
    raise Mismatch(
        f"the ranks do not have the same tensors; make their modules alike:\n  {shown}{more}", problems=tuple(problems)
    )


def _list_states(module: torch.nn.Module, ignore: Ignore, *, buffers: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by name, those that are tied once."""
    found = dict(module.named_parameters()) | (dict(module.named_buffers()) if buffers else {})
    # All names of what is tied mean the same tensor.
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    skipped = set()
    for each in ignore if isinstance(ignore, Iterable) else [name for name in named if name in ignore]:
        if isinstance(each, str) and each not in named:
            close = difflib.get_close_matches(each, named, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            # No error: it would be this rank's alone, and the others would wait for it.
            warnings.warn(f"ignore: no tensor {each!r} in a {type(module).__name__}{hint}", stacklevel=3)
            continue
        skipped.add(id(named[each] if isinstance(each, str) else each))
    kept = {name: tensor for name, tensor in found.items() if id(tensor) not in skipped}
    for name, tensor in kept.items():
        if not is_ordinary(tensor):
            raise Unsupported(f"{name}: a {type(tensor).__name__} is not the same on all ranks, or not sent; ignore it")
    return kept
