"""What the installed torch lacks: tests of it are skipped, and the reason names it.

The page on compatibility lists the reasons about torch and Python, so each begins with one of `LACKS`.
"""

from __future__ import annotations

import functools
import inspect
import io
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

LACKS: Final = ("this torch ", "this Python ")
"""How the reasons begin that name something which a version lacks."""


def needs_torch(*names: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test unless torch has these names, such as `nn.Buffer`."""
    missing = [name for name in names if not has_in_torch(name)]
    return pytest.mark.skipif(bool(missing), reason=f"this torch has no {' and no '.join(missing)}")


def needs_parameter(function: str, name: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test unless a function of torch has a parameter of that name."""
    return pytest.mark.skipif(not has_parameter(function, name), reason=f"this torch has no {name}= of {function}")


def needs_package(name: str) -> pytest.MarkDecorator:
    """Skip a test if a package is not installed; does not import it, which takes seconds for some."""
    return pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}, which `make test` installs")


def needs_ability(*abilities: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test unless torch has these abilities, each one of `ABILITIES`."""
    missing = [ability for ability in abilities if not is_able(ability)]
    return pytest.mark.skipif(bool(missing), reason=f"this torch cannot {' and cannot '.join(missing)}")


def param_dtypes(*names: str) -> list[Any]:
    """Return a parameter for each dtype of torch; a dtype that this torch lacks is a parameter that is skipped."""
    return [pytest.param(find_in_torch(name), id=f"torch.{name}", marks=needs_torch(name)) for name in names]


def find_in_torch(name: str) -> Any:
    """Return what torch calls by a name with dots, such as `nn.Buffer`; None if there is no such thing."""
    return pkgutil.resolve_name(f"torch.{name}") if has_in_torch(name) else None


def has_in_torch(name: str) -> bool:
    """Return whether torch has something of that name, even if it is None."""
    try:
        pkgutil.resolve_name(f"torch.{name}")
    except (ImportError, AttributeError):
        return False
    return True


def has_parameter(function: str, name: str) -> bool:
    """Return whether a function of torch, such as `distributed.tensor.distribute_tensor`, has that parameter."""
    return name in inspect.signature(find_in_torch(function)).parameters


@functools.cache
def is_able(ability: str) -> bool:
    """Return whether torch has one of `ABILITIES`: tries it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ABILITIES[ability]()
    except (AssertionError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def _nest_a_part() -> None:
    row = torch.ones(1, 1, dtype=torch.int64)
    torch._nested_view_from_buffer(torch.ones(2), row, row, torch.zeros_like(row[0]))


def _view_packed() -> None:
    torch._empty_affine_quantized((4, 6), scale=0.1, zero_point=3, dtype=torch.quint4x2).t()


def _load_fake() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(1), file)
    file.seek(0)
    with FakeTensorMode():
        assert torch.load(file).device.type == "cpu"


def _cut_unevenly() -> None:
    strided = find_in_torch("distributed.tensor.placement_types._StridedShard")
    strided(0, split_factor=2)._split_tensor(torch.ones(7), 2, with_padding=False, contiguous=True)


def _stride_alone() -> None:
    strided = find_in_torch("distributed.tensor.placement_types._StridedShard")
    locate = find_in_torch("distributed.tensor._utils._compute_local_shape_and_global_offset")
    shape, offset = locate((6,), (2,), [1], [strided(0, split_factor=2)])
    assert (tuple(shape), tuple(offset)) == ((2,), (2,))


def _view_local_shards() -> None:
    wrapper = find_in_torch("distributed.tensor._shards_wrapper.LocalShardsWrapper")
    wrapper([torch.ones(4, 1), torch.ones(4, 2)], [(0, 3), (0, 4)]).view(4, 3)


def _read_view() -> None:
    make_view = find_in_torch("distributed.checkpoint.utils._create_file_view")
    assert make_view(io.BytesIO(b"x"), 0, 0).read(1) == b""


def _find_global_coordinator() -> None:
    wrapper = find_in_torch("distributed.checkpoint.utils._DistWrapper")
    assert wrapper(None, False, 0).global_coordinator_rank == 0


def _save_to_memory() -> None:
    writer = find_in_torch("distributed.checkpoint._fsspec_filesystem.FsspecWriter")
    failure = find_in_torch("distributed.checkpoint.CheckpointException")
    try:
        find_in_torch("distributed.checkpoint.save")({"w": torch.ones(1)}, storage_writer=writer("memory://probe"))
    except failure as error:  # not an Exception
        raise RuntimeError("torch syncs the file of a stream that has none") from error


def _report_missing_metadata() -> None:
    class Reader(find_in_torch("distributed.checkpoint.FileSystemReader")):  # type: ignore[misc]  # made at run time
        def read_metadata(self) -> None:
            raise ValueError("the cause")

    with pytest.raises(find_in_torch("distributed.checkpoint.CheckpointException"), match="the cause"):
        find_in_torch("distributed.checkpoint.load")({}, storage_reader=Reader("nowhere"))


def _find_event_of_cpu() -> None:
    # FSDP2 records an event on the stream of its device.
    assert hasattr(torch.cpu.Stream, "record_event")


ABILITIES: Final[Mapping[str, Callable[[], None]]] = MappingProxyType(
    {
        "make a nested tensor of a part of a storage": _nest_a_part,
        "view a part of a tensor with several items in a byte": _view_packed,
        "load a file as fake tensors of the CPU": _load_fake,
        "cut a tensor unevenly with _StridedShard": _cut_unevenly,
        "locate a part that _StridedShard cuts without Shard": _stride_alone,
        "view the local shards of a DTensor": _view_local_shards,
        "end a view of a file where it ends": _read_view,
        "name the global rank of a coordinator": _find_global_coordinator,
        "save to a filesystem in memory": _save_to_memory,
        "report why the metadata of a checkpoint cannot be read": _report_missing_metadata,
        "train with FSDP2 on a CPU": _find_event_of_cpu,
    }
)
"""What not every torch can do, in words that follow "this torch cannot" -> a function that fails if torch cannot."""
FSDP: Final = needs_ability("train with FSDP2 on a CPU")
"""Skips a test that trains with FSDP2."""
