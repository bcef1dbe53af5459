"""Compares the tensors of modules across ranks, and copies the tensors of one rank to all."""

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
from holdfast.json_text import canonical_json
from holdfast.snapshot.into.in_place import is_ordinary
from holdfast.texts import list_lines

_LISTED: Final = 50


class ContainsNames(Protocol):
    """A container of names, such as a set or a pattern."""

    def __contains__(self, name: object, /) -> bool:
        """Return whether it contains the name."""


Ignore = Iterable[str | torch.Tensor] | ContainsNames
"""What to leave out: names and tensors, or an object that supports `name in ignore`."""
Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor] | torch.Tensor]
"""Tensors by name, pairs of a name and a tensor, or tensors without names."""
TensorFacts = list[Any]
"""Properties of a tensor that must be the same on all ranks, as plain values."""


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
    """Copy the parameters and buffers of rank `src` to all ranks of the group; all ranks must call this.

    Raises Mismatch on all ranks, before anything is sent, if names, shapes, dtypes or devices differ. Raises RankError
    if sending fails. The process group can be used afterwards, unless it was itself used to send from a device such as
    CUDA: then create it again.

    Args:
        module: the same on all ranks except for its values, and not sharded.
        process_group: the group; None for the default group.
        src: the rank, within the group, to copy from.
        ignore: names or tensors of the module to leave unchanged. A name that the module does not have is warned of.
        buffers: whether to send buffers, too.
        bucket_bytes: how much memory the send buffer may take.
        timeout_s: how long a rank may give no sign of life.
        collective: False to run in this process only, for code that runs with and without other ranks.
    """
    sync_tensors(
        _list_states(module, ignore, buffers=buffers),
        process_group=process_group,
        src=src,
        bucket_bytes=bucket_bytes,
        timeout_s=timeout_s,
        collective=collective,
    )


def sync_tensors(
    tensors: Tensors,
    *,
    process_group: dist.ProcessGroup | None = None,
    src: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_s: float = 300.0,
    collective: bool = True,
) -> None:
    """Copy the tensors of rank `src` to all ranks, as `sync_module_states` does; all ranks must call this.

    Tensors without names are matched by position: "[0]" in errors.
    """
    named = _name_all(tensors)
    _verify_ordinary(named)
    with Collectives(process_group, timeout_s=timeout_s, name="sync", use_dist=collective) as ranks:
        problems = gather_differences(
            ranks, {name: [*_describe(each), each.device.type] for name, each in named.items()}
        )
        if not problems:
            # Sorted by name: modules may list their tensors in a different order on each rank.
            ordered = [named[name] for name in sorted(named)]
            devices = {each.device.type for each in ordered}
            with open_carrier(ranks, timeout_s=timeout_s, group=process_group, devices=devices) as carrier:
                sender = Sender(ranks, carrier, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
                with sender.sending("sync"):
                    sender.send(ordered, src)
    _raise_mismatch(problems)


def verify_shapes_across_ranks(
    tensors: torch.nn.Module | Tensors,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = 300.0,
    collective: bool = True,
) -> None:
    """Raise Mismatch on all ranks unless all have tensors of the same names, shapes and dtypes.

    For a module, its parameters and buffers are compared. Tensors without names are named by position: "[0]". The
    error lists each tensor that differs, with the ranks. With collective=False there are no other ranks to compare.
    """
    if isinstance(tensors, torch.nn.Module):
        tensors = [*tensors.named_parameters(), *tensors.named_buffers()]
    table = {name: _describe(each) for name, each in _name_all(tensors).items()}
    with Collectives(process_group, timeout_s=timeout_s, name="shapes", use_dist=collective) as ranks:
        problems = gather_differences(ranks, table)
    _raise_mismatch(problems)


def _name_all(tensors: Tensors) -> dict[str, torch.Tensor]:
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return dict((f"[{at}]", each) if isinstance(each, torch.Tensor) else each for at, each in enumerate(tensors))


def gather_differences(ranks: Collectives, table: Mapping[str, TensorFacts]) -> list[str]:
    """Return a line for each name whose facts are not the same on all ranks; all ranks get the same lines."""
    tables = gather_tables(ranks, table)
    if tables is None:
        return []
    problems = []
    for name in sorted({name for each in tables for name in each}):
        views: dict[str, list[int]] = defaultdict(list)
        for rank, each in enumerate(tables):
            views[" ".join(map(str, each[name])) if name in each else "nothing"].append(rank)
        if len(views) > 1:
            shown = ", ".join(f"{view} on {name_ranks(found)}" for view, found in views.items())
            problems.append(f"{name}: {shown}")
    return problems


def gather_tables(ranks: Collectives, table: Mapping[str, TensorFacts]) -> list[dict[str, TensorFacts]] | None:
    """Return the tables of all ranks, or None if they are equal. In that case only digests are exchanged."""
    digest = hash_bytes(canonical_json(dict(sorted(table.items()))))
    if len(set(ranks.all_gather("compare", lambda: digest))) == 1:
        return None
    return ranks.all_gather("differences", lambda: dict(table))


def _describe(tensor: torch.Tensor) -> TensorFacts:
    return [str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape))]


def _raise_mismatch(problems: Sequence[str]) -> None:
    if not problems:
        return
    shown = list_lines(problems, _LISTED)
    raise Mismatch(
        f"the ranks do not have the same tensors; build the same module on all ranks:{shown}", problems=tuple(problems)
    )


def _list_states(module: torch.nn.Module, ignore: Ignore, *, buffers: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by name; tied tensors appear once."""
    found = dict(module.named_parameters()) | (dict(module.named_buffers()) if buffers else {})
    # With all names of tied tensors, so that any of them can be ignored.
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    skipped = set()
    for each in ignore if isinstance(ignore, Iterable) else [name for name in named if name in ignore]:
        if isinstance(each, str) and each not in named:
            close = difflib.get_close_matches(each, named, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            # Not an error: this rank alone would raise it, and the others would wait.
            warnings.warn(f"ignore: no tensor {each!r} in a {type(module).__name__}{hint}", stacklevel=3)
            continue
        skipped.add(id(named[each] if isinstance(each, str) else each))
    return {name: tensor for name, tensor in found.items() if id(tensor) not in skipped}


def _verify_ordinary(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not is_ordinary(tensor):
            raise Unsupported(
                f"{name}: a {type(tensor).__name__} cannot be copied between ranks; leave it out (`ignore` of a module)"
            )
