"""Describes a call completely: the callable with code and state, arguments, torch's state; notices changes."""

from __future__ import annotations

from abc import get_cache_token
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from holdfast.compile_cache.code.digest import CodeWalk, ValueParts, list_parts
from holdfast.compile_cache.code.known import is_builtin, name_known
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.digest import hash_kind

_ABSENT: Final = object()


class Watch:
    """What a description has read. Compares identities, so an equal copy counts as a change."""

    def __init__(self) -> None:
        self._states: list[tuple[Mapping[str, object], list[str], list[object]]] = []
        self._empty: list[Sized] = []
        self._reads: list[tuple[Mapping[str, object], str, object]] = []
        self._objects: list[tuple[object, ValueParts]] = []
        # Changes whenever `ABC.register` makes a class a subclass of another, which `isinstance` looks up.
        self._token = get_cache_token()

    def add_state(self, state: Mapping[str, object]) -> None:
        """Watch all values of a dictionary."""
        if state:
            self._states.append((state, list(state), list(state.values())))
        else:
            self.add_empty(state)

    def add_empty(self, container: Sized) -> None:
        """Watch an empty container."""
        self._empty.append(container)

    def add_read(self, owner: Mapping[str, object], name: str, value: object) -> None:
        """Watch one value of a dictionary, or its absence."""
        self._reads.append((owner, name, owner.get(name, _ABSENT)))

    def has_read(self, owner: Mapping[str, object], name: str = "") -> bool:
        """Return whether one value of a dictionary is watched; without a name, whether any is."""
        return any(each is owner and name in ("", found) for each, found, _ in self._reads)

    def add_object(self, value: object, parts: ValueParts) -> None:
        """Watch the parts of an object."""
        self._objects.append((value, parts))

    def is_unchanged(self, list_parts: Callable[[Any], ValueParts | None]) -> bool:
        """Return whether everything is as it was when it was added."""
        if any(self._empty) or get_cache_token() != self._token:
            return False
        for state, names, values in self._states:
            if len(state) != len(values) or list(state) != names or not all(map(is_, state.values(), values)):
                return False
        for owner, name, value in self._reads:
            if owner.get(name, _ABSENT) is not value:
                return False
        return all(_has_same_parts(list_parts(value), parts) for value, parts in self._objects)


def _has_same_parts(found: ValueParts | None, before: ValueParts) -> bool:
    return found is not None and found.text == before.text and is_same(found.values, before.values)


def is_same(found: Sequence[object], before: Sequence[object]) -> bool:
    """Return whether two sequences consist of the same objects. Plain values and tuples of the same count, too."""
    return len(found) == len(before) and all(map(_is_same_value, found, before))


def _is_same_value(found: object, before: object) -> bool:
    if found is before:
        return True
    # Some parts are made when they are listed: numbers, names, tuples of them.
    if type(found) is not type(before):
        return False
    if isinstance(found, tuple) and isinstance(before, tuple):
        return is_same(found, before)
    # As text: 0.0 and -0.0 are equal, but a compiled constant is one of them.
    return isinstance(found, bool | int | float | str | bytes) and repr(found) == repr(before)


MAX_TEXTS: Final = 400_000
"""Bounds the time of a description; a module with many attributes has about a hundred texts."""

# Dictionaries of a module that its call reads. The tree is described by them; hooks are not supported.
_TREE: Final = ("_parameters", "_buffers", "_modules")
_HOOKS: Final = frozenset(
    {
        "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    }
)  # fmt: skip
# Methods of a module that its call does not run; `Recording` verifies that dynamo has not traced them.
_NOT_CALLED: Final = frozenset({"__init__", "__repr__", "__del__", "__getstate__", "__setstate__", "__deepcopy__"})
_STATIC_MARK: Final = "_dynamo_static_input_type"
"""Dynamo marks parameters with it while it compiles."""
_COMPILED_MARK: Final = "_is_torch_compile"
"""Dynamo marks modules with it when they are compiled."""
_ALIGNED_BYTES: Final = 16
_CONTAINERS: Final = (dict, OrderedDict, set, list)
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_KINDS: Final = (Tensor, Parameter, torch.nn.Buffer)


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a call, and what it was made from."""

    code: str
    """Digest of the callable: its code, everything that it reads, its modules, parameters and buffers. In hex."""
    arguments: tuple[str, ...]
    """The arguments, as texts."""
    walk: CallWalk
    num_own_tensors: int
    """The first tensors of the walk are the callable's; those of the arguments follow."""
    num_own_objects: int
    """As many objects belong to the callable; those of the arguments follow."""
    operators: frozenset[str]
    """Operators that the code may call."""

    def forget_arguments(self) -> None:
        """Release the arguments, which may be large. The tensors of the callable are kept."""
        del self.walk.tensors[self.num_own_tensors :]
        self.walk.forget(self.num_own_objects)


class CallWalk(CodeWalk):
    """Walks over a callable and its arguments, and numbers their tensors."""

    max_texts = MAX_TEXTS

    def __init__(self, where: str) -> None:
        """Start errors with `where`, the subject of their sentence."""
        super().__init__(where)
        self.tensors: list[Tensor] = []
        self.watch = Watch()
        self.modules: list[Module] = []
        self.classes: list[type] = []

    def add(self, value: Any, depth: int) -> None:
        """Add the texts of a value; also of modules and tensors."""
        if isinstance(value, Tensor):
            if self.is_new(value):
                self._add_tensor(value, depth)
        elif isinstance(value, Module) and not isinstance(value, type):
            if self.is_new(value):
                self._add_module(value)
        else:
            super().add(value, depth)

    def note_parts(self, value: object, parts: ValueParts) -> None:
        """Watch each object that was visited."""
        self.watch.add_object(value, parts)

    def note_read(self, owner: Mapping[str, object], name: str, value: object) -> None:
        """Watch each name that was read."""
        self.watch.add_read(owner, name, value)

    def has_read(self, module: ModuleType, name: str = "") -> bool:
        """Return whether the walk has read a name of a module, or any name."""
        return self.watch.has_read(vars(module), name)

    def list_parts(self, value: object) -> ValueParts | None:
        """Return the parts of a value. Methods of a module class are followed only if a name leads to them."""
        return list_watched_parts(value)

    def name_owner(self, owner: object) -> str:
        """Return the name of a namespace, or of a class of modules."""
        if isinstance(owner, type) and not name_known(owner):
            return owner.__qualname__
        return super().name_owner(owner)

    def note_module_class(self, kind: type) -> None:
        """Look up the attributes that code reads in a class of modules, too."""
        if not any(kind is each for each in self._namespaces):
            self._namespaces.append(kind)

    def _add_module(self, module: Module) -> None:
        state = vars(module)
        self.modules.append(module)
        self.texts.append("module\n")
        self.add(type(module), 0)
        self._add_class(type(module))
        self.watch.add_state(state)
        for name, value in state.items():
            if name == _COMPILED_MARK:
                continue
            if name in _HOOKS:
                if value:
                    self._refuse(f"has a module with hooks ({type(module).__qualname__}.{name})")
                self.watch.add_state(value)
            elif name in _TREE:
                self.watch.add_state(value)
                self.texts.append(f"{name} {len(value)}\n")
                for key, part in value.items():
                    self.texts.append(f"{key!r}\n")
                    self.add(part, 0)
            elif type(value) in _CONTAINERS and not value:
                self.watch.add_empty(value)
                self.texts.append(f"{name} is empty {type(value).__name__}\n")
            else:
                self.texts.append(f"{name}\n")
                self.add(value, 1)
        self.texts.append("end of module\n")

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base is not object and issubclass(base, Module) and not any(base is each for each in self.classes):
                self.classes.append(base)
                if not name_known(base):
                    self.note_module_class(base)
                    self.watch.add_state(vars(base))

    def _add_tensor(self, tensor: Tensor, depth: int) -> None:
        if type(tensor) not in _KINDS:
            self._refuse(f"has a tensor of the class {type(tensor).__qualname__}, which is not supported")
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            self._refuse(f"has a tensor on {tensor.device} with layout {tensor.layout}; only dense ones on CPU work")
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_inference():
            self._refuse("has a tensor of a torch.func transform or of inference mode, which is not supported")
        self.texts.append(f"tensor {len(self.tensors)} {describe_tensor(tensor)}\n")
        self.tensors.append(tensor)
        state = vars(tensor)
        self.watch.add_state(state)
        for name, value in state.items():
            if name == _STATIC_MARK:
                continue
            if name.startswith("_dynamo"):
                self._refuse("has a tensor with sizes that are marked as dynamic, which is not supported")
            self.texts.append(f"{name}\n")
            self.add(value, depth + 1)


def list_watched_parts(value: object) -> ValueParts | None:
    """Return the parts of a value, as `list_parts` does, but leave out methods that a class of modules may have."""
    if not (isinstance(value, type) and issubclass(value, Module)):
        return list_parts(value)
    parts: list[object] = [type(value), *value.__bases__]
    for name, each in sorted(vars(value).items()):
        is_special = name.startswith("__") and name.endswith("__")
        is_method = isinstance(each, FunctionType)
        if name in _SKIPPED or name in _NOT_CALLED or (is_method and not is_special and name != "forward"):
            continue
        parts += (name, each)
    return ValueParts(f"class {value.__qualname__}", parts)


_SKIPPED: Final = frozenset(
    {
        "__abstractmethods__", "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__module__",
        "__orig_bases__", "__parameters__", "__static_attributes__", "__weakref__", "_abc_impl", "__annotate_func__",
        "__annotations_cache__",
    }
)  # fmt: skip


def describe_tensor(tensor: Tensor) -> str:
    """Return all properties of a tensor, except its values."""
    return (
        f"{tensor.dtype} {tensor.device} {tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()}"
        f" {tensor.requires_grad} {isinstance(tensor, Parameter)} {tensor.is_leaf} {tensor.is_conj()} {tensor.is_neg()}"
        f" {tensor.data_ptr() % _ALIGNED_BYTES}"
    )


def describe_call(callable_: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Description:
    """Describe a callable and its arguments. Raises Uncacheable."""
    walk = CallWalk("the callable")
    _verify_callable(callable_)
    walk.add(callable_, 0)
    walk.add_attributes()
    num_own, num_texts, num_visited = len(walk.tensors), len(walk.texts), walk.num_visited
    # Arguments are compared with those of the next call, so later changes of these do not matter.
    own_watch, walk.watch = walk.watch, Watch()
    for value in (args, kwargs):
        _verify_argument(value)
        walk.add(value, 0)
    walk.watch = own_watch
    foreign = sorted(name for name in walk.operators if not is_builtin(name))
    if foreign:
        raise Uncacheable(f"the callable uses the operator {foreign[0]}, which is not part of torch")
    return Description(
        _hash(walk.texts[:num_texts]),
        tuple(walk.texts[num_texts:]),
        walk,
        num_own,
        num_visited,
        frozenset(walk.operators),
    )


def _hash(texts: Sequence[str]) -> str:
    return hash_kind("compiled code", ["".join(texts).encode(errors="surrogatepass")]).hex()


def _verify_callable(callable_: object) -> None:
    if isinstance(callable_, Module):
        if type(callable_).__call__ is not Module.__call__:
            raise Uncacheable(f"{type(callable_).__qualname__} defines __call__, and only forward can be stored")
    elif not isinstance(callable_, FunctionType | MethodType):
        raise Uncacheable(f"a {type(callable_).__qualname__} is neither a module nor a function")


def _verify_argument(value: object) -> None:
    """Refuse arguments that `Arguments` does not compare."""
    if type(value) in (list, tuple):
        for each in value:  # type: ignore[attr-defined]  # a list or a tuple
            _verify_argument(each)
    elif type(value) is dict:
        for key, each in value.items():
            if type(key) is not str:
                raise Uncacheable("an argument is a dictionary with keys that are not text")
            _verify_argument(each)
    elif type(value) not in _KINDS and type(value) not in _PLAIN:
        raise Uncacheable(f"an argument is a {type(value).__qualname__}, which is not supported")
