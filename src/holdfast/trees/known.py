"""Classes of well-known libraries that are saved and loaded without being registered: an allow-list, by name.

A class on the list is imported when it is needed, never another one: a name in a store cannot make Holdfast import a
module that is not written here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Final, Literal

from holdfast.errors import Unsupported

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
