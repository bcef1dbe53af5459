"""Describes the state of torch outside of a callable: modes, settings, environment, and whether its code is genuine."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, Final

import torch
import torch.nn.modules.module as module_code
import typing_extensions

from holdfast.compile_cache.code.known import is_known_file
from holdfast.compile_cache.code.torch_tables import watch_libraries, watch_tables
from holdfast.compile_cache.key.flags import describe_flags
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.digest import hash_kind
from holdfast.json_text import Json

VERSION: Final = "2.13"

# The modules with the settings of torch's compiler. A module that is not loaded has its defaults, and the environment.
CONFIGS: Final = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch._inductor.config",
    "torch.compiler.config",
    "torch.fx.experimental._config",
)
# Settings of caches, workers and logs, which cannot change the compiled code. Torch changes some of them itself.
_HARMLESS_SETTINGS: Final = frozenset(
    {"compile_threads", "worker_start_method", "enable_autograd_cache", "fx_graph_cache", "job_id", "verbose"}
)

# Variables that the settings read when they are loaded. Most start with one of the prefixes.
_PREFIXES: Final = ("AOT", "CUTEDSL_", "CUTLASS_", "INDUCTOR_", "PARTITIONER_", "PYTORCH_", "TORCH")
NAMES: Final = frozenset(
    {
        "CI", "CXX", "DUMP_AOTI_MINIFIER", "ENABLE_PERSISTENT_TMA_MATMUL", "ENABLE_TEMPLATE_TMA_STORE",
        "ENABLE_TMA_LOAD_FOR_TEMPLATE_EPILOGUE", "FAKE_ALLOW_META", "LOG_AUTOTUNE_RESULTS", "LOG_TLPARSE",
        "MAST_HPC_JOB_NAME", "PT2_COMPILE_ID_PREFIX", "UNSAFE_SKIP_FSDP_MODULE_GUARDS",
    }
)  # fmt: skip
# Directories, logs and names of runs.
HARMLESS_VARIABLES: Final = frozenset(
    {
        "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TORCH_HOME", "TORCH_LOGS", "TORCH_LOGS_OUT",
        "TORCH_TRACE",
    }
)  # fmt: skip
_HARMLESS_PREFIXES: Final = ("TORCHELASTIC_", "TORCH_NCCL_")

_GLOBAL_HOOKS: Final = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_pre_hooks",
)
# Code of torch that dynamo traces into or replaces by operators, all of it loaded by `import torch`. If dynamo has
# traced code of another module, `Recording` refuses the callable.
_TRACED: Final = frozenset(
    {
        "torch", "torch._VF", "torch._jit_internal", "torch._linalg_utils", "torch._lowrank", "torch._tensor",
        "torch.amp.autocast_mode", "torch.autograd.function", "torch.autograd.grad_mode", "torch.backends.mha",
        "torch.compiler", "torch.functional", "torch.jit", "torch.nn.functional", "torch.nn.parameter",
        "torch.nn.utils.parametrizations", "torch.nn.utils.parametrize", "torch.nn.utils.rnn", "torch.overrides",
        "torch.special", "torch.utils._contextlib", "torch.utils.checkpoint",
    }
)  # fmt: skip
_TRACED_PREFIX: Final = "torch.nn.modules."
_COMPILER_PREFIX: Final = "torch._dynamo."
# Dynamo replaces these functions of torch by its own when it is imported or first used.
_REPLACED_BY_DYNAMO: Final = frozenset(
    {
        "torch.jit._get_trace_graph",
        "torch.jit.trace",
        "torch.jit.trace_module",
        "torch.manual_seed",
        "torch.nn.modules.module.Module.__init__",
        "torch.nn.modules.module.Module.__setstate__",
    }
)

# What other libraries add to torch under names that torch does not have. It replaces nothing. A callable that calls it
# is not stored, because its code is neither that of torch nor in the description.
_ADDED: Final = frozenset({"torch.nn.modules.module.Module.smart_apply"})


def find_obstacle() -> str:
    """Return why callables cannot be stored as a whole in this process, as a sentence; "" if they can."""
    version = ".".join(torch.__version__.split(".")[:2])
    if version != VERSION:
        return f"whole=True supports torch {VERSION}, not {version}; the callable is compiled as usual"
    if sys.platform != "linux":
        return "whole=True supports Linux only; the callable is compiled as usual"
    return ""


def verify_modes() -> None:
    """Raise Uncacheable if a mode is active that changes what operators do."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise Uncacheable("a mode of torch is active, such as a default device, whose code is not in the key")
    if not torch._C._is_torch_function_enabled():
        raise Uncacheable("__torch_function__ is disabled around the call")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Uncacheable("the callable is called inside a torch.func transform")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise Uncacheable("saved-tensor hooks are set, and their code is not in the key")
    if torch._C._get_tracing_state() is not None or torch.compiler.is_compiling():
        raise Uncacheable("the callable is being traced")
    if torch.autograd.forward_ad._current_level >= 0:
        raise Uncacheable("forward-mode differentiation is active")
    if any(getattr(module_code, name) for name in _GLOBAL_HOOKS):
        raise Uncacheable("hooks are registered for all modules")
    autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if autograd is not None and (autograd.compiled_autograd_enabled or autograd.in_compiled_autograd_region):
        raise Uncacheable("compiled autograd is on")


def describe_flags_of_call() -> Json:
    """Return the global state of torch that affects a call on CPU."""
    verify_modes()
    return describe_flags(("cpu",))


def describe_settings(environment: Mapping[str, str] | None = None) -> Json:
    """Return the variables that set defaults of the compiler. Raises Uncacheable if a setting was changed otherwise."""
    for name in CONFIGS:
        module: Any = sys.modules.get(name)
        if module is not None and (changed := _find_changed(module)):
            raise Uncacheable(f"{name}.{changed} was changed in the program; set it by its environment variable")
    values = os.environ if environment is None else environment
    return {name: values[name] for name in sorted(values) if is_relevant(name)}


def is_relevant(name: str) -> bool:
    """Return whether a variable may be a setting of torch's compiler."""
    if name in HARMLESS_VARIABLES or name.startswith(_HARMLESS_PREFIXES):
        return False
    return name.startswith(_PREFIXES) or name in NAMES


def _find_changed(module: Any) -> str:
    """Return the name of a setting that the program has changed; "" if there is none."""
    for name, entry in module._config.items():
        override = entry.user_override.get()
        if _is_unset(override) or name in _HARMLESS_SETTINGS:
            continue
        default = entry.default if _is_unset(entry.env_value_default) else entry.env_value_default
        if override is not default and override != default:
            return str(name)
    return ""


def _is_unset(value: object) -> bool:
    return repr(value) == _UNSET


_UNSET: Final = repr(torch.utils._config_module._UNSET_SENTINEL)


def verify_tables() -> None:
    """Raise Uncacheable if user code replaces a part of torch: its lowerings, fakes, kernels and the like."""
    found = watch_tables().list_user_code()
    if found:
        raise Uncacheable(f"your code is registered in torch as {found[0].role} of {found[0].subject}")
    kernels = watch_libraries().list_user_code()
    if kernels:
        raise Uncacheable(f"your code is registered in torch as the kernel {kernels[0].key} of {kernels[0].operator}")


class TorchCode:
    """The functions of torch that tracing may use, by name: replacing one by another changes the digest."""

    def __init__(self) -> None:
        """Read the namespaces as they are now."""
        self._namespaces = [(owner, list(owner.values())) for _, owner in _iter_namespaces()]
        texts = [text for name, owner in _iter_namespaces() for text in _iter_texts(name, owner)]
        self.digest = hash_kind("compiled code", ["\n".join(texts).encode()]).hex()

    def is_unchanged(self) -> bool:
        """Return whether all namespaces have the same values as before."""
        try:
            return all(list(owner.values()) == values for owner, values in self._namespaces)
        except Exception:  # noqa: BLE001 - comparing values that were replaced runs their code
            return False


@functools.lru_cache(maxsize=1)
def _read_cached() -> TorchCode:
    return TorchCode()


def read_torch_code() -> TorchCode:
    """Return the functions of torch as they are now."""
    found = _read_cached()
    if not found.is_unchanged():
        _read_cached.cache_clear()
        found = _read_cached()
    return found


def is_described(module: str) -> bool:
    """Return whether the functions of a module of torch are in the digest of `TorchCode`."""
    return module in _TRACED or module.startswith(_TRACED_PREFIX)


def find_undescribed(filename: str) -> str:
    """Return the module of torch that a source file belongs to, or "" if the digest contains its functions."""
    if not filename.startswith(_TORCH_FOLDER):
        return ""
    path = os.path.join("torch", filename.removeprefix(_TORCH_FOLDER))
    module = path.removesuffix(".py").removesuffix(f"{os.sep}__init__").replace(os.sep, ".")
    # Dynamo's substitutes for Python functions are part of the compiler.
    return "" if is_described(module) or module.startswith(_COMPILER_PREFIX) else module


_TORCH_FOLDER: Final = os.path.join(os.path.dirname(torch.__file__), "")


def _iter_namespaces() -> Iterator[tuple[str, Mapping[str, object]]]:
    yield "torch.Tensor", vars(torch.Tensor)
    for name in sorted(sys.modules):
        module = sys.modules[name]
        if is_described(name):
            yield name, vars(module)
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{key}", vars(value)


def _iter_texts(owner: str, values: Mapping[str, object]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, FunctionType):
            if f"{owner}.{name}" in _ADDED:
                continue
            code = value.__code__
            if not (is_known_file(code.co_filename) or code.co_filename in ("<string>", typing_extensions.__file__)):
                raise Uncacheable(f"{owner}.{name} was replaced by code from {code.co_filename}")
            if f"{owner}.{name}" in _REPLACED_BY_DYNAMO:
                continue
            made = code.co_code.hex() if code.co_filename == "<string>" else ""
            yield f"{owner}.{name} {value.__module__}.{value.__qualname__} {code.co_firstlineno} {code.co_name} {made}"
        elif isinstance(value, BuiltinFunctionType | MethodDescriptorType | type):
            yield f"{owner}.{name} {value.__qualname__}"
