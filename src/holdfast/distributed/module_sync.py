"""Makes modules the same on all ranks: compares names, shapes and dtypes, and sends one rank's tensors to all."""

from __future__ import annotations

import difflib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from holdfast.digest import hash_bytes
from holdfast.distributed.collectives import Collectives
from holdfast.distributed.failures import name_ranks
from holdfast.errors import Mismatch, Unsupported
from holdfast.repo.record import canonical_json
from holdfast.snapshot.places import is_ordinary, mark_written
from holdfast.tensors.memory import new_memory, view_raw, view_storage

BUCKET_BYTES: Final = 250 << 20
"""How much is sent at once, and how much memory that may take."""
_LISTED: Final = 50

Facts = list[Any]
"""What must be the same on all ranks, in words."""


def sync_module_states(
    module: torch.nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    src: int = 0,
    ignore: Iterable[str | torch.Tensor] = (),
    buffers: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_s: float = 300.0,
) -> None:
    """Give all ranks the parameters, and buffers, that rank `src` of the group has; all ranks must call this.

    Raises Mismatch, on all of them and before anything is sent, if names, shapes, dtypes or devices differ.

    Args:
        module: the same on all ranks but for its values; each has all of it.
        process_group: the default one, if it is not given.
        src: a rank of the group.
        ignore: names, or tensors of the module, that stay as they are.
        buffers: send buffers, too.
        bucket_bytes: how much memory sending may take.
        timeout_s: how long a rank may give no sign of life.
    """
    tensors = _list_states(module, ignore, buffers=buffers)
    with Collectives(process_group, timeout_s=timeout_s, name="sync") as ranks:
        problems = find_differences(ranks, {name: [*_tell(each), each.device.type] for name, each in tensors.items()})
        if not problems:
            sender = Sender(ranks, process_group, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
            # By name: the order in which modules list their tensors may be another on each rank.
            ranks.all_gather("sync", lambda: sender.send([tensors[name] for name in sorted(tensors)], src))
    _refuse(problems)


def verify_shapes_across_ranks(
    tensors: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = 300.0,
) -> None:
    """Raise Mismatch, on all ranks, unless all have tensors of the same names, shapes and dtypes.

    Of a module, these are its parameters and buffers. The error names each that differs, and who has what.
    """
    if isinstance(tensors, torch.nn.Module):
        tensors = [*tensors.named_parameters(), *tensors.named_buffers()]
    table = {name: _tell(each) for name, each in dict(tensors).items()}
    with Collectives(process_group, timeout_s=timeout_s, name="shapes") as ranks:
        problems = find_differences(ranks, table)
    _refuse(problems)


def find_differences(ranks: Collectives, table: Mapping[str, Facts]) -> list[str]:
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


def gather_tables(ranks: Collectives, table: Mapping[str, Facts]) -> list[dict[str, Facts]] | None:
    """Return the tables of all ranks; None, which costs next to nothing, if they are the same."""
    digest = hash_bytes(canonical_json(dict(sorted(table.items()))))
    if len(set(ranks.all_gather("compare", lambda: digest))) == 1:
        return None
    return ranks.all_gather("differences", lambda: dict(table))


def _tell(tensor: torch.Tensor) -> Facts:
    return [str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape))]


def _refuse(problems: Sequence[str]) -> None:
    if not problems:
        return
    more = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    shown = "\n  ".join(problems[:_LISTED])
    raise Mismatch(
        f"the ranks do not have the same tensors; make their modules alike:\n  {shown}{more}", problems=tuple(problems)
    )


def _list_states(
    module: torch.nn.Module, ignore: Iterable[str | torch.Tensor], *, buffers: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by name, those that are tied once."""
    found = dict(module.named_parameters()) | (dict(module.named_buffers()) if buffers else {})
    # All names of what is tied mean the same tensor.
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    skipped = set()
    for each in ignore:
        if isinstance(each, str) and each not in named:
            close = difflib.get_close_matches(each, named, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"ignore: no tensor {each!r} in a {type(module).__name__}{hint}")
        skipped.add(id(named[each] if isinstance(each, str) else each))
    kept = {name: tensor for name, tensor in found.items() if id(tensor) not in skipped}
    for name, tensor in kept.items():
        if not is_ordinary(tensor):
            raise Unsupported(f"{name}: a {type(tensor).__name__} is not the same on all ranks, or not sent; ignore it")
    return kept


class Sender:
    """Sends tensors of one rank to all others, as bytes, many at once; all ranks send the same in the same order."""

    def __init__(
        self,
        ranks: Collectives,
        group: dist.ProcessGroup | None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float,
    ) -> None:
        """Use the tensor collectives of a group whose ranks talk by `ranks`."""
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket must hold something")
        self._ranks = ranks
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s

    def send(self, tensors: Sequence[torch.Tensor], src: int) -> None:
        """Give all ranks the values that ordinary tensors have on rank `src`."""
        if not 0 <= src < self._ranks.world_size:
            raise ValueError(f"src={src}: there are {self._ranks.world_size} ranks in the group")
        if self._ranks.world_size == 1:
            return
        is_source = self._ranks.rank == src
        # What does not lie in a row is sent by way of memory where it does.
        rows = [(each, each if each.is_contiguous() else _copy_row(each)) for each in tensors]
        self.send_bytes([_view(row) for _, row in rows], src)
        if not is_source:
            for tensor, row in rows:
                if row is not tensor:
                    view_raw(tensor).copy_(view_raw(row))
            mark_written(tensors)

    def send_bytes(self, memory: Sequence[torch.Tensor], src: int) -> None:
        """Give all ranks the bytes that rank `src` has in each of these; what is there is overwritten."""
        by_kind: dict[str, list[torch.Tensor]] = defaultdict(list)
        for each in memory:
            by_kind[each.device.type].append(each)
        for kind in sorted(by_kind):
            device = self._choose_device(by_kind[kind][0].device)
            for bucket in _iter_buckets(by_kind[kind], self._bucket_bytes):
                self._send_bucket(bucket, device, src)

    def _choose_device(self, device: torch.device) -> torch.device:
        """Return where the group can send from: the device itself, or another if its backend does not know that."""
        kinds = [each.partition(":")[0] for each in dist.get_backend_config(self._group).split(",")]
        if device.type in kinds or not kinds[0]:
            return device
        return torch.device(kinds[0])

    def _send_bucket(self, parts: Sequence[torch.Tensor], device: torch.device, src: int) -> None:
        is_source = self._ranks.rank == src
        is_direct = len(parts) == 1 and parts[0].device == device
        flat = parts[0] if is_direct else new_memory(sum(part.numel() for part in parts), device)
        sizes = [part.numel() for part in parts]
        if is_source and not is_direct:
            for target, part in zip(torch.split(flat, sizes), parts, strict=True):
                target.copy_(part)
        self._wait(dist.broadcast(flat, group=self._group, group_src=src, async_op=True), src)
        if not is_source and not is_direct:
            for part, received in zip(parts, torch.split(flat, sizes), strict=True):
                part.copy_(received)

    def _wait(self, work: Any, src: int) -> None:
        """Wait for one bucket; whoever fails meanwhile, or gives no sign of life, ends this."""
        deadline = time.monotonic() + self._timeout_s
        pause_s = 1e-4
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {src} sent nothing that arrived for {self._timeout_s:g} s; look at its log")
            self._ranks.beat()
            self._ranks.check_failures()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
        work.wait()  # says if it has failed


def _view(tensor: torch.Tensor) -> torch.Tensor:
    start = int(tensor.storage_offset()) * tensor.element_size()
    return view_storage(tensor.untyped_storage(), start, start + tensor.numel() * tensor.element_size())


def _copy_row(tensor: torch.Tensor) -> torch.Tensor:
    return view_raw(tensor).contiguous()


def _iter_buckets(memory: Iterable[torch.Tensor], limit_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield pieces of memory, given as tensors of bytes, in lists that a limit allows; what is larger is cut."""
    bucket: list[torch.Tensor] = []
    room = limit_bytes
    for each in memory:
        start = 0
        while start < each.numel():
            piece = each[start : start + room]
            bucket.append(piece)
            start, room = start + piece.numel(), room - piece.numel()
            if room == 0:
                yield bucket
                bucket, room = [], limit_bytes
    if bucket:
        yield bucket
