"""Plans how objects that keep their state for themselves get it back: modules, optimizers, whatever has the methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from holdfast.repo.record import Json
from holdfast.snapshot.into_plan import IntoPlan
from holdfast.snapshot.leaves import TENSOR
from holdfast.snapshot.load import LeafReader
from holdfast.snapshot.match import TreeMatcher, check_cast, find_children, fit_replacement, tell
from holdfast.snapshot.places import find_place, make_claim
from holdfast.snapshot.restore import does_translate, is_plain_module, restore, restore_module
from holdfast.snapshot.stateful import read_state
from holdfast.trees.apply import iter_tensors
from holdfast.trees.encoding import decode_tree
from holdfast.trees.outline import PAIRS_START, Path, iter_leaves, join_name


def match_state(plan: IntoPlan, target: Any, node: Json, path: Path) -> None:
    """Plan how a state that was saved gets into the object; what it holds already is filled where that fits."""
    if isinstance(target, torch.nn.Module):
        _match_module(plan, target, node, path)
        return
    if isinstance(target, torch.optim.Optimizer):
        _check_optimizer(plan, target, node, path)
    if not plan.options.assign:
        _fill_where_it_fits(plan, target.state_dict(), node, path)
    plan.read_below(node, path)

    def prepare(reader: LeafReader) -> Callable[[], None]:
        state = decode_tree(node, types=plan.types, decode_leaf=reader.decode)
        return lambda: restore(target, state, path=path)

    plan.steps.append(prepare)


def _match_module(plan: IntoPlan, target: torch.nn.Module, node: Json, path: Path) -> None:
    """Match a module key by key; unless it does something of its own when it is loaded, filling it is all."""
    state = read_state(target)
    trial = plan.branch()
    TreeMatcher(trial, match_state).match(state, node, path, None)
    if does_translate(target):
        # It may know other keys and shapes than its own, and change values on the way: it gets them as they were saved.
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
        if plan.options.assign and isinstance(loaded, dict):
            _fit_assigned(plan, state, loaded, path)
        options = plan.options
        return lambda: restore_module(target, loaded, path=path, assign=options.assign, strict=options.strict)

    plan.steps.append(prepare)


def _fit_assigned(plan: IntoPlan, state: Mapping[str, Any], loaded: dict[str, Any], path: Path) -> None:
    for key, value in loaded.items():
        held = state.get(key)
        if isinstance(held, torch.Tensor) and not torch.nn.parameter.is_lazy(held):
            loaded[key] = fit_replacement(plan, held, value, (*path, key))


def _check_dtypes(plan: IntoPlan, state: Any, node: Json, path: Path) -> None:
    for leaf_path, target, child in _iter_pairs(state, node, path, plan.decode_plain):
        dtype = plan.find_meaning(child, join_name(leaf_path)).spec.dtype
        if torch.nn.parameter.is_lazy(target):
            continue
        if dtype != target.dtype:
            check_cast(plan, target, dtype, leaf_path)
        if plan.options.assign:
            plan.send(child, target, leaf_path)


def _check_optimizer(plan: IntoPlan, target: torch.optim.Optimizer, node: Json, path: Path) -> None:
    """Find what the optimizer itself would refuse, or find out only at its next step."""
    if target._optimizer_load_state_dict_pre_hooks:
        return  # they may change all of it
    parts = find_children(node, PAIRS_START, plan.decode_plain)
    groups = parts.get("param_groups") if parts else None
    if parts is None or not isinstance(groups, list):
        plan.add_problem(path, f"the target has a {type(target).__name__} here, the snapshot {tell(node)}")
        return
    saved = [find_children(group, PAIRS_START, plan.decode_plain) or {} for group in groups[1:]]
    counts = [len(group.get("params", ["list"])) - 1 for group in saved]
    held = [len(group["params"]) for group in target.param_groups]
    if counts != held:
        text = f"parameter groups of {_list(held)} in the target, of {_list(counts)} in the snapshot"
        plan.add_problem((*path, "param_groups"), text)
        return
    _check_optimizer_shapes(plan, target, parts.get("state"), path)


def _check_optimizer_shapes(plan: IntoPlan, target: torch.optim.Optimizer, node: Json, path: Path) -> None:
    state = target.state_dict()["state"]
    shapes = [parameter.shape for group in target.param_groups for parameter in group["params"]]
    for leaf_path, held, child in _iter_pairs(state, node, (*path, "state"), plan.decode_plain):
        number = leaf_path[len(path) + 1]
        # Only what has a value for each item of the parameter has to have its shape.
        is_itemwise = isinstance(number, int) and number < len(shapes) and held.shape == shapes[number]
        shape = plan.find_meaning(child, join_name(leaf_path)).spec.shape
        if is_itemwise and tuple(held.shape) != shape:
            plan.add_problem(leaf_path, f"shape {tuple(held.shape)} in the target, {shape} in the snapshot")


def _list(counts: list[int]) -> str:
    return ", ".join(map(str, counts)) or "none"


def _fill_where_it_fits(plan: IntoPlan, state: Any, node: Json, path: Path) -> None:
    """Use the memory of tensors that a state holds already; whatever does not fit gets new memory."""
    for leaf_path, target, child in _iter_pairs(state, node, path, plan.decode_plain):
        name = join_name(leaf_path)
        number, entry, spec = plan.find_meaning(child, name)
        place = find_place(target, entry, spec)
        claim = make_claim(name, target, entry, spec)
        if place is not None and claim is not None:
            plan.fill(number, place, name)
            plan.claims.append(claim._replace(number=number))


def _iter_pairs(
    target: Any, node: Json, path: Path, decode: Callable[[Json], Any]
) -> Iterator[tuple[Path, torch.Tensor, list[Json]]]:
    """Yield the tensors that a target and an encoded tree have at the same paths."""
    saved = {tuple(map(decode, leaf.path_json)): leaf.node for leaf in iter_leaves(node) if leaf.tag == TENSOR}
    for found, tensor in iter_tensors(target):
        if found in saved:
            yield (*path, *found), tensor, saved[found]
