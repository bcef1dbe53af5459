"""Compares a target with an encoded tree and plans how to load it; changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from holdfast.errors import Unsupported
from holdfast.json_text import Json, canonical_json
from holdfast.snapshot.into.in_place import (
    copy_into,
    cut_like,
    find_place,
    find_shared_place,
    is_ordinary,
    is_strided,
    make_claim,
    repeats_items,
)
from holdfast.snapshot.into.plan import ImmutableCheck, IntoPlan, Step
from holdfast.snapshot.into.undo import FieldSetter, PerRankSetter, Put, Setter, keep_grad, keep_tensors
from holdfast.snapshot.leaves import ARRAY, BLOBS, GRAD, PARTS, PAYLOAD, PICKLE, TENSOR
from holdfast.snapshot.load.load import LeafReader
from holdfast.snapshot.stateful import is_stateful
from holdfast.tensors.dtypes import items_per_byte
from holdfast.tensors.fakes import find_fake_problem
from holdfast.tensors.sharding.sharded import PerRank, Shard
from holdfast.tensors.spec import TensorSpec, can_convert, find_role, give_role
from holdfast.trees.encoding import decode_tree, encode_tree, refuse
from holdfast.trees.outline import FIELDS_START, ITEMS_START, KEYED_START, PAIRS_START, TreePath, join_name

MatchState = Callable[[IntoPlan, Any, Json, TreePath], None]
"""Plans how the state of an object with `load_state_dict` is restored."""
FIXED: Final = "it differs and stands in a tuple or frozen dataclass, which cannot be changed"
_TENSOR_TAGS: Final = (TENSOR, PARTS, GRAD)
_NAMES: Final[Mapping[str, str]] = {
    TENSOR: "a tensor",
    GRAD: "a tensor with its gradient",
    ARRAY: "an array",
    PICKLE: "a pickled object",
    PAYLOAD: "what torch.save wrote",
    "odict": "an OrderedDict",
    "odict+": "an OrderedDict",
    "counter+": "a counter",
    "int": "an int",
    "enum": "an enum",
}


class TreeMatcher:
    """Matches trees of containers and leaves; objects with a state are passed to another function."""

    def __init__(self, plan: IntoPlan, match_state: MatchState) -> None:
        """Add what is to be done to `plan`."""
        self._plan = plan
        self._match_state = match_state
        self._waiting: list[Callable[[], None]] = []

    def match(self, target: Any, node: Json, path: TreePath, put: Put | None) -> None:
        """Plan how `node` is loaded into `target`, or replaces it."""
        # An explicit stack instead of recursion: the caller may be close to the recursion limit.
        self._waiting.append(partial(self._match, target, node, path, put))
        while self._waiting:
            self._waiting.pop()()

    def _match(self, target: Any, node: Json, path: TreePath, put: Put | None) -> None:
        if isinstance(target, torch.Tensor):
            self._match_tensor(target, node, path, put)
        elif isinstance(target, PerRank):
            setter = None if put is None else PerRankSetter(put)
            self._waiting.append(partial(self._match, target.value, node, path, setter))
        elif isinstance(target, Shard):
            self._match_shard(target, node, path)
        elif is_stateful(target):
            self._match_state(self._plan, target, node, path)
        elif isinstance(target, dict):
            self._match_dict(target, node, path)
        elif type(target) is list:
            self._match_list(target, node, path)
        elif _is_fixed(target):
            self._match_fixed(target, node, path)
        else:
            self._match_plain(target, node, path, put)

    def _match_tensor(self, target: torch.Tensor, node: Json, path: TreePath, put: Put | None) -> None:
        tag = node[0] if isinstance(node, list) else ""
        if tag not in _TENSOR_TAGS:
            self._plan.add_problem(path, f"the target has a tensor here, the snapshot {describe_node(node)}")
        elif torch.nn.parameter.is_lazy(target):
            self._plan.add_problem(path, "the tensor in the target is not initialised yet; run its module once")
        elif tag == GRAD:
            self._match_grad(target, node, path, put)
        elif tag == PARTS:
            self._match_parts(target, node, path, put)
        elif not is_strided(target) and not self._plan.options.assign:
            text = f"the target has a {_describe_kind(target)} tensor here, the snapshot an ordinary one"
            self._plan.add_problem(path, f"{text}; assign=True puts that in place")
        else:
            self._match_ordinary(target, node, path, put)

    def _match_shard(self, target: Shard, node: Json, path: TreePath) -> None:
        """Match a declared box of a tensor: that box of the saved tensor is loaded into it."""
        plan = self._plan
        if not isinstance(node, list) or node[0] != TENSOR:
            plan.add_problem(path, f"the target has a part of a tensor here, the snapshot {describe_node(node)}")
            return
        at, spec = plan.find_meaning(node, join_name(path))
        if target.global_shape != spec.shape:
            plan.add_problem(path, f"shape {target.global_shape} in the target, {spec.shape} in the snapshot")
        elif target.tensor.dtype != spec.dtype:
            plan.add_problem(path, f"dtype {target.tensor.dtype} in the target, {spec.dtype} in the snapshot")
        else:
            place = find_shared_place(target, target.tensor, at, spec)
            if place is None:
                plan.add_problem(path, "what was saved is not in C order; load it, and cut it yourself")
            else:
                plan.fill(place, join_name(path))

    def _match_ordinary(self, target: torch.Tensor, node: list[Json], path: TreePath, put: Put | None) -> None:
        plan = self._plan
        name = join_name(path)
        at, spec = plan.find_meaning(node, name)
        if not self._check_fit(target, spec, path):
            return
        if plan.options.assign and (put is not None or target.is_meta or spec.meta):
            self._replace(target, node, path, put)
            return
        if target.numel() == 0:
            return
        claim = make_claim(name, target, at, spec)
        if claim is not None:
            plan.claims.append(claim)
        place = find_place(target, at, spec)
        if place is not None:
            plan.fill(place, name)
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

    def _match_grad(self, target: torch.Tensor, node: list[Json], path: TreePath, put: Put | None) -> None:
        """Match a tensor that was saved with its gradient: both are loaded."""
        inner, grad = node[1], node[2]
        if self._plan.options.assign or not is_ordinary(target) or inner[0] != TENSOR or not target.is_leaf:
            self._replace(target, node, path, put)
            return
        self._match_tensor(target, inner, path, put)
        self._plan.nodes.append((f"{join_name(path)}.grad", grad))
        self._plan.send(grad, target, path)

        def prepare(reader: LeafReader) -> Callable[[], None]:
            value = _fit(self._plan, target, reader.decode(grad, (*path, "grad")), (*path, "grad"))
            return lambda: setattr(target, "grad", value)

        self._plan.add_step((*path, "grad"), prepare, partial(keep_grad, target))

    def _match_parts(self, target: torch.Tensor, node: list[Json], path: TreePath, put: Put | None) -> None:
        """Match a composite tensor, for example a sparse one: a new tensor replaces the target."""
        if is_ordinary(target) and not self._plan.options.assign:
            found = describe_node(node)
            text = f"the target has an ordinary tensor here, the snapshot {found}; assign=True puts that in place"
            self._plan.add_problem(path, text)
        else:
            self._replace(target, node, path, put)

    def _replace(self, target: torch.Tensor, node: list[Json], path: TreePath, put: Put | None) -> None:
        """Replace a target that cannot be filled, or must not be."""
        plan = self._plan
        if put is None:
            text = "what was saved must take the target's place, which is in a tuple or frozen dataclass"
            plan.add_problem(path, text)
            return
        plan.is_replaced = True
        plan.nodes.append((join_name(path), node))
        plan.send(node, target, path)

        def prepare(reader: LeafReader) -> Callable[[], None]:
            value = fit_replacement(plan, target, reader.decode(node, path), path)
            return lambda: put(value)

        plan.add_step(path, prepare, put.keep)

    def _match_dict(self, target: dict[Any, Any], node: Json, path: TreePath) -> None:
        children = find_children(node, PAIRS_START, self._plan.decode_plain)
        if children is None:
            self._plan.add_problem(path, f"the target has a dict here, the snapshot {describe_node(node)}")
            return
        found: list[Callable[[], None]] = []
        for key, item in target.items():
            if key in children:
                found.append(partial(self._match, item, children.pop(key), (*path, key), Setter(target, key)))
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
            put = Setter(target, index)
            self._waiting.append(partial(self._match, target[index], items[index], (*path, index), put))

    def _match_fixed(self, target: Any, node: Json, path: TreePath) -> None:
        """Match a tuple, named tuple or dataclass; only a dataclass that is not frozen takes new values."""
        if type(target) is tuple:
            held: dict[Any, Any] = dict(enumerate(target))
            found = dict(enumerate(node[1:])) if isinstance(node, list) and node[0] == "tuple" else None
        else:
            names = getattr(target, "_fields", None) or [item.name for item in fields(target)]
            held = {name: getattr(target, name) for name in names}
            found = find_children(node, FIELDS_START, self._plan.decode_plain)
        if found is None or found.keys() != held.keys():
            text = f"the target has a {type(target).__name__} of {len(held)} here, the snapshot {describe_node(node)}"
            self._plan.add_problem(path, text if found is None else f"{text} of {len(found)}")
            return
        is_open = not isinstance(target, tuple) and not type(target).__dataclass_params__.frozen
        for key, item in reversed(held.items()):
            put = FieldSetter(target, key) if is_open else None
            self._waiting.append(partial(self._match, item, found[key], (*path, key), put))

    def _match_plain(self, target: Any, node: Json, path: TreePath, put: Put | None) -> None:
        """Replace a plain value; a container or a tensor may only replace None or a value of its kind."""
        plan = self._plan
        if target is not None and not _is_alike(target, node):
            plan.add_problem(path, f"the target has a {type(target).__name__} here, the snapshot {describe_node(node)}")
        elif put is not None:
            plan.is_replaced = True
            plan.read_below(node, path)

            def prepare(reader: LeafReader) -> Callable[[], None]:
                value = decode_tree(node, types=plan.types, decode_leaf=reader.decode)
                return lambda: put(value)

            plan.add_step(path, prepare, put.keep)
        elif isinstance(node, list) and node[0] in (ARRAY, *BLOBS):
            plan.looks.append(ImmutableCheck(target, node, path))
        elif not self._is_same(target, node):
            plan.add_problem(path, FIXED)

    def _is_same(self, target: Any, node: Json) -> bool:
        """Tell whether a plain value equals the saved one."""
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


def fit_replacement(plan: IntoPlan, target: torch.Tensor, value: Any, path: TreePath) -> Any:
    """Return the replacement of a target: converted to its dtype if allowed, and a parameter if the target was one."""
    value = cut_like(target, _fit(plan, target, value, path))
    is_parameter = isinstance(target, torch.nn.Parameter)
    if is_parameter and isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        value = torch.nn.Parameter(value, requires_grad=target.requires_grad)
    return value


def _fit(plan: IntoPlan, target: torch.Tensor, value: Any, path: TreePath) -> Any:
    """Return a tensor of the target's shape and dtype, converted if allowed."""
    if not isinstance(value, torch.Tensor):
        return value
    # The shape and dtype of a composite tensor are known only now.
    if not (target.is_nested or value.is_nested) and target.shape != value.shape:
        text = f"shape {tuple(target.shape)} in the target, {tuple(value.shape)} in the snapshot"
        plan.add_problem(path, text)
    if target.dtype != value.dtype and check_cast(plan, target, value.dtype, path):
        # One object stays one object.
        held = plan.converted.setdefault((id(value), target.dtype), (value, _convert(value, target.dtype)))
        return held[1]
    return value


def check_cast(plan: IntoPlan, target: torch.Tensor, saved: torch.dtype, path: TreePath) -> bool:
    """Tell whether the saved dtype may be converted to the target's; otherwise add a problem."""
    text = f"{target.dtype} in the target, {saved} in the snapshot"
    if not plan.options.cast:
        plan.add_problem(path, f"{text}; cast=True converts")
    elif not (can_convert(saved) and (target.is_quantized or can_convert(target.dtype))):
        plan.add_problem(path, f"{text}, which torch cannot convert; give the target that dtype")
    else:
        return True
    return False


def _convert(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as another dtype: in the same role, and with its gradient if it can have one."""
    is_smooth = dtype.is_floating_point or dtype.is_complex
    made = give_role(value.detach().to(dtype), find_role(value), requires_grad=value.requires_grad and is_smooth)
    if is_smooth and value.is_leaf and value.grad is not None:
        made.grad = value.grad.to(dtype)
    return made


def _is_fixed(target: object) -> bool:
    """Tell whether a target is a tuple, a named tuple or a dataclass."""
    if isinstance(target, tuple):
        return type(target) is tuple or isinstance(getattr(target, "_fields", None), tuple)
    return is_dataclass(target) and not isinstance(target, type)


def _is_alike(target: object, node: Json) -> bool:
    """Tell whether a saved value may replace a plain value."""
    tag = node[0] if isinstance(node, list) else ""
    if isinstance(target, np.ndarray) or tag == ARRAY:
        return isinstance(target, np.ndarray) and tag == ARRAY
    if tag in ITEMS_START:
        return type(target).__name__ == tag
    return tag not in _TENSOR_TAGS and tag not in KEYED_START


def find_children(node: Json, starts: Mapping[str, int], decode: Callable[[Json], Any]) -> dict[Any, Json] | None:
    """Return the children of a mapping node by their decoded keys; None for any other node."""
    if not isinstance(node, list) or node[0] not in starts:
        return None
    start = starts[node[0]]
    pairs = zip(node[start::2], node[start + 1 :: 2], strict=True)
    # Text keys need no decoding; there may be many keys, and decoding is the slowest part.
    return {key if type(key) is str else decode(key): child for key, child in pairs}


def describe_node(node: Json) -> str:
    """Describe a node in words, for an error."""
    if node is None:
        return "None"
    if not isinstance(node, list):
        name = type(node).__name__
        return _NAMES.get(name, f"a {name}")
    if node[0] == PARTS:
        return f"a {node[1]} tensor"
    return _NAMES.get(node[0], f"a {str(node[0]).lstrip('@')}")


def _describe_kind(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
