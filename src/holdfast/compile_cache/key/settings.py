"""The key parts `flags`, `config` and `options`: torch's global state, and the settings of its compiler.

Settings that cannot change the compiled code are left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, Final

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
import torch.fx.experimental._config as shapes_config

from holdfast.compile_cache.code.targets import name_target
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.json_text import Json

_BOOKKEEPING: Final = frozenset(
    {"TYPE_CHECKING", "_cache_config_factory_keys", "_cache_config_ignore_prefix", "_save_config_ignore"}
)

# Paths of tools and files: the same tool has another path on another machine, and a hit runs no tool.
_PATHS: Final = frozenset(
    {
        "autoheuristic_log_path",
        "cpp.cxx",
        "cuda.cuda_cxx",
        "cuda.cutlass_dir",
        "cutlass.cutlass_dir",
        "global_cache_dir",
        "memory_budget_pareto_dir",
        "profile_bandwidth_output",
        "rocm.ck_dir",
        "rocm.rocm_home",
        "torchinductor_worker_logpath",
        "triton.proton_output_dir",
        "worker_log_path",
        "xpu.cutlass_dir",
        "xpu.oneapi_root",
    }
)

# Settings of torch's own caches, which return the same code that compiling would produce.
_CACHES: Final = frozenset(
    {
        "autograd_cache_allow_custom_autograd_functions",
        "autograd_cache_normalize_inputs",
        "autotune_local_cache",
        "autotune_remote_cache",
        "bundle_triton_into_fx_graph_cache",
        "bundled_autograd_cache",
        "bundled_autotune_remote_cache",
        "bypass_autograd_cache_key",
        "cpp_cache_precompile_headers",
        "cuda.binary_remote_cache_force_write",
        "cuda.enable_caching_codegen",
        "cuda.upload_to_binary_remote_cache",
        "cuda.use_binary_remote_cache",
        "cutlass.binary_remote_cache_force_write",
        "cutlass.enable_caching_codegen",
        "cutlass.upload_to_binary_remote_cache",
        "cutlass.use_binary_remote_cache",
        "enable_autograd_cache",
        "enable_caching_generated_triton_templates",
        "enable_remote_autograd_cache",
        "force_autograd_cache",
        "force_non_lazy_backward_lowering",
        "fx_graph_cache",
        "fx_graph_remote_cache",
        "non_blocking_remote_cache_write",
        "remote_gemm_autotune_cache",
        "strict_autograd_cache",
        "unsafe_marked_cacheable_functions",
        "xpu.binary_remote_cache_force_write",
        "xpu.enable_caching_codegen",
        "xpu.upload_to_binary_remote_cache",
        "xpu.use_binary_remote_cache",
    }
)

# What is logged and displayed during compilation.
_LOGGING: Final = frozenset(
    {
        "autotune_num_choices_displayed",
        "check_shape_env_recorded_events",
        "debug",
        "debug_partitioner",
        "developer_warnings",
        "disable_progress",
        "enabled_metric_tables",
        "extended_debug_cpp",
        "extended_debug_create_symbol",
        "extended_debug_current_loc",
        "extended_debug_guard_added",
        "log_tlparse",
        "max_autotune_report_choices_stats",
        "print_specializations",
        "reorder_for_peak_memory_debug",
        "torch_compile_graph_format",
        "verbose_progress",
        "visualize_memory_budget_pareto",
        "warn_mix_layout",
        "worker_suppress_logging",
    }
)

# Compile workers and their timeouts.
_WORKERS: Final = frozenset(
    {
        "compile_threads",
        "compile_worker_mode",
        "compile_worker_wait_timeout",
        "compile_worker_watchdog_interval_seconds",
        "file_lock_timeout",
        "precompilation_timeout_seconds",
        "quiesce_async_compile_pool",
        "quiesce_async_compile_time",
        "sleep_sec_TESTING_ONLY",
        "worker_start_method",
    }
)

EXCLUDED: Final = _BOOKKEEPING | _PATHS | _CACHES | _LOGGING | _WORKERS
_EXCLUDED_PREFIX: Final = "trace."
"""About a dozen settings for traces of the compiler; they only affect logging, except for `_TRACED_IN_CODE`."""
_TRACED_IN_CODE: Final = frozenset({"trace.provenance_tracking_level", "trace.provenance_tracking_to_timeline"})
"""Settings for traces that add to the compiled graph."""

# Any: torch adds `get_config_copy` to these modules at run time.
_MODULES: Final[dict[str, Any]] = {
    "inductor": inductor_config,
    "functorch": functorch_config,
    "shapes": shapes_config,
}
# The effect of these settings is visible in the graph, except for those that later stages read. Some versions of torch
# lack some of them.
_SELECTED: Final[dict[str, tuple[Any, tuple[str, ...]]]] = {
    "dynamo": (dynamo_config, ("_custom_ops_profile", "capture_scalar_outputs", "force_compile_during_fx_trace")),
    "compiler": (compiler_config, ("compile_on_one_rank",)),
}

_PLAIN: Final = frozenset({bool, int, str, type(None)})

_AUTOCAST_DEVICES: Final = ("cpu", "cuda")

# Any: most of these are properties that torch adds to modules at run time, so type checkers do not know them.
_BACKENDS: Final[Any] = torch.backends
_DETERMINISTIC: Final[Any] = torch.utils.deterministic


def describe_flags(device_types: Iterable[str]) -> Json:
    """Return the global state of torch that affects a call; autocast for CPU, CUDA and `device_types`."""
    kinds = set(device_types)
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": _describe_autocast({*_AUTOCAST_DEVICES, *kinds} - {"meta"}),
        "anomaly": [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": _DETERMINISTIC.fill_uninitialized_memory,
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "current_device": torch.cuda.current_device() if "cuda" in kinds and torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "backends": _describe_backends(),
    }


def describe_config() -> Json:
    """Return the settings that may change the compiled code, by module and name."""
    return {
        **{name: _describe_settings(module.get_config_copy()) for name, module in _MODULES.items()},
        **{
            part: {name: describe_setting(getattr(module, name, None), name) for name in names}
            for part, (module, names) in _SELECTED.items()
        },
    }


def describe_options(options: Mapping[str, object]) -> Json:
    """Return the options of a call, without those that cannot change the compiled code."""
    return _describe_settings(options)


def describe_setting(value: object, name: str) -> Json:
    """Return the value of a setting as JSON. Raises Uncacheable for user code without a `uuid()` method."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, list | tuple):
        return [describe_setting(each, name) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((describe_setting(each, name) for each in value), key=repr)
    if isinstance(value, Mapping):
        pairs = ((key if type(key) is str else repr(key), each) for key, each in value.items())
        return {key: describe_setting(each, name) for key, each in sorted(pairs)}
    return _describe_code(value, name)


def _describe_autocast(device_types: set[str]) -> Json:
    # The dtype counts even where autocast is off: a `torch.autocast` inside of the graph that names no dtype uses it.
    found = {
        device: [torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))]
        for device in sorted(device_types)
    }
    return {**found, "cache": torch.is_autocast_cache_enabled()}


def _describe_backends() -> Json:
    backends = _BACKENDS
    return {
        "cuda.cudnn_sdp": backends.cuda.cudnn_sdp_enabled(),
        "cuda.fa4_sdp": _read_state("_get_fa4_sdp_enabled"),
        "cuda.flash_sdp": backends.cuda.flash_sdp_enabled(),
        "cuda.math_sdp": backends.cuda.math_sdp_enabled(),
        "cuda.matmul": {
            "fp16_accumulation": backends.cuda.matmul.allow_fp16_accumulation,
            "fp32_precision": backends.cuda.matmul.fp32_precision,
            "reduced_bf16": str(backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
            "reduced_fp16": str(backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
        },
        "cuda.mem_efficient_sdp": backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn": {
            "benchmark": backends.cudnn.benchmark,
            "conv": backends.cudnn.conv.fp32_precision,
            "deterministic": backends.cudnn.deterministic,
            "enabled": backends.cudnn.enabled,
            "rnn": backends.cudnn.rnn.fp32_precision,
        },
        "fp32_precision": backends.fp32_precision,
        "mha_fastpath": backends.mha.get_fastpath_enabled(),
        "mkldnn": {
            "conv": backends.mkldnn.conv.fp32_precision,
            "deterministic": backends.mkldnn.deterministic,
            "enabled": backends.mkldnn.enabled,
            "matmul": backends.mkldnn.matmul.fp32_precision,
            "rnn": backends.mkldnn.rnn.fp32_precision,
        },
        "native": _describe_native(),
        "opt_einsum": [backends.opt_einsum.enabled, backends.opt_einsum.strategy],
        "quantized": backends.quantized.engine,
    }


def _describe_native() -> Json:
    """Return which kernels written in Python replace those of torch's operators; see torch.backends.python_native."""
    # Private: the public functions show neither the order of the kernels nor what is disabled.
    registry = sys.modules.get("torch._native.registry")
    kernels: Mapping[Any, Any] = getattr(registry, "_graphs", {})
    disabled = getattr(registry, "_filter_state", None)
    return {
        "ahead_of_time": _read_state("_get_native_aot_enabled"),
        "disabled": {name: sorted(names) for name, names in sorted(vars(disabled).items())} if disabled else None,
        "kernels": {"/".join(target): [each.node_id for each in found] for target, found in sorted(kernels.items())},
    }


def _read_state(function: str) -> Json:
    """Return a global state of torch; None if this version does not have it."""
    read: Callable[[], Json] | None = getattr(torch._C, function, None)
    return None if read is None else read()


def _describe_settings(settings: Mapping[str, Any]) -> Json:
    return {
        name: value if type(value) in _PLAIN else describe_setting(value, name)
        for name, value in settings.items()
        if name not in EXCLUDED and (name in _TRACED_IN_CODE or not name.startswith(_EXCLUDED_PREFIX))
    }


def _describe_code(value: object, name: str) -> Json:
    """Return what identifies a compiler pass or other code: its `uuid()`, or its name if it is part of torch."""
    if isinstance(value, FunctionType | type) and value.__module__.partition(".")[0] == "torch":
        return name_target(value, {})
    uuid = getattr(value, "uuid", None)
    found = uuid() if callable(uuid) else None
    if found is None:
        raise Uncacheable(
            f"the compiler setting {name} is a {type(value).__module__}.{type(value).__qualname__}, whose code has no"
            " digest; give it a method uuid() whose result changes whenever the code changes"
        )
    return {"code": f"{type(value).__module__}.{type(value).__qualname__}", "uuid": repr(found)}
