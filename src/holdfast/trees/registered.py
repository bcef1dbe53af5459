"""The classes that trees may contain: registered by the user, or on a list of well-known libraries."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, Flag
from importlib import import_module
from types import MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any, Final, Literal

import torch

from holdfast.errors import Unsupported
from holdfast.json_text import Json
from holdfast.trees.outline import find_bits

ClassKind = Literal["enum", "dataclass", "namedtuple", "tensor"]

_QUANTIZATION: Final = "torchao.quantization"
_WORKFLOWS: Final = "torchao.quantization.quantize_.workflows"
_TENSORS: Final = (
    # torchao, as of 0.13 to 0.18: quantised weights
    *(f"{_QUANTIZATION}:{name}" for name in ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")),
    *(f"{_QUANTIZATION}:{name}" for name in ("Int4Tensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor")),
    *(f"{_QUANTIZATION}:{name}" for name in ("Int4TilePackedTo4dTensor", "IntxOpaqueTensor")),
    f"{_WORKFLOWS}.nf4.nf4_tensor:NF4Tensor",
    "torchao.dtypes.nf4tensor:NF4Tensor",
    "torchao.dtypes.affine_quantized_tensor:AffineQuantizedTensor",
    "torchao.dtypes.uintx.plain_layout:PlainAQTTensorImpl",
    "torchao.dtypes.uintx.q_dq_layout:QDQTensorImpl",
    "torchao.prototype.mx_formats.mx_tensor:MXTensor",
    "torchao.prototype.mx_formats.nvfp4_tensor:NVFP4Tensor",
    "torchao.sparsity.blocksparse:BlockSparseTensor",
    # torchao: the state of optimizers with few bits
    "torchao.optim.subclass_4bit:OptimState4bit",
    "torchao.optim.subclass_8bit:OptimState8bit",
    "torchao.optim.subclass_fp8:OptimStateFp8",
    # torch
    "torch.sparse.semi_structured:SparseSemiStructuredTensorCUTLASS",
    "torch.sparse.semi_structured:SparseSemiStructuredTensorCUSPARSELT",
)
# What the tensors above have in their context.
_DATACLASSES: Final = (
    *(f"{_QUANTIZATION}.granularity:{name}" for name in ("PerTensor", "PerRow", "PerGroup", "PerAxis", "PerToken")),
    f"{_QUANTIZATION}.granularity:PerBlock",
    f"{_WORKFLOWS}.float8.float8_tensor:QuantizeTensorToFloat8Kwargs",
    f"{_WORKFLOWS}.int8.int8_tensor:QuantizeTensorToInt8Kwargs",
    f"{_WORKFLOWS}.nf4.nf4_tensor:SubclassTensorArgs",
    "torchao.dtypes.nf4tensor:SubclassTensorArgs",
    "torchao.dtypes.utils:PlainLayout",
    "torchao.dtypes.uintx.q_dq_layout:QDQLayout",
    "torchao.prototype.mx_formats.mx_tensor:QuantizeTensorToMXKwargs",
    "torchao.prototype.mx_formats.nvfp4_tensor:QuantizeTensorToNVFP4Kwargs",
)
_ENUMS: Final = (
    f"{_QUANTIZATION}.quant_primitives:MappingType",
    f"{_QUANTIZATION}.quant_primitives:ZeroPointDomain",
    f"{_QUANTIZATION}.quantize_.common.kernel_preference:KernelPreference",
    f"{_WORKFLOWS}.float8.float8_packing_format:Float8PackingFormat",
    f"{_WORKFLOWS}.intx.intx_unpacked_to_int8_tensor:IntxUnpackedToInt8TensorActivationQuantization",
    "torchao.prototype.mx_formats.config:MXGemmKernelChoice",
    "torchao.prototype.mx_formats.config:ScaleCalculationMode",
)
_NAMED_TUPLES: Final = ("torchao.float8.inference:Float8MMConfig",)

KNOWN: Final[Mapping[str, ClassKind]] = MappingProxyType(
    {
        **dict.fromkeys(_TENSORS, "tensor"),
        **dict.fromkeys(_DATACLASSES, "dataclass"),
        **dict.fromkeys(_ENUMS, "enum"),
        **dict.fromkeys(_NAMED_TUPLES, "namedtuple"),
    }
)
"""The kind of each class, by module and qualified name."""
_MODULES: Final = frozenset(type_id.partition(":")[0] for type_id in KNOWN)


def is_known(cls: type) -> bool:
    """Return whether a class is on the list, and is the class that its name leads to."""
    module = cls.__module__
    if module not in _MODULES or f"{module}:{cls.__qualname__}" not in KNOWN:
        return False
    return getattr(sys.modules.get(module), cls.__qualname__, None) is cls


def import_known(type_id: str) -> type | None:
    """Import a class on the list; None for one that is not on it. Raises Unsupported if it cannot be imported."""
    if type_id not in KNOWN:
        return None
    module, _, name = type_id.partition(":")
    package = module.partition(".")[0]
    found = getattr(_import_module(module, package, type_id), name, None)
    if not isinstance(found, type) or (found.__module__, found.__qualname__) != (module, name):
        raise Unsupported(
            f"it was saved as an object of class {type_id!r}, which this version of {package} does not have:"
            " install the version that it was saved with"
        )
    return found


def _import_module(module: str, package: str, type_id: str) -> ModuleType | None:
    """Import a module; None if the package has no such module."""
    saved = f"it was saved as an object of class {type_id!r}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise Unsupported(f"{saved}, and {package} is not installed here: pip install {package}") from error
        if f"{module}.".startswith(f"{error.name}."):
            return None
        raise Unsupported(f"{saved}, and {package} cannot be imported here: {error}") from error
    except ImportError as error:
        raise Unsupported(f"{saved}, and {package} cannot be imported here: {error}") from error


# Default factories that run no code of the user; they may fill a field that was not saved.
_BUILTIN_FACTORIES: Final[tuple[Callable[[], object], ...]] = (list, dict, set)

# A defaultdict calls its factory for a missing key, so only these, which create empty builtins, are restored.
_FACTORIES: Final[Mapping[str | None, Callable[[], object] | None]] = {
    None: None,
    **{made.__name__: made for made in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict)},
    **{made.__name__: made for made in (set, frozenset, OrderedDict, Counter, deque)},
}


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered class: its name in snapshots, its kind and its fields."""

    cls: type[Any]
    type_id: str
    kind: ClassKind
    fields: tuple[str, ...] = ()
    defaults: Mapping[str, Callable[[], object]] = dataclasses.field(default_factory=dict)
    """Creates the default of a field that the class did not have when the value was saved."""


class Types:
    """The classes that are registered with a store, and the well-known ones of `known`. No other class is created."""

    def __init__(self, classes: Iterable[type] = ()) -> None:
        self._by_id: dict[str, Registered] = {}
        for cls in classes:
            registered = _inspect(cls)
            other = self._by_id.setdefault(registered.type_id, registered)
            if other.cls is not cls:
                raise Unsupported(f"two different classes passed in types= are called {registered.type_id}; rename one")
        self._by_class = {registered.cls: registered for registered in self._by_id.values()}
        self._known: dict[type, Registered] = {}

    @property
    def classes(self) -> tuple[type, ...]:
        """The registered classes, in the order in which they were passed."""
        return tuple(self._by_class)

    def find(self, type_id: str) -> type:
        """Return the class that was saved under `type_id`, or raise Unsupported."""
        return self.find_by_id(type_id).cls

    def id_of(self, cls: type) -> str:
        """Return the name under which values of `cls` are saved, or raise Unsupported."""
        registered = self.find_by_class(cls)
        if registered is None:
            raise Unsupported(
                f"class {cls.__qualname__} cannot be saved until it is registered:"
                f" pass types=[{cls.__name__}] to holdfast.open(...)"
            )
        return registered.type_id

    def find_by_id(self, type_id: str) -> Registered:
        """Return the registered class with the name `type_id`, or raise Unsupported."""
        registered = self._by_id.get(type_id) or self._import_known(type_id)
        if registered is None:
            short = type_id[:200]
            raise Unsupported(
                f"it was saved as an object of class {short!r}, which is not registered:"
                f" pass types=[{short.rpartition(':')[2].rpartition('.')[2]}] to holdfast.open(...)"
            )
        return registered

    def find_by_class(self, cls: type) -> Registered | None:
        """Return the registration of `cls` itself, not of a base class; None if there is none."""
        registered = self._by_class.get(cls)
        if registered is None and is_known(cls):
            registered = self._known.get(cls) or self._register_known(cls)
        return registered

    def _import_known(self, type_id: str) -> Registered | None:
        cls = import_known(type_id)
        return None if cls is None else self._known.get(cls) or self._register_known(cls)

    def _register_known(self, cls: type) -> Registered:
        registered = _inspect(cls)
        if registered.kind != KNOWN[registered.type_id]:
            raise Unsupported(
                f"class {registered.type_id} is a {registered.kind} here, and should be a {KNOWN[registered.type_id]}:"
                f" pass types=[{cls.__name__}] to holdfast.open(...) if you trust it"
            )
        return self._known.setdefault(cls, registered)


def find_kind(cls: type) -> ClassKind | None:
    """Return the kind of a class that can be registered, or None if it cannot."""
    if issubclass(cls, torch.Tensor):
        return "tensor" if getattr(cls, "__tensor_flatten__", None) is not None else None
    if issubclass(cls, Enum):
        return "enum"
    if dataclasses.is_dataclass(cls):
        return "dataclass"
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return "namedtuple"
    return None


def _inspect(cls: object) -> Registered:
    kind = find_kind(cls) if isinstance(cls, type) else None
    if kind is None or not isinstance(cls, type):
        raise Unsupported(
            "types= takes enums, dataclasses, named tuples and tensor classes with __tensor_flatten__,"
            f" not {cls!r:.200}"
        )
    type_id = f"{cls.__module__}:{cls.__qualname__}"
    if kind == "dataclass":
        return _inspect_dataclass(cls, type_id)
    if kind == "namedtuple":
        fields, defaults = getattr(cls, "_fields", ()), getattr(cls, "_field_defaults", {})
        return Registered(cls, type_id, kind, fields, {name: _always(value) for name, value in defaults.items()})
    return Registered(cls, type_id, kind)


def _inspect_dataclass(cls: type[Any], type_id: str) -> Registered:
    fields = dataclasses.fields(cls)
    names = tuple(field.name for field in fields)
    try:
        object.__new__(cls)
    except TypeError as error:
        raise Unsupported(f"dataclass {type_id} is abstract or has state besides its fields: {error}") from error
    for name in names:
        if _runs_code(inspect.getattr_static(cls, name, None)):
            raise Unsupported(f"dataclass {type_id}: field {name!r} is a descriptor, and setting it would run its code")
    hidden = sorted(_find_slots(cls) - set(names))
    if hidden:
        raise Unsupported(f"dataclass {type_id} has the slot {hidden[0]!r}, which is not a field: make it one")
    return Registered(cls, type_id, "dataclass", names, _find_defaults(fields))


def _runs_code(attribute: object) -> bool:
    setter = getattr(type(attribute), "__set__", None)
    return setter is not None and not isinstance(attribute, MemberDescriptorType)


def _find_slots(cls: type) -> set[str]:
    return {
        name for base in cls.__mro__ for name, found in vars(base).items() if isinstance(found, MemberDescriptorType)
    }


def _find_defaults(fields: tuple[dataclasses.Field[Any], ...]) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}
    for field in fields:
        if field.default is not dataclasses.MISSING:
            found[field.name] = _always(field.default)
        elif field.default_factory in _BUILTIN_FACTORIES:
            found[field.name] = field.default_factory
    return found


def _always(value: object) -> Callable[[], object]:
    return lambda: value


def list_fields(registered: Registered, value: Any) -> list[tuple[str, object]]:
    """Return the fields of a dataclass or named tuple; raises Unsupported if it has attributes besides them."""
    if registered.kind == "namedtuple":
        found = list(zip(registered.fields, tuple.__iter__(value), strict=True))
    else:
        found = [(name, _read_field(registered, value, name)) for name in registered.fields]
    # An attribute that is not a field would be lost, and the loaded value would differ.
    for name in getattr(value, "__dict__", {}):
        if name not in registered.fields and not _is_cached(registered.cls, name):
            raise Unsupported(
                f"a {registered.cls.__qualname__} with the attribute {name!r}, which is not a field, cannot be saved;"
                " make it a field"
            )
    return found


def _read_field(registered: Registered, value: object, name: str) -> object:
    try:
        return getattr(value, name)
    except AttributeError as error:
        raise Unsupported(
            f"a {registered.cls.__qualname__} whose field {name!r} is not set cannot be saved; set it"
        ) from error


def _is_cached(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)


def build_record(registered: Registered, found: Mapping[Any, object]) -> object:
    """Rebuild a dataclass or named tuple without running code of its class; raises Unsupported or ValueError."""
    if not all(type(name) is str for name in found):
        raise ValueError("a field without a name")
    gone = [name for name in found if name not in registered.fields]
    if gone:
        raise Unsupported(
            f"field {gone[0][:80]!r} was saved, and class {registered.type_id} does not have it any more:"
            " pass the class as it was in types="
        )
    values = [found[name] if name in found else _default(registered, name) for name in registered.fields]
    if registered.kind == "namedtuple":
        return tuple.__new__(registered.cls, values)
    instance = object.__new__(registered.cls)
    for name, value in zip(registered.fields, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def _default(registered: Registered, name: str) -> object:
    make = registered.defaults.get(name)
    if make is None:
        raise Unsupported(
            f"field {name!r} of class {registered.type_id} was not saved and has no plain default: give it one"
        )
    return make()


def member_name(registered: Registered, value: Enum) -> str:
    """Return the name of an enum member; for a combination of flags, the names of its bits."""
    if value.__class__.__members__.get(value._name_) is value:
        return value._name_
    # Only flags have values that are not members; unknown bits of a flag have no name.
    text = "|".join(bit._name_ for bit in find_bits(value)) if isinstance(value, Flag) else ""
    if not isinstance(value, Flag) or find_member(registered, text) is not value:
        raise Unsupported(f"a {registered.cls.__qualname__} that is not a combination of its members cannot be saved")
    return text


def find_member(registered: Registered, name: str) -> Enum:
    """Return an enum member by its name, or raise Unsupported."""
    members: Mapping[str, Enum] = registered.cls.__members__
    if name in members:
        return members[name]
    names = name.split("|") if name else []
    if not issubclass(registered.cls, Flag) or not all(part in members for part in names):
        raise Unsupported(
            f"member {name[:80]!r} was saved, and class {registered.type_id} does not have it any more:"
            " pass the class as it was in types="
        )
    found: Enum = functools.reduce(operator.or_, [members[part] for part in names], registered.cls(0))
    return found


def is_known_factory(factory: object) -> bool:
    """Return whether a defaultdict with this factory can be saved."""
    return any(factory is known for known in _FACTORIES.values())


# Hash and comparison of a key may be a registered class's own, which may raise for unexpected fields.
_HASH_ERRORS: Final = (TypeError, ValueError, ArithmeticError, AttributeError)


def build_dict(values: list[Any]) -> dict[Any, Any]:
    """Build a dict from alternating keys and values, or raise ValueError."""
    each = iter(values)
    try:
        found = dict(zip(each, each, strict=True))
    except _HASH_ERRORS as error:
        raise ValueError("a key that cannot be hashed") from error
    if 2 * len(found) != len(values):
        raise ValueError("a key occurs twice")
    return found


def _build_set(values: list[Any]) -> set[Any]:
    try:
        found = set(values)
    except _HASH_ERRORS as error:
        raise ValueError("a member of a set that cannot be hashed") from error
    if len(found) != len(values):
        raise ValueError("a member of a set occurs twice")
    return found


def _build_ordered(values: list[Any], make: Callable[[dict[Any, Any]], Any]) -> object:
    found, attributes = make(build_dict(values[1:])), values[0]
    hidden = set(dir(type(found)))
    if type(attributes) is not dict or any(type(name) is not str or name in hidden for name in attributes):
        raise ValueError("not the attributes of a dict")
    vars(found).update(attributes)
    return found


def _build_defaulted(node: list[Json], values: list[Any]) -> object:
    factory = node[1]
    if (factory is not None and type(factory) is not str) or factory not in _FACTORIES:
        raise ValueError("a defaultdict without a known factory")
    return defaultdict(_FACTORIES[factory], build_dict(values))


def _build_deque(node: list[Json], values: list[Any]) -> object:
    limit = node[1] if len(node) > 1 else False
    if limit is not None and (type(limit) is not int or not len(values) <= limit < 1 << 63):
        raise ValueError("a deque with more items than its limit")
    return deque(values, limit)


BUILDERS: Final[Mapping[str, Callable[[list[Json], list[Any]], Any]]] = {
    "dict": lambda _node, values: build_dict(values),
    "odict": lambda _node, values: OrderedDict(build_dict(values)),
    "odict+": lambda _node, values: _build_ordered(values, OrderedDict),
    "counter": lambda _node, values: Counter(build_dict(values)),
    "counter+": lambda _node, values: _build_ordered(values, Counter),
    "defaultdict": _build_defaulted,
    "list": lambda _node, values: values,
    "tuple": lambda _node, values: tuple(values),
    "deque": _build_deque,
    "set": lambda _node, values: _build_set(values),
    "frozenset": lambda _node, values: frozenset(_build_set(values)),
    "slice": lambda _node, values: slice(*values),
}
