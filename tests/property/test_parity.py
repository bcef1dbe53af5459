"""The same inputs through PyTorch's own helpers and through ours: what they give, and how they fail, is compared."""

from __future__ import annotations

import importlib
import inspect
import re
import tempfile
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import utils as torch_utils
from torch.distributed.checkpoint import utils as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _content_store as torch_store

import holdfast
from holdfast import content_store
from holdfast.distributed.checkpoint.module_sync import sync_module_states, verify_shapes_across_ranks
from holdfast.distributed.talk.collectives import Collectives
from holdfast.repo.format.boxes import add, subtract
from holdfast.tensors.sharding import find_state_dict_object, find_tensor_shard
from holdfast.tensors.storage import alloc_storage, assert_logged, free_storage, is_allocated
from holdfast.trees.apply import apply_to_tensors, cast_floating, move_to_device, pack_kwargs, to_kwargs, unpack_kwargs
from holdfast.trees.pick import replace_by_prefix
from tests.kit.capabilities import needs_ability

CPU: Final = torch.device("cpu")
META: Final = torch.device("meta")
PAGE: Final = Path(__file__).parents[2] / "docs" / "coming-from-pytorch.md"

COMPARED: Final = {
    "hash_storage",
    "ContentStoreWriter",
    "ContentStoreReader",
    "_DistWrapper",
    "CheckpointException",
    "find_tensor_shard",
    "find_state_dict_object",
    "_all_gather_keys",
    "_element_wise_add",
    "_element_wise_sub",
    "_pack_kwargs",
    "_unpack_kwargs",
    "_apply_to_tensors",
    "_cast_forward_inputs",
    "_recursive_to",
    "_to_kwargs",
    "_replace_by_prefix",
    "_alloc_storage",
    "_free_storage",
    "_data_ptr_allocated",
    "_verify_param_shape_across_processes",
    "_sync_module_states",
    "_p_assert",
}
"""What the tests of this file compare."""
ELSEWHERE: Final = {
    "_ReaderView": "compared in tests/unit/repo/read/test_stream.py",
    "_create_file_view": "compared in tests/unit/repo/read/test_stream.py",
    "_get_failure_dict": "its result is `failures` of the error, compared here with CheckpointException",
    "_assert_same_keys": "does nothing in one process; several: tests/distributed/checkpoint/test_module_sync.py",
    "_sync_params_and_buffers": "does nothing in one process: tests/distributed/checkpoint/test_module_sync.py",
    "_normalize_device_info": "not needed",
    "_profile": "not needed",
    "_api_bc_check": "not needed",
    "_get_root_modules": "not needed",
    "_find_shard": "a part of find_tensor_shard",
    "hash_storage_kernel": "a part of hash_storage",
    "lazy_compile": "a part of hash_storage",
}
MODULES: Final = ("torch.utils._content_store", "torch.distributed.checkpoint.utils", "torch.distributed.utils")


def list_names(module: str) -> set[str]:
    """Return the functions and classes that a module of torch defines."""
    found = importlib.import_module(module)
    return {
        name
        for name, value in vars(found).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module
    }


@pytest.mark.parametrize("module", MODULES)
def test_every_helper_of_torch_is_on_the_map_and_compared_or_excused(module: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    inner = {"_find_shard", "hash_storage_kernel", "lazy_compile"}
    names = list_names(module)

    assert {name for name in names - inner if f"`{name}" not in page} == set()
    assert names - COMPARED - set(ELSEWHERE) == set()


def test_every_name_of_ours_on_the_map_exists() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = []
    for path in sorted(set(re.findall(r"`(holdfast(?:\.[a-z_]+)+\.[A-Za-z_]+)", page))):
        module, _, name = path.rpartition(".")
        try:
            is_there = hasattr(importlib.import_module(module), name)
        except ModuleNotFoundError:
            is_there = False
        if not is_there and not _is_module(path):
            missing.append(path)
    assert missing == []


def _is_module(path: str) -> bool:
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        return False
    return True


# Trees


Point = namedtuple("Point", ["x", "y"])


@dataclass
class Record:
    left: Any
    right: Any


LEAVES = st.one_of(
    st.none(),
    st.integers(-5, 5),
    st.text(max_size=2),
    st.builds(lambda: torch.arange(3.0)),
    st.builds(lambda: torch.arange(2)),
    st.builds(lambda: torch.ones(2, dtype=torch.bfloat16)),
    st.builds(lambda: torch.ones(2, dtype=torch.cfloat)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Record, inner, inner),
        st.lists(st.builds(lambda: torch.arange(3.0)), max_size=2).map(set),
        st.builds(lambda: pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)),
    ),
    max_leaves=10,
)


def outline(tree: Any) -> Any:
    """Return types, keys, and the values and flags of tensors; the items of sets in some order."""
    if isinstance(tree, torch.Tensor):
        values = () if tree.is_meta else tuple(tree.flatten().tolist())
        return (str(tree.dtype), tree.device.type, tuple(tree.shape), values, tree.requires_grad)
    if isinstance(tree, PackedSequence):
        return ("packed", outline(tree.data), outline(tree.batch_sizes))
    if isinstance(tree, dict):
        return (type(tree).__name__, [(key, outline(value)) for key, value in tree.items()])
    if isinstance(tree, set):
        return ("set", sorted(map(repr, map(outline, tree))))
    if isinstance(tree, list | tuple):
        return (type(tree).__name__, [outline(value) for value in tree])
    if isinstance(tree, Record):
        return ("record", outline(tree.left), outline(tree.right))
    return tree


def has_packed(tree: Any) -> bool:
    return "'packed'" in repr(outline(tree))


@given(TREES)
def test_a_function_sees_the_tensors_that_torchs_shows_it(tree: Any) -> None:
    ours: list[int] = []
    theirs: list[int] = []

    def note(seen: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(id(tensor))
            return tensor

        return keep

    apply_to_tensors(note(ours), tree)
    torch_utils._apply_to_tensors(note(theirs), tree)

    assert sorted(ours) == sorted(theirs)


@given(TREES)
def test_a_function_changes_a_tree_as_torchs_does(tree: Any) -> None:
    # Torch's throws away what a function makes of packed sequences.
    if not has_packed(tree):
        ours = apply_to_tensors(lambda tensor: tensor * 2, tree)
        assert outline(ours) == outline(torch_utils._apply_to_tensors(lambda tensor: tensor * 2, tree))


def fill_in_place(tensor: torch.Tensor) -> None:
    tensor.fill_(1)


@pytest.mark.parametrize("function", [fill_in_place, torch.Tensor.zero_, torch.Tensor.numel, str])
@given(TREES)
def test_what_is_no_new_tensor_changes_a_tree_as_torchs_does(function: Callable[..., object], tree: Any) -> None:
    other = deepcopy(tree)

    ours, theirs = apply_to_tensors(function, tree), torch_utils._apply_to_tensors(function, other)

    assert outline(ours) == outline(theirs)
    assert outline(tree) == outline(other)


@given(
    st.lists(TREES, max_size=3),
    st.dictionaries(st.text(max_size=3), TREES, max_size=3),
    st.sampled_from([None, torch.float64, torch.float16]),
    st.booleans(),
)
def test_arguments_are_cast_as_torchs_casts_them(
    args: list[Any], kwargs: dict[str, Any], dtype: torch.dtype | None, requires_grad: bool
) -> None:
    args = [each for each in args if not has_packed(each)]
    kwargs = {key: each for key, each in kwargs.items() if not has_packed(each)}
    leaf = torch.ones(3, requires_grad=requires_grad)
    ours, our_kwargs = cast_floating(((leaf, *args), kwargs), dtype)
    theirs, their_kwargs = torch_utils._cast_forward_inputs(dtype, leaf, *args, **kwargs)

    assert outline([ours, our_kwargs]) == outline([theirs, their_kwargs])
    if requires_grad:
        grads = [torch.autograd.grad((found[0] * 3).sum(), leaf)[0] for found in (ours, theirs)]
        assert outline(grads[0]) == outline(grads[1])


@given(TREES, st.sampled_from([CPU, META]))
def test_a_tree_is_moved_as_torchs_moves_it(tree: Any, device: torch.device) -> None:
    # Torch's knows neither sets nor dataclasses.
    text = repr(outline(tree))
    if "'set'" not in text and "'record'" not in text:
        (theirs,) = torch_utils._recursive_to(tree, device, False)
        assert outline(move_to_device(tree, device)) == outline(theirs)


NUMBERS = st.integers(-99, 99)


@given(st.lists(NUMBERS, max_size=3), st.dictionaries(st.text(max_size=2), NUMBERS, max_size=3))
def test_arguments_are_moved_and_padded_as_torchs_are(args: list[int], kwargs: dict[str, int]) -> None:
    given_args = tuple(torch.full((2,), each) for each in args)
    for named in (None, {key: torch.full((2,), each) for key, each in kwargs.items()}):
        for device in (CPU, META):
            ours = to_kwargs(given_args, named, device)
            assert outline(ours) == outline(torch_utils._to_kwargs(given_args, named, device, False))


@given(st.lists(st.integers(), max_size=4), st.dictionaries(st.text(max_size=3), st.integers(), max_size=4))
def test_keywords_are_packed_and_unpacked_as_torchs_are(args: list[int], kwargs: dict[str, int]) -> None:
    packed = pack_kwargs(*args, **kwargs)

    assert packed == torch_utils._pack_kwargs(*args, **kwargs)
    assert unpack_kwargs(*packed) == torch_utils._unpack_kwargs(*packed) == (tuple(args), kwargs)


@given(
    st.dictionaries(st.text("ab.", max_size=4), st.integers(), max_size=5),
    st.text("ab.", max_size=2),
    st.text("ab.", max_size=2),
)
def test_prefixes_are_replaced_as_torchs_are(state: dict[str, int], old: str, new: str) -> None:
    ours, theirs = dict(state), dict(state)
    outcomes = []
    for act, target in ((replace_by_prefix, ours), (torch_utils._replace_by_prefix, theirs)):
        try:
            act(target, old, new)
            outcomes.append("done")
        except ValueError:
            outcomes.append("refused")
    renamed = [new + key[len(old) :] if key.startswith(old) else key for key in state]
    if len(set(renamed)) == len(renamed) and old != new:
        assert outcomes == ["done", "done"]
        assert ours == dict(zip(renamed, state.values(), strict=True))
        # In another order: ours keeps that of the keys. Torch's loses a key if a new name is also an old one.
        if not {name for name, key in zip(renamed, state, strict=True) if name != key} & set(state):
            assert theirs == ours
    else:
        assert outcomes[0] == "refused"
        assert ours == state


# Storages


@given(st.lists(st.integers(0, 4), max_size=3))
def test_storages_are_freed_and_allocated_as_torchs_are(shape: list[int]) -> None:
    importlib.import_module("torch.distributed._functional_collectives")
    ours, theirs = torch.zeros(shape), torch.zeros(shape)
    size = torch.Size(shape)
    for _ in range(2):
        free_storage(ours)
        torch_utils._free_storage(theirs)
        assert is_allocated(ours) == torch_utils._data_ptr_allocated(theirs)
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes() == 0
        alloc_storage(ours, size)
        torch_utils._alloc_storage(theirs, size)
        assert is_allocated(ours) == torch_utils._data_ptr_allocated(theirs)
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes() == 4 * size.numel()


# Assertions


class Checked(torch.autograd.Function):
    """Checks something in its backward pass, with an assertion of torch or of ours."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, check: Callable[[], None]) -> torch.Tensor:
        ctx.check = check
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with suppress(AssertionError) if ctx.check.keywords.get("is_lost") else nullcontext():
            ctx.check()
        return grad, None


@pytest.mark.parametrize("condition", [True, False, 0, 1, "", "yes", None, [], [0]])
@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("is_lost", [True, False])
def test_an_assertion_in_a_backward_pass_is_seen_and_raised_as_torchs(
    condition: object, raises: bool, is_lost: bool, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def run(check: Callable[..., None]) -> str:
        def act(is_lost: bool) -> None:
            check(condition, "the gradient is wrong", raises)

        try:
            Checked.apply(torch.ones(1, requires_grad=True), partial(act, is_lost=is_lost)).sum().backward()  # type: ignore[no-untyped-call]  # torch's
        except AssertionError as error:
            return str(error)
        return "nothing"

    theirs = run(torch_utils._p_assert)
    printed = capfd.readouterr()
    ours = run(lambda condition, text, raises: assert_logged(condition, text, raises=raises))

    assert ours == theirs
    assert [record.getMessage() for record in caplog.records] == printed.out.splitlines()
    assert all(record.levelname == "ERROR" and "in backward" in str(record.stack_info) for record in caplog.records)
    assert capfd.readouterr() == ("", "")


# Look-up


INDICES = st.builds(
    MetadataIndex,
    st.sampled_from(["w", "step", "gone"]),
    st.one_of(st.none(), st.lists(st.integers(0, 1), max_size=3).map(torch.Size)),
    st.one_of(st.none(), st.integers(0, 2)),
)


@given(INDICES, st.lists(st.integers(1, 3), max_size=3))
def test_objects_are_found_where_torchs_finds_them(index: MetadataIndex, shape: list[int]) -> None:
    state = {"w": torch.ones(shape), "step": 3}
    found: list[Any] = []
    for find in (find_state_dict_object, torch_checkpoint.find_state_dict_object):
        try:
            found.append(find(state, index))
        except ValueError:
            found.append(ValueError)

    assert found[0] is found[1]


@given(INDICES, st.lists(st.integers(1, 3), max_size=3))
def test_shards_are_found_where_torchs_finds_them(index: MetadataIndex, shape: list[int]) -> None:
    tensor = torch.ones(shape)
    found: list[Any] = []
    for find in (find_tensor_shard, torch_checkpoint.find_tensor_shard):
        try:
            found.append(find(tensor, index))
        except ValueError:
            found.append(ValueError)

    assert found[0] is found[1]


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), max_size=4))
def test_offsets_are_added_and_subtracted_as_torchs_are(pairs: list[tuple[int, int]]) -> None:
    a, b = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)

    assert list(add(a, b)) == torch_checkpoint._element_wise_add(a, b)
    assert list(subtract(a, b)) == torch_checkpoint._element_wise_sub(a, b)


# Collectives, in a world of one


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _two() -> int:
    return 2


def _add(numbers: list[int]) -> int:
    return sum(numbers)


VALUE: Final = OrderedDict(shape=torch.Size([1, 2]), name="w", parts=[(0, 1.5), None])


@pytest.mark.parametrize("use_dist", [False, True])
@pytest.mark.usefixtures("group")
def test_collectives_give_what_torchs_give(use_dist: bool) -> None:
    theirs = torch_checkpoint._DistWrapper(None, use_dist, 0)
    with Collectives(use_dist=use_dist) as ours:
        assert (ours.rank, ours.world_size) == (theirs.get_rank(), theirs.get_world_size())
        assert ours.is_coordinator == theirs.is_coordinator
        assert ours.broadcast_object(VALUE, step="1") == theirs.broadcast_object(VALUE)
        assert ours.gather_object(VALUE, step="2") == theirs.gather_object(VALUE)
        assert ours.all_gather_object(VALUE, step="3") == theirs.all_gather_object(VALUE)
        assert ours.scatter_object([VALUE], step="4") == theirs.scatter_object([VALUE])
        assert ours.reduce_scatter("5", lambda: 2, lambda got: got) == theirs.reduce_scatter("5", lambda: 2, list)
        assert ours.all_reduce("6", lambda: 2, sum) == theirs.all_reduce("6", _two, _add)
        assert ours.all_gather("7", lambda: VALUE) == theirs.all_gather("7", lambda: VALUE)
        assert ours.broadcast("8", lambda: VALUE) == theirs.broadcast("8", lambda: VALUE)
        ours.barrier()
        assert type(ours.broadcast_object(VALUE, step="9")) is OrderedDict


@needs_ability("name the global rank of a coordinator")
@pytest.mark.usefixtures("group")
def test_the_coordinator_has_the_global_rank_that_torchs_has() -> None:
    with Collectives() as ours:
        assert ours.global_coordinator_rank == torch_checkpoint._DistWrapper(None, True, 0).global_coordinator_rank


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce", "all_gather", "broadcast"])
def test_failures_are_told_as_torchs_are(name: str) -> None:
    reduce = (list,) if "reduce" in name else ()
    with pytest.raises(CheckpointException) as theirs:
        getattr(torch_checkpoint._DistWrapper(None, False, 0), name)("divide", lambda: 1 / 0, *reduce)
    with Collectives() as ranks, pytest.raises(holdfast.RankError) as ours:
        getattr(ranks, name)("divide", lambda: 1 / 0, *reduce)

    assert sorted(ours.value.failures) == sorted(theirs.value.failures) == [0]
    assert ours.value.failures[0].type_name == type(theirs.value.failures[0][0]).__name__


@pytest.mark.usefixtures("group")
def test_keys_are_gathered_as_torchs_are() -> None:
    keys = {"b": 1, "a": 2}
    with Collectives() as ranks:
        assert set(ranks.all_gather_keys(keys, step="keys")) == set(torch_checkpoint._all_gather_keys(keys))


@pytest.mark.usefixtures("group")
def test_modules_are_compared_and_sent_as_torchs_are() -> None:
    module = torch.nn.BatchNorm1d(3)
    other = deepcopy(module)
    world = dist.group.WORLD
    assert world is not None
    ignored = {"weight", "running_mean"}
    torch_utils._verify_param_shape_across_processes(world, list(module.parameters()))
    verify_shapes_across_ranks(list(module.parameters()))
    torch_utils._sync_module_states(other, world, 1 << 20, 0, ignored)
    sync_module_states(module, ignore=ignored)

    assert outline(dict(module.state_dict())) == outline(dict(other.state_dict()))


# The content store


SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.int16, torch.bool, torch.cfloat, torch.bfloat16])


def make_tensor(shape: list[int], dtype: torch.dtype, kind: str) -> torch.Tensor:
    tensor = torch.arange(torch.Size(shape).numel() + 2).to(dtype)[2:].view(shape)
    if kind == "turned" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    return tensor.conj() if kind == "conj" and dtype.is_complex else tensor


@settings(max_examples=15)
@given(st.lists(st.tuples(SHAPES, DTYPES, st.sampled_from(["plain", "turned", "conj"])), min_size=1, max_size=3))
def test_tensors_come_back_as_from_torchs_content_store(made: list[tuple[list[int], torch.dtype, str]]) -> None:
    tensors = {f"dir/{number}": make_tensor(*each) for number, each in enumerate(made)}
    with tempfile.TemporaryDirectory() as place:
        theirs = torch_store.ContentStoreWriter(f"{place}/theirs", stable_hash=True)
        ours = content_store.ContentStoreWriter(f"{place}/ours", stable_hash=True)
        for name, tensor in tensors.items():
            theirs.write_tensor(name, tensor)
            ours.write_tensor(name, tensor)
            own, other = ours.compute_tensor_metadata(tensor), theirs.compute_tensor_metadata(tensor)
            assert (own[0], *tuple(own)[2:]) == (other[0], *other[2:])
        ours.close()
        reader, their_reader = content_store.ContentStoreReader(f"{place}/ours"), _open_theirs(place)
        for name in tensors:
            found, wanted = reader.read_tensor(name), their_reader.read_tensor(name)
            assert outline(found) == outline(wanted)
            assert (found.stride(), found.is_conj()) == (wanted.stride(), wanted.is_conj())
        for each in (reader, their_reader):
            with pytest.raises(FileNotFoundError):
                each.read_tensor("gone")


def _open_theirs(place: str) -> torch_store.ContentStoreReader:
    return torch_store.ContentStoreReader(f"{place}/theirs")


@given(st.binary(max_size=9), st.binary(max_size=9))
def test_storages_have_equal_hashes_where_torchs_stable_ones_are_equal(one: bytes, other: bytes) -> None:
    storages = [torch.tensor(list(each), dtype=torch.uint8).untyped_storage() for each in (one, other)]
    ours = [content_store.hash_storage(each, stable_hash=True) for each in storages]
    theirs = [torch_store.hash_storage(each, stable_hash=True) for each in storages]

    assert (ours[0] == ours[1]) == (theirs[0] == theirs[1]) == (one == other)
