"""Objects with `state_dict`: modules, schedulers and others, and optimizers inside wrappers of frameworks."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Any, Final, Protocol, cast

import numpy as np
import torch

from holdfast.errors import Unsupported
from holdfast.tensors.sharding import PerRank, Shard
from holdfast.trees.outline import TreePath, join_name
from holdfast.trees.pick import replace_by_prefix

_MAX_DEPTH: Final = 200
_FSDP: Final = "torch.distributed.fsdp._fully_shard."
_Module = torch.nn.Module

NO_POSITION: Final = (
    "a DataLoader does not save its position; give it a batch_sampler with state_dict and load_state_dict,"
    " such as holdfast.ResumableSampler, and save that; or use a loader that saves its own position, such as"
    " torchdata's StatefulDataLoader (for Accelerate: use_stateful_dataloader=True)"
)

NotePerRank = Callable[[TreePath], None]


def is_stateful(value: object) -> bool:
    """Return whether `value` is an instance with both methods; a class with the methods is not one."""
    if isinstance(value, type | torch.Tensor):
        return False
    try:
        # Not isinstance() of the protocol: from Python 3.12 it does not see methods that a wrapper forwards.
        return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    except Exception:  # noqa: BLE001  # a property that raises anything: the object has no such method now
        return False


def read_state(value: Any, *, path: TreePath = ()) -> Any:
    """Return the state of an object; for a compiled or data-parallel module, under the names of the wrapped module.

    Raises Unsupported for an object that could not be loaded again.
    """
    verify_loadable(value, path=path)
    state = _read_loader(value, path) if isinstance(value, torch.utils.data.DataLoader) else value.state_dict()
    prefix = find_wrapping(value)
    if prefix:
        replace_by_prefix(state, prefix, "")
        unwrap_metadata(state, prefix)
    return state


def _read_loader(loader: Any, path: TreePath) -> Any:
    """Return the state of a loader; raise Unsupported for a wrapper around a loader that has no state."""
    try:
        return loader.state_dict()
    except AttributeError as error:
        raise Unsupported(f"{join_name(path) or 'the tree'}: {NO_POSITION} ({error})") from error


def unwrap_metadata(state: Any, prefix: str) -> None:
    """Rename the module versions in a state dict's metadata to the names of the wrapped modules."""
    metadata = getattr(state, "_metadata", None)
    if isinstance(metadata, dict):
        # A module's name has no dot at its end; the outermost module's is empty.
        inner = {f"{name}." if name else "": value for name, value in metadata.items()}
        state._metadata = OrderedDict(
            (name.removeprefix(prefix).removesuffix("."), value)
            for name, value in inner.items()
            if name.startswith(prefix)
        )


def find_wrapping(value: object) -> str:
    """Return the prefix that wrappers add to a module's names; "" if there is none, or if a wrapper changes states."""
    prefix = ""
    while isinstance(value, torch.nn.Module) and not _has_state_hooks(value):
        if isinstance(value, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            prefix, value = f"{prefix}module.", value.module
        elif "_orig_mod" in value._modules:
            prefix, value = f"{prefix}_orig_mod.", value._modules["_orig_mod"]
        else:
            return prefix
    return prefix


def _has_state_hooks(module: torch.nn.Module) -> bool:
    return has_hooks(module._state_dict_hooks, module._load_state_dict_pre_hooks)


def has_hooks(*tables: Mapping[int, Any]) -> bool:
    """Return whether there are hooks other than those of `fully_shard`, which reshard and change no state."""
    return any(not _is_of_fsdp(hook) for hooks in tables for hook in hooks.values())


def _is_of_fsdp(hook: Any) -> bool:
    # Torch wraps some hooks in an object.
    return str(getattr(hook, "hook", hook).__module__).startswith(_FSDP)


def expand(tree: object, *, note_per_rank: NotePerRank = lambda path: None) -> object:
    """Return the tree with each stateful object replaced by its state; containers without any are not copied.

    `note_per_rank` is called for plain values of the tree that are declared per rank.
    """
    return _run(_Expansion(note_per_rank).expand, tree, ())


Walk = Generator[tuple[Any, TreePath], Any, Any]
"""Yields a child with its path, is sent the child's replacement, and returns the replacement of the whole."""


def _run(walk: Callable[[Any, TreePath], Walk], value: Any, path: TreePath) -> Any:
    """Run a recursive walk on an explicit stack, because the caller may be close to the recursion limit."""
    walks = [walk(value, path)]
    result = None
    while walks:
        try:
            child, child_path = walks[-1].send(result)
        except StopIteration as done:
            result = done.value
            walks.pop()
        else:
            walks.append(walk(child, child_path))
            result = None
    return result


class _Expansion:
    """One pass over a tree; nesting that is too deep is left for the encoder to refuse."""

    def __init__(self, note_per_rank: NotePerRank) -> None:
        self._note_per_rank = note_per_rank
        # Keyed by `id()`, and each kept alive: containers may be shared, and states are new objects.
        self._known: dict[int, tuple[object, object]] = {}
        self._open: set[int] = set()

    def expand(self, value: Any, path: TreePath) -> Walk:
        kind = type(value)
        # Most values are plain; a protocol check is slower than a comparison of types.
        if kind in _PLAIN or isinstance(value, torch.Tensor) or len(path) > _MAX_DEPTH:
            return value
        if id(value) in self._open:
            name = join_name(path)
            raise Unsupported(f"{name}: a container that contains itself cannot be saved; break the cycle")
        if id(value) not in self._known:
            self._open.add(id(value))
            self._known[id(value)] = (value, (yield from self._expand(value, kind, path)))
            self._open.discard(id(value))
        return self._known[id(value)][1]

    def _expand(self, value: Any, kind: Any, path: TreePath) -> Walk:
        if kind in _DICTS:
            changed = {}
            for key, item in value.items():
                # Most values are tensors, which are never replaced.
                new = item if type(item) in _NEVER_EXPANDED else (yield item, (*path, key))
                if new is not item:
                    changed[key] = new
            if not changed:
                return value
            expanded = copy(value)
            expanded.update(changed)
            return expanded
        if kind in (list, tuple) or _is_named_tuple(value):
            members = []
            for index, item in enumerate(value):
                members.append(item if type(item) in _NEVER_EXPANDED else (yield item, (*path, index)))
            if all(new is old for new, old in zip(members, value, strict=True)):
                return value
            return kind(*members) if _is_named_tuple(value) else kind(members)
        if isinstance(value, PerRank):
            expanded = yield value.value, path
            return _run(partial(_declare, note=self._note_per_rank), expanded, path)
        if is_stateful(value):
            return (yield read_state(value, path=path), path)
        return value


def _declare(value: Any, path: TreePath, *, note: NotePerRank) -> Walk:
    """Return a tree with every leaf declared per rank; `note` is called for values that are not leaves."""
    kind = type(value)
    if kind in _DICTS:
        declared = copy(value)
        for key, item in value.items():
            declared[key] = yield item, (*path, key)
        return declared
    if kind in (list, tuple) or _is_named_tuple(value):
        members = []
        for index, item in enumerate(value):
            members.append((yield item, (*path, index)))
        return kind(*members) if _is_named_tuple(value) else kind(members)
    if isinstance(value, _LEAVES):
        return PerRank(value)
    if not isinstance(value, PerRank):
        note(path)
    return value


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple)


_LEAVES: Final = (torch.Tensor, Shard, np.ndarray, str, bytes, bytearray)
_DICTS: Final = frozenset({dict, OrderedDict, defaultdict})
_PLAIN: Final = frozenset({int, float, str, bool, type(None), bytes})
_NEVER_EXPANDED: Final = _PLAIN | {torch.Tensor, torch.nn.Parameter}


def verify_loadable(value: Any, *, path: TreePath = ()) -> None:
    """Raise Unsupported, with the name of the leaf, if an object's methods cannot be called as a load calls them."""
    problem = _find_problem(value)
    if problem:
        raise Unsupported(f"{join_name(path) or 'the tree'}: {problem}")


def _find_problem(value: Any) -> str:
    could = f"a {type(value).__name__} could not be loaded again:"
    if not _accepts(value.state_dict):
        return f"{could} its state_dict cannot be called without arguments; save what it returns"
    if not _accepts(value.load_state_dict, {}):
        return f"{could} its load_state_dict cannot be called with the state alone; save what its state_dict returns"
    if _is_of_class(value, "load_state_dict") and not _is_of_class(value, "state_dict"):
        return f"{could} its load_state_dict is a class method; make it one that changes the object"
    if isinstance(value, _Module):
        return _find_module_problem(value)
    return ""


def _accepts(method: Callable[..., object], *args: object) -> bool:
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # written in C, or a callable of another kind
        return True
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _is_of_class(value: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(type(value), name, None), classmethod | staticmethod)


def _find_module_problem(module: torch.nn.Module) -> str:
    """Describe a submodule with an extra state that nothing takes back; "" if there is none."""
    if type(module).load_state_dict is not _Module.load_state_dict:
        return ""
    parts = list(module.modules())
    if any(part._load_state_dict_pre_hooks for part in parts):  # a hook may take it
        return ""
    for kind in {type(part) for part in parts}:
        is_saved = kind.get_extra_state is not _Module.get_extra_state
        is_taken = kind.set_extra_state is not _Module.set_extra_state
        if is_saved and not is_taken and kind._load_from_state_dict is _Module._load_from_state_dict:
            return f"a {kind.__name__} could not be loaded again: it has get_extra_state, but no set_extra_state"
    return ""


_LOAD_HOOKS: Final = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


class WrappedOptimizer(Protocol):
    """An object that steps another optimizer, such as Accelerate's AcceleratedOptimizer."""

    @property
    def optimizer(self) -> Any:
        """The optimizer inside, which may itself be a wrapper."""


AnyOptimizer = torch.optim.Optimizer | WrappedOptimizer
Optimizers = AnyOptimizer | Sequence[AnyOptimizer] | None


def list_optimizers(optimizers: Optimizers) -> list[AnyOptimizer]:
    """Return one optimizer, several or none as a list; raise Unsupported for anything else."""
    if optimizers is None:
        return []
    is_one = is_optimizer(optimizers) or not isinstance(optimizers, Iterable)
    found: list[Any] = [optimizers] if is_one else list(cast("Sequence[AnyOptimizer]", optimizers))
    for each in found:
        if not is_optimizer(each):
            raise Unsupported(
                f"a {type(each).__name__} is not an optimizer, nor a wrapper with state_dict, load_state_dict and"
                " param_groups that has one as its .optimizer; pass the optimizer inside it"
            )
    return found


def is_optimizer(value: object) -> bool:
    """Return whether `value` is an optimizer, or a wrapper around one that is saved and loaded as the optimizer is."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    # A schedule has an `.optimizer` too, but no parameters.
    return is_stateful(value) and _has_groups(value) and isinstance(unwrap(value), torch.optim.Optimizer)


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers; `optimizer` itself if it is none."""
    return list_layers(optimizer)[-1]


def list_layers(optimizer: Any) -> list[Any]:
    """Return an optimizer and those inside it, the innermost last; not all need have a `.state`."""
    layers = [optimizer]
    while True:
        inner = getattr(layers[-1], "optimizer", None)
        is_known = any(inner is layer for layer in layers)
        if inner is None or is_known or not (isinstance(inner, torch.optim.Optimizer) or _has_groups(inner)):
            return layers
        layers.append(inner)


def find_loading_layer(optimizer: Any) -> Any:
    """Return the layer to load: the outermost that has its own `load_state_dict`, or forwards it.

    Lightning's wrapper inherits from the class of the optimizer inside. The inherited method would load the wrapper,
    and leave the optimizer that steps as it is.
    """
    layers = list_layers(optimizer)
    for layer, inner in pairwise(layers):
        method = getattr(type(layer), "load_state_dict", None)
        if method is None or method is not getattr(type(inner), "load_state_dict", None):
            return layer
    return layers[-1]


def has_load_hooks(optimizer: Any, *, before_only: bool = False) -> bool:
    """Return whether hooks run when a state is loaded into an optimizer or one inside it.

    Wrappers need not have torch's tables of hooks.
    """
    names = _LOAD_HOOKS[:1] if before_only else _LOAD_HOOKS
    return any(getattr(layer, name, None) for layer in list_layers(optimizer) for name in names)


def is_plain_optimizer(optimizer: Any) -> bool:
    """Return whether an optimizer is loaded by torch's own method alone."""
    return (
        isinstance(optimizer, torch.optim.Optimizer)
        and unwrap(optimizer) is optimizer
        and type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        and not has_load_hooks(optimizer)
    )


def is_optimizer_state(state: object) -> bool:
    """Return whether a state has the form that torch's optimizers return; that of a wrapper may be different."""
    return (
        isinstance(state, dict) and isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)
    )


def _has_groups(value: object) -> bool:
    return isinstance(getattr(value, "param_groups", None), list)
