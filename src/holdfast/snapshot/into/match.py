"""Compares a target with an encoded tree, under names without wrappers, and plans how to load it; changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Final, Protocol, cast, runtime_checkable

import numpy as np
import torch

from holdfast.errors import Mismatch, Unsupported
from holdfast.json_text import Json, canonical_json
from holdfast.snapshot.into.in_place import (
    can_copy_ordinary,
    copy_into,
    cut_like,
    find_pieces,
    find_read_target,
    find_shard_target,
    is_ordinary,
    is_strided,
    make_claim,
    repeats_items,
)
from holdfast.snapshot.into.plan import Check, ImmutableCheck, IntoPlan, Step, check_cast, fit_replacement, fit_value
from holdfast.snapshot.into.undo import (
    FieldSetter,
    ItemSetter,
    PerRankSetter,
    ValueSetter,
    does_translate,
    is_itemwise,
    is_plain_module,
    keep_grad,
    keep_module,
    keep_object,
    keep_optimizer,
    keep_tensors,
    refusals_as_mismatch,
    restore,
    restore_module,
    restore_optimizer,
)
from holdfast.snapshot.leaves import ARRAY, BLOBS, GRAD, PARTS, PAYLOAD, TENSOR, TENSOR_TAGS, describe_node
from holdfast.snapshot.load import LeafReader
from holdfast.snapshot.stateful import (
    AnyOptimizer,
    has_load_hooks,
    is_optimizer,
    is_optimizer_state,
    is_stateful,
    read_state,
    unwrap,
)
from holdfast.tensors.fakes import find_fake_problem
from holdfast.tensors.sharding import PerRank, Shard
from holdfast.tensors.spec import TensorSpec, items_per_byte
from holdfast.trees.apply import iter_tensors
from holdfast.trees.encoding import decode_tree, encode_tree, refuse
from holdfast.trees.outline import FIELDS_START, ITEMS_START, KEYED_START, PAIRS_START, TreePath, iter_leaves, join_name


@runtime_checkable
class Composed(Protocol):
    """An object that is loaded by loading each of its parts."""

    def __holdfast_parts__(self) -> dict[str, Any]:
        """Return the parts by name; a saved plain value is put into this dict."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedModule:
    """A module whose state is saved under other names than its own `state_dict` uses."""

    module: torch.nn.Module
    read: Callable[[], dict[str, Any]]
    """Returns the module's own tensors."""
    write: Callable[[dict[str, Any], bool], None]
    """Loads a state; the flag says whether every key must match."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self.read()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load a state."""
        self.write(state_dict, True)


@dataclass(frozen=True, slots=True, eq=False)
class NamedOptimizer:
    """An optimizer whose state is saved under the names of parameters, not their numbers."""

    optimizer: AnyOptimizer
    """An optimizer, or a wrapper around one."""
    names: Sequence[str]
    """The names of all its parameters, in its order."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; state that the optimizer has not created yet is not included."""
        state = cast(Any, self.optimizer).state_dict()
        if not is_optimizer_state(state):
            raise Unsupported(
                f"the state of a {type(self.optimizer).__name__} does not have the form of torch's optimizers, so it"
                " cannot be saved by parameter name; pass it under a name of its own:"
                " training_state(model, my_optimizer=...)"
            )
        groups = [
            # The optimizer's own list of names contains the prefixes of wrappers.
            {key: value for key, value in group.items() if key != "param_names"}
            | {"params": [self.names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ]
        return {
            "state": {self._name(number): values for number, values in state["state"].items()},
            "param_groups": groups,
        }

    def _name(self, number: object) -> object:
        # Some optimizers keep state for all parameters together, under a key of their own.
        return self.names[number] if isinstance(number, int) else number

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load a state; raises Mismatch if its groups differ."""
        problems = self.find_problems([group["params"] for group in state_dict["param_groups"]])
        if problems:
            text = f"the optimizer cannot take this state over: {'; '.join(problems)}"
            raise Mismatch(text, problems=tuple(problems))
        restore_optimizer(self.optimizer, self.number(state_dict))

    def find_problems(self, groups: Sequence[Sequence[str]]) -> list[str]:
        """Return the differences between saved groups of names and the optimizer's."""
        own_groups = self.list_groups()
        if len(own_groups) != len(groups):
            return [f"{len(own_groups)} parameter groups in the target, {len(groups)} in the snapshot"]
        problems = []
        for number, pair in enumerate(zip(own_groups, groups, strict=True)):
            mine, theirs = map(dict.fromkeys, pair)
            only = [(name, "target") for name in mine if name not in theirs]
            only += [(name, "snapshot") for name in theirs if name not in mine]
            problems += [f"{name} is in group {number} of the {side} only" for name, side in only]
        return problems

    def list_groups(self) -> list[list[str]]:
        """Return the names of the parameters in each group."""
        names = iter(self.names)
        return [[next(names) for _ in group["params"]] for group in unwrap(self.optimizer).param_groups]

    def number(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state keyed by the numbers of parameters."""
        numbers = {name: number for number, name in enumerate(self.names)}
        groups = [
            group | {"params": [numbers[name] for name in names]}
            for group, names in zip(state["param_groups"], self.list_groups(), strict=True)
        ]
        return {
            "state": {numbers.get(key, key): values for key, values in state["state"].items()},
            "param_groups": groups,
        }


FIXED: Final = "it differs, and it is in a tuple or frozen dataclass, which cannot be changed"


class TreeMatcher:
    """Matches trees of containers, leaves and objects with a state."""

    def __init__(self, plan: IntoPlan) -> None:
        self._plan = plan
        self._waiting: list[Callable[[], None]] = []

    def match(self, target: Any, node: Json, path: TreePath, setter: ValueSetter | None) -> None:
        """Plan how `node` is loaded into `target`, or replaces it."""
        # An explicit stack instead of recursion: the caller may be close to the recursion limit.
        self._waiting.append(partial(self._match, target, node, path, setter))
        while self._waiting:
            self._waiting.pop()()

    def _match(self, target: Any, node: Json, path: TreePath, setter: ValueSetter | None) -> None:
        if isinstance(target, torch.Tensor):
            self._match_tensor(target, node, path, setter)
        elif isinstance(target, PerRank):
            declared = None if setter is None else PerRankSetter(setter)
            self._waiting.append(partial(self._match, target.value, node, path, declared))
        elif isinstance(target, Shard):
            self._match_shard(target, node, path)
        elif is_stateful(target):
            match_state(self._plan, target, node, path)
        elif isinstance(target, dict):
            self._match_dict(target, node, path)
        elif type(target) is list:
            self._match_list(target, node, path)
        elif _is_fixed(target):
            self._match_fixed(target, node, path)
        else:
            self._match_plain(target, node, path, setter)

    def _match_tensor(self, target: torch.Tensor, node: Json, path: TreePath, setter: ValueSetter | None) -> None:
        tag = node[0] if isinstance(node, list) else ""
        if tag not in TENSOR_TAGS:
            self._plan.add_problem(path, f"the target has a tensor here, the snapshot {describe_node(node)}")
        elif torch.nn.parameter.is_lazy(target):
            self._plan.add_problem(path, "the tensor in the target is not initialised yet; run its module once")
        elif tag == GRAD:
            self._match_grad(target, node, path, setter)
        elif tag == PARTS:
            self._match_parts(target, node, path, setter)
        elif not (is_strided(target) and can_copy_ordinary(target)) and not self._plan.options.assign:
            text = f"the target has a {_describe_kind(target)} tensor here, the snapshot an ordinary one"
            self._plan.add_problem(path, f"{text}; assign=True puts that in place")
        else:
            self._match_ordinary(target, node, path, setter)

    def _match_shard(self, target: Shard, node: Json, path: TreePath) -> None:
        """Match a declared box of a tensor: that box of the saved tensor is loaded into it."""
        plan = self._plan
        if not isinstance(node, list) or node[0] != TENSOR:
            plan.add_problem(path, f"the target has a part of a tensor here, the snapshot {describe_node(node)}")
            return
        ref, spec = plan.find_saved(node, join_name(path))
        if target.global_shape != spec.shape:
            plan.add_problem(path, f"shape {target.global_shape} in the target, {spec.shape} in the snapshot")
        elif target.tensor.dtype != spec.dtype:
            plan.add_problem(path, f"dtype {target.tensor.dtype} in the target, {spec.dtype} in the snapshot")
        else:
            memory = find_shard_target(target, target.tensor, ref, spec)
            if memory is None:
                plan.add_problem(path, "the saved tensor is not in C order; load all of it, and slice it")
            else:
                plan.fill(memory, join_name(path))

    def _match_ordinary(
        self, target: torch.Tensor, node: list[Json], path: TreePath, setter: ValueSetter | None
    ) -> None:
        plan = self._plan
        name = join_name(path)
        ref, spec = plan.find_saved(node, name)
        if not self._check_fit(target, spec, path):
            return
        if plan.options.assign and (setter is not None or target.is_meta or spec.meta):
            self._replace(target, node, path, setter)
            return
        if target.numel() == 0:
            return
        claim = make_claim(name, target, ref, spec)
        if claim is not None:
            plan.claims.append(claim)
        memory = find_read_target(target, ref, spec)
        if memory is not None:
            plan.fill(memory, name)
            return
        plan.nodes.append((name, node))
        if items_per_byte(target.dtype) > 1:
            plan.add_problem(path, "it was quantised in another way than the target; assign=True puts it in place")
        elif repeats_items(target):
            plan.add_problem(path, "the target is expanded, its items are one and the same memory; clone() it first")
        else:
            copy = _Copy(target, node, path)
            plan.steps.append(Step(name, copy, partial(keep_tensors, [target]), (target,), is_tensor=True))

    def _check_fit(self, target: torch.Tensor, spec: TensorSpec, path: TreePath) -> bool:
        plan = self._plan
        before = len(plan.problems)
        if text := find_fake_problem(target):
            plan.add_problem(path, text)
        if not is_strided(target):
            return True
        if tuple(target.shape) != spec.shape:
            plan.add_problem(path, f"shape {tuple(target.shape)} in the target, {spec.shape} in the snapshot")
        if target.dtype != spec.dtype:
            check_cast(plan, target, spec.dtype, path)
        if (target.is_meta or spec.meta) and not plan.options.assign:
            where = "target" if target.is_meta else "snapshot"
            text = f"the tensor in the {where} is on the meta device; assign=True puts a new one in place"
            plan.add_problem(path, text)
        return len(plan.problems) == before

    def _match_grad(self, target: torch.Tensor, node: list[Json], path: TreePath, setter: ValueSetter | None) -> None:
        """Match a tensor that was saved with its gradient: both are loaded."""
        inner, grad = node[1], node[2]
        if self._plan.options.assign or not is_ordinary(target) or inner[0] != TENSOR or not target.is_leaf:
            self._replace(target, node, path, setter)
            return
        self._match_tensor(target, inner, path, setter)
        self._plan.nodes.append((f"{join_name(path)}.grad", grad))
        self._plan.read_to_device_of(grad, target, path)

        def prepare(reader: LeafReader) -> Callable[[], None]:
            value = fit_value(self._plan, target, reader.decode(grad, (*path, "grad")), (*path, "grad"))
            return lambda: setattr(target, "grad", value)

        self._plan.add_step((*path, "grad"), prepare, partial(keep_grad, target))

    def _match_parts(self, target: torch.Tensor, node: list[Json], path: TreePath, setter: ValueSetter | None) -> None:
        """Match a composite tensor, for example a sparse one: a new tensor replaces the target."""
        if is_ordinary(target) and not self._plan.options.assign:
            found = describe_node(node)
            text = f"the target has an ordinary tensor here, the snapshot {found}; assign=True puts that in place"
            self._plan.add_problem(path, text)
        else:
            self._replace(target, node, path, setter)

    def _replace(self, target: torch.Tensor, node: list[Json], path: TreePath, setter: ValueSetter | None) -> None:
        """Replace a target that cannot be filled, or must not be."""
        plan = self._plan
        if setter is None:
            text = "the saved tensor must replace the target, which is in a tuple or frozen dataclass"
            plan.add_problem(path, text)
            return
        plan.is_replaced = True
        plan.nodes.append((join_name(path), node))
        plan.read_to_device_of(node, target, path)

        def prepare(reader: LeafReader) -> Callable[[], None]:
            value = fit_replacement(plan, target, reader.decode(node, path), path)
            return lambda: setter(value)

        plan.add_step(path, prepare, setter.keep)

    def _match_dict(self, target: dict[Any, Any], node: Json, path: TreePath) -> None:
        children = find_children(node, PAIRS_START, self._plan.decode_plain)
        if children is None:
            self._plan.add_problem(path, f"the target has a dict here, the snapshot {describe_node(node)}")
            return
        found: list[Callable[[], None]] = []
        for key, item in target.items():
            if key in children:
                found.append(partial(self._match, item, children.pop(key), (*path, key), ItemSetter(target, key)))
            elif self._plan.options.strict:
                text = "the target has it, the snapshot does not"
                found.append(partial(self._plan.add_problem, (*path, key), text))
        for key in children if self._plan.options.strict else ():
            text = "the snapshot has it, the target does not"
            found.append(partial(self._plan.add_problem, (*path, key), text))
        self._waiting += reversed(found)

    def _match_list(self, target: list[Any], node: Json, path: TreePath) -> None:
        items = node[1:] if isinstance(node, list) and node[0] == "list" else None
        if items is None or len(items) != len(target):
            what = describe_node(node) if items is None else f"one of {len(items)}"
            self._plan.add_problem(path, f"the target has a list of {len(target)} here, the snapshot {what}")
            return
        for index in range(len(target) - 1, -1, -1):
            setter = ItemSetter(target, index)
            self._waiting.append(partial(self._match, target[index], items[index], (*path, index), setter))

    def _match_fixed(self, target: Any, node: Json, path: TreePath) -> None:
        """Match a tuple, named tuple or dataclass; only a dataclass that is not frozen takes new values."""
        if type(target) is tuple:
            members: dict[Any, Any] = dict(enumerate(target))
            found = dict(enumerate(node[1:])) if isinstance(node, list) and node[0] == "tuple" else None
        else:
            names = getattr(target, "_fields", None) or [item.name for item in fields(target)]
            members = {name: getattr(target, name) for name in names}
            found = find_children(node, FIELDS_START, self._plan.decode_plain)
        if found is None or found.keys() != members.keys():
            text = (
                f"the target has a {type(target).__name__} of {len(members)} here, the snapshot {describe_node(node)}"
            )
            self._plan.add_problem(path, text if found is None else f"{text} of {len(found)}")
            return
        is_open = not isinstance(target, tuple) and not type(target).__dataclass_params__.frozen
        for key, item in reversed(members.items()):
            setter = FieldSetter(target, key) if is_open else None
            self._waiting.append(partial(self._match, item, found[key], (*path, key), setter))

    def _match_plain(self, target: Any, node: Json, path: TreePath, setter: ValueSetter | None) -> None:
        """Replace a plain value; a container or a tensor may only replace None or a value of its kind."""
        plan = self._plan
        if target is not None and not _is_alike(target, node):
            plan.add_problem(path, f"the target has a {type(target).__name__} here, the snapshot {describe_node(node)}")
        elif setter is not None:
            plan.is_replaced = True
            plan.read_below(node, path)

            def prepare(reader: LeafReader) -> Callable[[], None]:
                value = decode_tree(node, types=plan.types, decode_leaf=reader.decode)
                return lambda: setter(value)

            plan.add_step(path, prepare, setter.keep)
        elif isinstance(node, list) and node[0] in (ARRAY, *BLOBS):
            plan.immutable_checks.append(ImmutableCheck(target, node, path))
        elif not self._is_same(target, node):
            plan.add_problem(path, FIXED)

    def _is_same(self, target: Any, node: Json) -> bool:
        """Return whether a plain value equals the saved one."""
        try:
            encoded = encode_tree(target, types=self._plan.types, encode_leaf=_refuse_leaf)
        except Unsupported:
            return False
        return canonical_json(encoded) == canonical_json(node)


def _refuse_leaf(value: object, path: TreePath) -> Json:
    raise refuse(value, path)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copies a tensor that was read into a target with other strides, another dtype or another device."""

    target: torch.Tensor
    node: list[Json]
    path: TreePath

    def __call__(self, reader: LeafReader) -> Callable[[], None]:
        saved = reader.decode(self.node, self.path)
        return lambda: copy_into(self.target, saved, what=join_name(self.path))


def _is_fixed(target: object) -> bool:
    """Return whether a target is a tuple, a named tuple or a dataclass."""
    if isinstance(target, tuple):
        return type(target) is tuple or isinstance(getattr(target, "_fields", None), tuple)
    return is_dataclass(target) and not isinstance(target, type)


def _is_alike(target: object, node: Json) -> bool:
    """Return whether a saved value may replace a plain value."""
    tag = node[0] if isinstance(node, list) else ""
    if isinstance(target, np.ndarray) or tag == ARRAY:
        return isinstance(target, np.ndarray) and tag == ARRAY
    if tag in ITEMS_START:
        return type(target).__name__ == tag
    return tag not in TENSOR_TAGS and tag not in KEYED_START


def find_children(node: Json, starts: Mapping[str, int], decode: Callable[[Json], Any]) -> dict[Any, Json] | None:
    """Return the children of a mapping node by their decoded keys; None for any other node."""
    if not isinstance(node, list) or node[0] not in starts:
        return None
    start = starts[node[0]]
    pairs = zip(node[start::2], node[start + 1 :: 2], strict=True)
    # Text keys need no decoding; there may be many keys, and decoding is the slowest part.
    return {key if type(key) is str else decode(key): child for key, child in pairs}


def _describe_kind(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    return str(tensor.layout).removeprefix("torch.") if tensor.layout != torch.strided else type(tensor).__name__


def match_state(plan: IntoPlan, target: Any, node: Json, path: TreePath) -> None:
    """Plan how a saved state is loaded into the object; existing tensors are filled in place where they match."""
    if isinstance(target, Composed):
        TreeMatcher(plan).match(target.__holdfast_parts__(), node, path, None)
    elif isinstance(target, torch.nn.Module):
        _match_module(plan, target, read_state(target), node, path, partial(restore_module, target, path=path))
    elif isinstance(target, NamedModule):
        _match_named(plan, target, node, path)
    elif isinstance(target, NamedOptimizer) or is_optimizer(target):
        _match_optimizer(plan, target, node, path)
    else:
        _match_other(plan, target, read_state(target, path=path), node, path)


def _match_other(
    plan: IntoPlan,
    target: Any,
    state: Any,
    node: Json,
    path: TreePath,
    new: Sequence[torch.Tensor] = (),
) -> None:
    """Plan to load an object through its own method, reusing the memory of its state where it matches.

    Of the tensors in `state`, those in `new` do not belong to the object.
    """
    are_new = {id(tensor) for tensor in new}
    if not plan.options.assign:
        _fill_where_it_fits(plan, state, node, path, are_new)
    plan.read_below(node, path)

    def prepare(reader: LeafReader) -> Callable[[], None]:
        state = decode_tree(node, types=plan.types, decode_leaf=reader.decode)
        return lambda: restore(target, state, path=path)

    optimizer = target.optimizer if isinstance(target, NamedOptimizer) else target
    keep = partial(keep_optimizer, optimizer) if is_optimizer(optimizer) else partial(keep_object, target)
    plan.add_step(path, prepare, keep, [each for _, each in iter_tensors(state) if id(each) not in are_new])


def _match_named(plan: IntoPlan, target: NamedModule, node: Json, path: TreePath) -> None:
    if plan.options.assign:
        plan.add_problem(path, "assign=True puts tensors in place by a module's own names; load into the module itself")
        return

    def write(state: dict[str, Any], *, assign: bool, strict: bool) -> None:
        with refusals_as_mismatch(target.module, path):
            target.write(state, strict)

    _match_module(plan, target.module, target.state_dict(), node, path, write)


def _match_module(
    plan: IntoPlan, target: torch.nn.Module, state: Any, node: Json, path: TreePath, write: Callable[..., None]
) -> None:
    """Match a module key by key; filling it is enough unless its class or hooks run code when it is loaded."""
    if plan.options.is_transaction and any(map(torch.nn.parameter.is_lazy, (*target.parameters(), *target.buffers()))):
        plan.add_problem(path, "some of its tensors are not initialised yet; run it once, or load without atomic=True")
        return
    trial = plan.branch()
    TreeMatcher(trial).match(state, node, path, None)
    if does_translate(target):
        # It may know other keys and shapes, and may convert values: it receives them as they were saved.
        _check_dtypes(plan, state, node, path)
        plan.claims += [] if trial.problems else trial.claims
    elif trial.problems or (is_plain_module(target) and not trial.is_replaced):
        plan.absorb(trial)
        return
    else:
        trial.steps.clear()
        plan.absorb(trial)
    plan.read_below(node, path)

    def prepare(reader: LeafReader) -> Callable[[], None]:
        loaded = decode_tree(node, types=plan.types, decode_leaf=reader.decode)
        if isinstance(loaded, dict):
            _fit_loaded(plan, state, loaded, path)
        return lambda: write(loaded, assign=plan.options.assign, strict=plan.options.strict)

    plan.add_step(path, prepare, partial(keep_module, target), [each for _, each in iter_tensors(state)])


def _fit_loaded(plan: IntoPlan, state: Mapping[str, Any], loaded: dict[str, Any], path: TreePath) -> None:
    """Make values that the module accepts: cut like its own, and parameters where it has parameters."""
    for key, value in loaded.items():
        current = state.get(key)
        if isinstance(current, torch.Tensor) and not torch.nn.parameter.is_lazy(current):
            can_replace = plan.options.assign
            loaded[key] = (
                fit_replacement(plan, current, value, (*path, key)) if can_replace else cut_like(current, value)
            )


def _check_dtypes(plan: IntoPlan, state: Any, node: Json, path: TreePath) -> None:
    for leaf_path, target, child in _iter_matching_tensors(state, node, path, plan.decode_plain):
        dtype = plan.find_saved(child, join_name(leaf_path)).spec.dtype
        if torch.nn.parameter.is_lazy(target):
            continue
        if dtype != target.dtype:
            check_cast(plan, target, dtype, leaf_path)
        if plan.options.assign:
            plan.read_to_device_of(child, target, leaf_path)


def _match_optimizer(plan: IntoPlan, target: Any, node: Json, path: TreePath) -> None:
    """Find what the optimizer would refuse, now or at its next step; and allocate memory for its state."""
    outer = target.optimizer if isinstance(target, NamedOptimizer) else target
    optimizer = unwrap(outer)
    state = target.state_dict()
    if not is_optimizer_state(state):  # a wrapper with a state of its own
        _match_other(plan, target, state, node, path)
        return
    # The dicts of parameters belong to the optimizer; planning must not change them.
    state["state"] = {key: dict(values) if type(values) is dict else values for key, values in state["state"].items()}
    new: list[torch.Tensor] = []
    if not has_load_hooks(outer, before_only=True):  # they may change all of it
        parts = find_children(node, PAIRS_START, plan.decode_plain)
        groups = parts.get("param_groups") if parts else None
        if parts is None or not isinstance(groups, list):
            plan.add_problem(path, f"the target has a {type(outer).__name__} here, the snapshot {describe_node(node)}")
            return
        if not _check_groups(plan, target, groups, path):
            return
        parameters = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
        keys = target.names if isinstance(target, NamedOptimizer) else range(len(parameters))
        named = {key: parameters[number] for number, key in enumerate(keys)}
        _check_optimizer_shapes(plan, state["state"], named, parts.get("state"), path)
        new = _add_memory(plan, state["state"], named, parts.get("state"), path)
    _match_other(plan, target, state, node, path, new)


def _check_groups(plan: IntoPlan, target: Any, groups: list[Json], path: TreePath) -> bool:
    """Add differences between parameter groups; for groups that torch.save wrote, after they were read."""
    saved = [find_children(group, PAIRS_START, plan.decode_plain) or {} for group in groups[1:]]
    params = [group.get("params") for group in saved]
    group_path = (*path, "param_groups")
    if any(_is_payload(node) for node in (groups, *params)):
        plan.checks.append(Check(groups, group_path, partial(_compare_loaded, target)))
        return True
    nodes = [node[1:] if isinstance(node, list) else [] for node in params]
    texts = _compare_groups(target, [[plan.decode_plain(name) for name in names] for names in nodes])
    for text in texts:
        plan.add_problem(group_path, text)
    return not texts


def _is_payload(node: Json) -> bool:
    return isinstance(node, list) and node[0] == PAYLOAD


def _compare_loaded(target: Any, groups: Any) -> list[str]:
    try:
        saved = [list(group["params"]) for group in groups]
    except (KeyError, TypeError):
        return [f"the snapshot has no parameter groups here but a {type(groups).__name__}"]
    return _compare_groups(target, saved)


def _compare_groups(target: Any, saved: list[list[Any]]) -> list[str]:
    """Return the differences between the parameters of saved groups and the optimizer's."""
    if isinstance(target, NamedOptimizer):
        return target.find_problems(saved)
    counts, target_counts = (
        [len(params) for params in saved],
        [len(group["params"]) for group in unwrap(target).param_groups],
    )
    text = f"parameter groups of {_join_counts(target_counts)} in the target, of {_join_counts(counts)} in the snapshot"
    return [] if counts == target_counts else [text]


def _check_optimizer_shapes(
    plan: IntoPlan, state: Any, parameters: Mapping[Any, torch.Tensor], node: Json, path: TreePath
) -> None:
    for leaf_path, tensor, child in _iter_matching_tensors(state, node, (*path, "state"), plan.decode_plain):
        parameter = parameters.get(leaf_path[len(path) + 1])
        # Only state with one value per item must have the shape of the parameter.
        must_fit = parameter is not None and tensor.shape == parameter.shape
        shape = plan.find_saved(child, join_name(leaf_path)).spec.shape
        if must_fit and tuple(tensor.shape) != shape:
            plan.add_problem(leaf_path, f"shape {tuple(tensor.shape)} in the target, {shape} in the snapshot")


def _add_memory(
    plan: IntoPlan, state: dict[Any, Any], parameters: Mapping[Any, torch.Tensor], node: Json, path: TreePath
) -> list[torch.Tensor]:
    """Allocate per-item state of a fresh optimizer for sharded parameters, cut like these.

    Otherwise each rank would read the whole state. Returns the new tensors.
    """
    new = []
    for leaf in iter_leaves(node):
        key, field = (*map(plan.decode_plain, leaf.path_json), None, None)[:2]
        parameter = parameters.get(key)
        if leaf.tag != TENSOR or parameter is None or len(leaf.path_json) != 2:
            continue
        spec = plan.find_saved(leaf.node, join_name((*path, "state", key, field))).spec
        is_read_together = plan.options.replicas != "each" or find_pieces(parameter) is not None
        if not is_read_together or spec.meta or not is_itemwise(field, spec.shape, parameter):
            continue
        current = state.setdefault(key, {}).get(field)
        if (
            not isinstance(current, torch.Tensor)
            or current.dtype != spec.dtype
            or type(current) is not _state_class(parameter)
        ):
            state[key][field] = torch.empty_like(parameter, dtype=spec.dtype, requires_grad=False)
            new.append(state[key][field])
    return new


def _state_class(parameter: torch.Tensor) -> type:
    return torch.Tensor if type(parameter) is torch.nn.Parameter else type(parameter)


def _join_counts(counts: list[int]) -> str:
    return ", ".join(map(str, counts)) or "none"


def _fill_where_it_fits(plan: IntoPlan, state: Any, node: Json, path: TreePath, are_new: Container[int]) -> None:
    """Reuse the memory of tensors that a state already has; whatever does not match gets new memory."""
    for leaf_path, target, child in _iter_matching_tensors(state, node, path, plan.decode_plain):
        name = join_name(leaf_path)
        ref, spec = plan.find_saved(child, name)
        memory = find_read_target(target, ref, spec)
        claim = make_claim(name, target, ref, spec)
        if memory is not None and claim is not None:
            plan.fill(memory, name, is_new=id(target) in are_new)
            plan.claims.append(claim._replace(number=ref.number))


def _iter_matching_tensors(
    target: Any, node: Json, path: TreePath, decode: Callable[[Json], Any]
) -> Iterator[tuple[TreePath, torch.Tensor, list[Json]]]:
    """Yield the tensors that a target and an encoded tree have at the same paths."""
    saved = {tuple(map(decode, leaf.path_json)): leaf.node for leaf in iter_leaves(node) if leaf.tag == TENSOR}
    for found, tensor in iter_tensors(target):
        if found in saved:
            yield (*path, *found), tensor, saved[found]
