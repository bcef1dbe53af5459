"""Names of torch that were reviewed for the compile cache, in the versions that it supports, and how to find them.

Each set contains what may change compiled code and is not in the key by itself. Before a name is added to a set, decide
whether a key has to contain it, or whether a graph that uses it must not be cached.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
import torch._inductor.config as inductor_config
from torch._C._dynamo.guards import GlobalStateGuard
from torch._library.custom_ops import CustomOpDef
from torch._library.simple_registry import singleton
from torch.fx.proxy import _COPY_META_FIELDS

from holdfast.compile_cache.key import flags

_TORCH: Final = Path(torch.__file__).parent
# The packages whose code runs after dynamo has traced a graph.
_COMPILER: Final = ("_decomp", "_functorch", "_higher_order_ops", "_inductor", "_library", "_subclasses", "fx")
# Functions of `torch._C` that may read a global state, and files of Python with such a state.
_GETTER: Final = re.compile(r"(?!.*set_|_get_cpp_backtrace)(_?(are|get|is|len|peek)_|.*_(allowed|enabled)$)")
_STATEFUL_FILES: Final = ("*.py", "amp/*.py", "autograd/*.py", "backends/**/*.py", "nn/**/*.py")

CONFIG_MODULES: Final = {
    "_functorch/config.py",  # in the key
    "_inductor/config.py",  # in the key
    "fx/experimental/_config.py",  # in the key
    "_dynamo/config.py",  # its effect is in the graph, except for the settings below
    "compiler/config.py",  # other names of dynamo's settings, and the settings below
    "_export/config.py",  # only for torch.export
    "_inductor/config_comms.py",  # only for collectives, and graphs with collectives are not cached
    "distributed/config.py",  # only for collectives and tensor subclasses
    "utils/serialization/config.py",  # only for torch.save and torch.load
}

DYNAMO_SETTINGS: Final = {
    "_custom_ops_profile",  # in the key
    "capture_scalar_outputs",  # in the key
    "force_compile_during_fx_trace",  # in the key
    "allow_empty_graphs",  # set by torch for a subgraph
    "automatic_dynamic_exclusion_guard",  # guards of dynamo
    "caching_precompile",  # what torch saves
    "debug_dir_root",  # logs
    "enable_compiler_collectives",  # guards of dynamo
    "error_on_nested_fx_trace",  # raises
    "fake_tensor_cache_crosscheck_enabled",  # raises
    "fake_tensor_cache_enabled",  # speed
    "fake_tensor_disable_inference_mode",  # only in a comment
    "leaf_function_check_escaped_gradients",  # invoke_leaf_function is not cached
    "leaf_function_validate_outputs",  # invoke_leaf_function is not cached
    "patch",  # a method
    "record_runtime_overhead",  # profiles
    "strict_precompile",  # raises
    "suppress_errors",  # only read in a tool
    "use_lazy_graph_module",  # speed
}

COMPILER_SETTINGS: Final = {
    "compile_on_one_rank",  # in the key
    "cache_key_tag",  # torch's own key
    "force_disable_caches",  # what torch saves
    "patch",  # a method
    "pop",  # a method of something else
}

TRACE_SETTINGS: Final = {
    "trace.provenance_tracking_level",  # in the key
    "trace.provenance_tracking_to_timeline",  # in the key
    # The others write logs and pictures.
    "trace.compile_profile", "trace.debug_dir", "trace.debug_log", "trace.dot_graph_shape", "trace.draw_orig_fx_graph",
    "trace.enabled", "trace.fx_graph", "trace.fx_graph_transformed", "trace.graph_diagram",
    "trace.graph_diagram_format", "trace.info_log", "trace.ir_post_fusion", "trace.ir_pre_fusion",
    "trace.log_autotuning_results", "trace.log_url_for_graph_xform", "trace.orig_fx_graph_diagram_format",
    "trace.output_code", "trace.provenance_tracking_max_events", "trace.save_real_tensors", "trace.upload_tar",
}  # fmt: skip

GLOBAL_STATE: Final = {
    "allow_bf16_reduce", "allow_fp16_reduce", "allow_tf32", "autocast_state", "cuda_matmul_precision", "default_dtype",
    "deterministic_algorithms", "deterministic_algorithms_warn_only", "grad_mode", "num_threads",
    "torch_function", "torch_function_all_disabled",  # their effect is in the graph
}  # fmt: skip

# Functions that read a global state of torch and that are not in `STATE` of `key/flags.py`.
GETTERS: Final = {
    # In the key by other functions of `key/flags.py`.
    "_get_cublas_allow_tf32", "_get_cudnn_allow_tf32", "_get_onednn_allow_tf32",  # older names of a precision
    "_get_default_device", "_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only",
    "get_autocast_cpu_dtype", "get_autocast_gpu_dtype", "get_default_dtype", "get_num_threads",
    "is_anomaly_check_nan_enabled", "is_anomaly_enabled", "is_autocast_cache_enabled", "is_autocast_cpu_enabled",
    "is_autocast_enabled", "is_grad_enabled", "is_inference_mode_enabled",
    "__init__: _GLOBAL_DEVICE_CONTEXT", "backends/mha/__init__: _is_fastpath_enabled",
    "backends/opt_einsum/__init__: enabled", "backends/opt_einsum/__init__: strategy",
    # Constants of torch's build, of the processor or of the version.
    "_get_accelerator", "_get_all_dtypes", "_get_blas_default_backend", "_get_cpu_capability",
    "_get_max_operator_version", "_get_operator_version_map", "_get_privateuse1_backend_name",
    "_get_upgraders_entry_map", "_get_upgraders_map_size", "_is_ck_sdpa_available", "_is_flash_attention_available",
    "_is_xnnpack_enabled", "backends/cudnn/__init__: __cudnn_version", "backends/cusparselt/__init__: __MAX_ALG_ID",
    "backends/cusparselt/__init__: __cusparselt_version",
    # Modes whose effect is in the graph, or under which a graph is not cached.
    "_are_functorch_transforms_active", "_get_torch_function_state", "_get_tracing_state", "_is_any_autocast_enabled",
    "_is_fwd_grad_enabled", "_is_torch_function_all_disabled", "_is_torch_function_enabled",
    "_is_torch_function_mode_enabled", "_is_tracing", "_len_torch_dispatch_stack", "_len_torch_function_stack",
    "_peek_should_skip_torch_function", "_ops: _mode_stack_state_for_pre_dispatch",
    "autograd/forward_ad: _current_level", "autograd/graph: _allow_mutation_on_saved_tensors_enabled",
    "nn/modules/module: _global_is_full_backward_hook", "nn/utils/parametrize: _cache",
    "nn/utils/parametrize: _cache_enabled",
    # Autocast on devices whose graphs are not cached.
    "get_autocast_ipu_dtype", "get_autocast_xla_dtype", "is_autocast_ipu_enabled", "is_autocast_xla_enabled",
    # Only while code runs, compiled or not: autograd's engine, kernels for a GPU, warnings, names of threads.
    "_debug_only_are_vmap_fallback_warnings_enabled", "_get_autograd_fallback_mode", "_get_backcompat_broadcast_warn",
    "_get_backcompat_keepdim_warn", "_get_thread_name", "_get_warnAlways", "_is_grad_layout_enforcement_enabled",
    "_is_multithreading_enabled", "autograd/profiler: _is_profiler_enabled", "get_num_interop_threads",
    "nn/attention/_fa4: _FA4_MODULE_PATH", "nn/attention/_registry: _FLASH_ATTENTION_ACTIVE",
    "nn/attention/_registry: _FLASH_ATTENTION_IMPLS", "random: _fork_rng_warned_already",
    "storage: _always_warn_typed_storage_removal",
    # Only for DTensor, torch.jit, torch.load, torch.hub, nn.DataParallel, conversion of modules, mobile and tests.
    "_get_DTensor_sharding_propagator_cache_stats", "_get_caught_jit_exception_class_name",
    "_get_caught_jit_exception_original_msg", "_get_dtensor_allow_implicit_replication", "_get_graph_exec_group",
    "_get_graph_executor_optimize", "_get_value_trace", "_get_version_calculator_flag",
    "_is_default_mobile_cpu_allocator_set", "_jit_is_onnx_log_enabled", "_jit_llga_enabled",
    "_jit_nvfuser_can_be_enabled", "_jit_nvfuser_enabled", "_jit_symbolic_shapes_test_mode_enabled",
    "_jit_texpr_dynamic_shape_enabled", "_jit_texpr_fallback_allowed", "_jit_texpr_fuser_enabled",
    "_jit_texpr_reductions_enabled", "_llvm_enabled",
    "__future__: _overwrite_module_params_on_conversion", "__future__: _swap_module_params_on_conversion",
    "_jit_internal: _overloaded_fns", "_jit_internal: _overloaded_methods",
    "_weights_only_unpickler: _marked_safe_globals_set", "hub: _hub_dir", "nn/parallel/_functions: _streams",
    "serialization: _serialization_tls",
    "backends/__init__: __allow_nonbracketed_mutation_flag",  # raises
    "_opaque_base: _FakeScriptObject_cls", "_ops: cached_ops", "library: _impls",  # torch's own
}  # fmt: skip

OPERATOR_ATTRIBUTES: Final = {
    "_abstract_fn", "_autocast_dtype", "_backend_fns", "_backward_fn", "_init_fn", "_lib", "_opoverload", "_schema",
    "_setup_context_fn", "_torch_dispatch_fns", "_used_triton_kernels", "_vmap_fn",
    "_disabled_kernel",  # its kernels are checked when it is called
    "_is_inplace", "_is_out", "_name", "_namespace", "_out_kwarg_names", "_tags",  # in the schema and the tags
}  # fmt: skip

REGISTRY_ATTRIBUTES: Final = {
    "effect", "fake_impl", "torch_dispatch_rules",
    "qualname",  # the name of the operator
    "symm_mem_args",  # only for collectives
}  # fmt: skip

# What torch itself adds to the keys of its two caches besides the graph and the inputs.
TORCHS_KEYS: Final = {
    "autocast_state", "autograd_config", "compile_on_one_rank", "cuda_matmul_settings",
    "custom_backend_codegen_configs", "custom_backend_codegen_implications", "custom_backend_passes",
    "default_cuda_device_index", "default_dtype", "deterministic_algorithms", "deterministic_algorithms_settings",
    "grad_enabled", "inductor_config", "provenance_tracking_level", "provenance_tracking_to_timeline",
    "sac_context_fn_hashes", "system_info", "torch_version",
    # Settings with code, which the key identifies by their uuid().
    "_custom_partitioner_fn", "_fuse_ddp_communication_passes", "_post_fusion_custom_pass", "_pre_fusion_custom_pass",
    "custom_estimator_solver_uuids", "joint_custom_post_pass", "joint_custom_pre_pass", "post_grad_custom_post_pass",
    "post_grad_custom_pre_pass", "pre_grad_custom_pass",
    # Graphs that have them are not cached.
    "act_input_paths", "cudagraph_annotation", "cudagraph_override", "inductor_config_comms",
    "saved_tensors_hooks_fx_wrap_cache_hashes", "triton_kernel_source_codes", "user_defined_triton_source",
    # In the graph's text or its notes.
    "nested_inductor_config_patches", "region_activation_memory_budget", "region_activation_memory_budget_annotations",
    # The number of threads is a flag, whichever setting it comes from.
    "cpp_runtime_thread_count",
    # Made by torch from the graph and the settings.
    "aot_config", "cache_key_tag", "example_inputs", "fx_kwargs", "gm", "precompile_enabled",
    # A hint for tuning: results do not depend on it.
    "var_to_hint_override",
}  # fmt: skip

# Metadata that nodes of the compiler's graphs inherit from nodes of dynamo's graph.
METADATA: Final = {
    "custom", "has_backward_hook",  # in the key
    "ac_graph_id", "partitioner_tag", "recompute",  # graphs that have them are not cached
    "from_node", "nn_module_stack", "original_aten", "source_fn_stack", "torch_fn",  # where the node comes from
    "_numeric_debug_handle", "quantization_tag",  # only for torch.export
}  # fmt: skip

REGISTRATIONS: Final = {
    # `code/torch_tables.py` and `key/ops.py` read what they register.
    "register_autocast", "register_autograd", "register_backend_for_device", "register_codegen_heuristic",
    "register_custom_op_autotuning", "register_decomposition", "register_device_op_overrides", "register_fake",
    "register_fast_op_impl", "register_freezing_graph_pattern", "register_fusion", "register_graph_pattern",
    "register_inductor_choices", "register_kernel", "register_lowering", "register_lowering_pattern", "register_meta",
    "register_op_impl", "register_out_variant", "register_replacement", "register_rng_decomposition",
    "register_template_heuristic", "register_torch_dispatch", "register_vmap",
    # Tensor subclasses and objects in graphs, which are not cached.
    "register_adapter", "register_binary_linear", "register_binary_linear_inplace", "register_binary_nonlinear",
    "register_complex", "register_custom_class", "register_error", "register_fake_class", "register_force_test",
    "register_jagged_ops", "register_nonzero_impl", "register_opaque_type", "register_simple",
    # Torch calls them once for itself; they register its own functions.
    "register_binary_folding_pattern", "register_comm_lowerings", "register_debug_prims", "register_foreach_inplace",
    "register_foreach_pointwise", "register_frexp", "register_graphsafe_run_with_rng_state_op", "register_inplace",
    "register_like", "register_micro_gemm", "register_noop_decomp", "register_onednn_fusion_ops",
    "register_partial_reduction_pattern",
    "register_pointwise", "register_pointwise_numeric", "register_pointwise_numeric_ldf64", "register_quantized_ops",
    "register_run_and_save_rng_state_op", "register_run_dtensor_rng_op", "register_run_with_rng_state_op",
    "register_symm_mem_lowerings", "register_var_std_reduction_dedup_pattern", "register_woq_mm_ops",
    # Export, other tools, other devices, Triton kernels of users.
    "register_algebraic_expressions_inference_rule", "register_aoti_compile_backend", "register_benchmarker",
    "register_buffer_assignment_hook", "register_check_mem_op", "register_decomposition_for_jvp",
    "register_device_info", "register_graphsafe_rng_device_type", "register_inference_rule",
    "register_kernel_access_op", "register_op_dtype_propagation_rules", "register_op_requires_libdevice_fp64",
    "register_pointwise_op", "register_propagate_rule", "register_pytree_flatten_spec", "register_refinement_rule",
    "register_transformation_rule", "registered_inductor_choices",
}  # fmt: skip


def find_config_modules() -> set[str]:
    """Return the files of torch that contain settings."""
    files = (path for path in _TORCH.rglob("*config*.py") if "testing" not in path.parts)
    found = (path for path in files if "\ninstall_config_module(" in path.read_text(encoding="utf-8"))
    return {path.relative_to(_TORCH).as_posix() for path in found}


def find_dynamo_settings() -> set[str]:
    """Return the settings of dynamo that the compiler reads."""
    return _find(r"\b(?:dynamo_config|_dynamo\.config)\.(\w+)")


def find_compiler_settings() -> set[str]:
    """Return the settings of torch.compiler that the compiler reads."""
    return _find(r"\b(?:compiler_config|cconfig|compiler\.config)\.(\w+)")


def find_registrations() -> set[str]:
    """Return the functions with which code can add to what the compiler does."""
    return _find(r"^def (register\w*)\(")


def find_metadata() -> set[str]:
    """Return the metadata that nodes of the compiler's graphs inherit."""
    return set(_COPY_META_FIELDS)


def find_trace_settings() -> set[str]:
    """Return the settings of inductor that are left out of the key by their prefix."""
    config: Any = inductor_config
    return {name for name in config.get_config_copy() if name.startswith("trace.")}


def find_global_state() -> set[str]:
    """Return the global state for which dynamo guards every graph."""
    guard: Any = GlobalStateGuard()
    return set(json.loads(guard.__getstate__()))


def find_getters() -> set[str]:
    """Return the functions of `torch._C` that read a global state, and the variables that torch's modules assign."""
    found = {name for name in dir(torch._C) if _GETTER.match(name) and _needs_no_arguments(name)}
    for path in chain.from_iterable(_TORCH.glob(pattern) for pattern in _STATEFUL_FILES):
        variables = re.findall(r"^ +global (\w+)$", path.read_text(encoding="utf-8"), re.M)
        found |= {f"{path.relative_to(_TORCH).with_suffix('').as_posix()}: {name}" for name in variables}
    return found - set(flags.STATE)


def _needs_no_arguments(name: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(torch._C, name)()
    except Exception:  # noqa: BLE001 - functions that need arguments raise anything
        return False
    return True


def find_operator_attributes() -> set[str]:
    """Return the attributes in which a custom operator keeps its code."""
    return set(vars(_define_operator()))


def find_registry_attributes() -> set[str]:
    """Return the attributes in which torch.library keeps what is added to an operator."""
    return set(vars(singleton.find(_define_operator()._qualname)))


def find_torchs_keys() -> set[str]:
    """Return what torch's own caches put into their keys."""
    graph = _find_class("_inductor/codecache.py", "FxGraphHashDetails")
    autograd = _find_class("_functorch/_aot_autograd/autograd_cache.py", "AOTAutogradCacheDetails")
    return set(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", graph + autograd))


def _find_class(file: str, name: str) -> str:
    found = re.search(rf"^class {name}\b.*?(?=^\S)", (_TORCH / file).read_text(encoding="utf-8"), re.M | re.S)
    assert found, f"{file} has no class {name}"
    return found[0]


@functools.cache
def _define_operator() -> CustomOpDef:
    def implement(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    return torch.library.custom_op("holdfast_review::operator", implement, mutates_args=())


def _find(pattern: str) -> set[str]:
    compiled = re.compile(pattern, re.M)
    return {name for text in _read_compiler() for name in compiled.findall(text)}


@functools.cache
def _read_compiler() -> tuple[str, ...]:
    files = (path for folder in _COMPILER for path in (_TORCH / folder).rglob("*.py"))
    return tuple(path.read_text(encoding="utf-8") for path in files)
