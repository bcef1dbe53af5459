"""The key parts `config` and `options`: the settings of torch's compiler.

Settings that cannot change the compiled code are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import FunctionType
from typing import Any, Final

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
