"""Plans how objects with `load_state_dict` are restored: modules, optimizers and others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from holdfast.json_text import Json
from holdfast.snapshot.into.in_place import cut_like, find_pieces, find_place, make_claim
from holdfast.snapshot.into.match import TreeMatcher, check_cast, describe_node, find_children, fit_replacement
from holdfast.snapshot.into.named import Composed, NamedModule, NamedOptimizer
from holdfast.snapshot.into.plan import Check, IntoPlan
from holdfast.snapshot.into.restore import (
    does_translate,
    is_itemwise,
    is_plain_module,
    refusals,
    restore,
    restore_module,
)
from holdfast.snapshot.into.undo import keep_module, keep_object, keep_optimizer
from holdfast.snapshot.leaves import PAYLOAD, TENSOR
from holdfast.snapshot.load.load import LeafReader
from holdfast.snapshot.stateful import read_state
from holdfast.trees.apply import iter_tensors
from holdfast.trees.encoding import decode_tree
from holdfast.trees.outline import PAIRS_START, TreePath, iter_leaves, join_name


def match_state(plan: IntoPlan, target: Any, node: Json, path: TreePath) -> None:
    """Plan how a saved state is loaded into the object; existing tensors are filled in place where they match."""
    if isinstance(target, Composed):
        TreeMatcher(plan, match_state).match(target.__holdfast_parts__(), node, path, None)
    elif isinstance(target, torch.nn.Module):
        _match_module(plan, target, read_state(target), node, path, partial(restore_module, target, path=path))
    elif isinstance(target, NamedModule):
        _match_named(plan, target, node, path)
    elif isinstance(target, torch.optim.Optimizer | NamedOptimizer):
        _match_optimizer(plan, target, node, path)
    else:
        _match_other(plan, target, target.state_dict(), node, path)


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
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    keep = partial(keep_optimizer, optimizer) if is_optimizer else partial(keep_object, target)
    plan.add_step(path, prepare, keep, [each for _, each in iter_tensors(state) if id(each) not in are_new])


def _match_named(plan: IntoPlan, target: NamedModule, node: Json, path: TreePath) -> None:
    if plan.options.assign:
        plan.add_problem(path, "assign=True puts tensors in place by a module's own names; load into the module itself")
        return

    def write(state: dict[str, Any], *, assign: bool, strict: bool) -> None:
        with refusals(target.module, path):
            target.write(state, strict)

    _match_module(plan, target.module, target.state_dict(), node, path, write)


def _match_module(
    plan: IntoPlan, target: torch.nn.Module, state: Any, node: Json, path: TreePath, write: Callable[..., None]
) -> None:
    """Match a module key by key; filling it is enough unless it runs code of its own when loaded."""
    if plan.options.atomic and any(map(torch.nn.parameter.is_lazy, (*target.parameters(), *target.buffers()))):
        plan.add_problem(path, "some of its tensors are not initialised yet; run it once, or load without atomic=True")
        return
    trial = plan.branch()
    TreeMatcher(trial, match_state).match(state, node, path, None)
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
        held = state.get(key)
        if isinstance(held, torch.Tensor) and not torch.nn.parameter.is_lazy(held):
            can_replace = plan.options.assign
            loaded[key] = fit_replacement(plan, held, value, (*path, key)) if can_replace else cut_like(held, value)


def _check_dtypes(plan: IntoPlan, state: Any, node: Json, path: TreePath) -> None:
    for leaf_path, target, child in _iter_pairs(state, node, path, plan.decode_plain):
        dtype = plan.find_meaning(child, join_name(leaf_path)).spec.dtype
        if torch.nn.parameter.is_lazy(target):
            continue
        if dtype != target.dtype:
            check_cast(plan, target, dtype, leaf_path)
        if plan.options.assign:
            plan.send(child, target, leaf_path)


def _match_optimizer(
    plan: IntoPlan, target: torch.optim.Optimizer | NamedOptimizer, node: Json, path: TreePath
) -> None:
    """Find what the optimizer would refuse, now or at its next step; and allocate memory for its state."""
    optimizer = target.optimizer if isinstance(target, NamedOptimizer) else target
    state = target.state_dict()
    # The dicts of parameters belong to the optimizer; planning must not change them.
    state["state"] = {key: dict(held) if type(held) is dict else held for key, held in state["state"].items()}
    new: list[torch.Tensor] = []
    if not optimizer._optimizer_load_state_dict_pre_hooks:  # they may change all of it
        parts = find_children(node, PAIRS_START, plan.decode_plain)
        groups = parts.get("param_groups") if parts else None
        if parts is None or not isinstance(groups, list):
            plan.add_problem(
                path, f"the target has a {type(optimizer).__name__} here, the snapshot {describe_node(node)}"
            )
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
    held = [group.get("params") for group in saved]
    group_path = (*path, "param_groups")
    if any(_is_payload(node) for node in (groups, *held)):
        plan.checks.append(Check(groups, group_path, partial(_compare_loaded, target)))
        return True
    nodes = [node[1:] if isinstance(node, list) else [] for node in held]
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
    counts, own = [len(params) for params in saved], [len(group["params"]) for group in target.param_groups]
    text = f"parameter groups of {_list(own)} in the target, of {_list(counts)} in the snapshot"
    return [] if counts == own else [text]


def _check_optimizer_shapes(
    plan: IntoPlan, state: Any, parameters: Mapping[Any, torch.Tensor], node: Json, path: TreePath
) -> None:
    for leaf_path, held, child in _iter_pairs(state, node, (*path, "state"), plan.decode_plain):
        parameter = parameters.get(leaf_path[len(path) + 1])
        # Only state with one value per item must have the shape of the parameter.
        must_fit = parameter is not None and held.shape == parameter.shape
        shape = plan.find_meaning(child, join_name(leaf_path)).spec.shape
        if must_fit and tuple(held.shape) != shape:
            plan.add_problem(leaf_path, f"shape {tuple(held.shape)} in the target, {shape} in the snapshot")


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
        spec = plan.find_meaning(leaf.node, join_name((*path, "state", key, field))).spec
        is_read_together = plan.options.replicas != "each" or find_pieces(parameter) is not None
        if not is_read_together or spec.meta or not is_itemwise(field, spec.shape, parameter):
            continue
        held = state.setdefault(key, {}).get(field)
        if not isinstance(held, torch.Tensor) or held.dtype != spec.dtype or type(held) is not _kind(parameter):
            state[key][field] = torch.empty_like(parameter, dtype=spec.dtype, requires_grad=False)
            new.append(state[key][field])
    return new


def _kind(parameter: torch.Tensor) -> type:
    return torch.Tensor if type(parameter) is torch.nn.Parameter else type(parameter)


def _list(counts: list[int]) -> str:
    return ", ".join(map(str, counts)) or "none"


def _fill_where_it_fits(plan: IntoPlan, state: Any, node: Json, path: TreePath, are_new: Container[int]) -> None:
    """Reuse the memory of tensors that a state already has; whatever does not match gets new memory."""
    for leaf_path, target, child in _iter_pairs(state, node, path, plan.decode_plain):
        name = join_name(leaf_path)
        at, spec = plan.find_meaning(child, name)
        place = find_place(target, at, spec)
        claim = make_claim(name, target, at, spec)
        if place is not None and claim is not None:
            plan.fill(place, name, is_new=id(target) in are_new)
            plan.claims.append(claim._replace(number=at.number))


def _iter_pairs(
    target: Any, node: Json, path: TreePath, decode: Callable[[Json], Any]
) -> Iterator[tuple[TreePath, torch.Tensor, list[Json]]]:
    """Yield the tensors that a target and an encoded tree have at the same paths."""
    saved = {tuple(map(decode, leaf.path_json)): leaf.node for leaf in iter_leaves(node) if leaf.tag == TENSOR}
    for found, tensor in iter_tensors(target):
        if found in saved:
            yield (*path, *found), tensor, saved[found]
