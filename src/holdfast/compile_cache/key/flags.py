"""The key part `flags`: torch's global state. Does not import torch's compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from holdfast.json_text import Json

_AUTOCAST_DEVICES: Final = ("cpu", "cuda")

STATE: Final = (
    "_get_blas_preferred_backend",
    "_get_cpu_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cudnn_benchmark",
    "_get_cudnn_depthwise_kernel",
    "_get_cudnn_deterministic",
    "_get_cudnn_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_fa3_sdp_enabled",
    "_get_fa4_sdp_enabled",
    "_get_flash_sdp_enabled",
    "_get_float32_matmul_precision",
    "_get_linalg_preferred_backend",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_math_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_miopen_immediate",
    "_get_mkldnn_deterministic",
    "_get_mkldnn_enabled",
    "_get_native_aot_enabled",
    "_get_nnpack_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_qengine",
    "_get_rocm_fa_preferred_backend",
    "_get_sdp_priority_order",
    "_get_sm_carveout_experimental",
    "_is_view_replay_enabled",
)
"""Functions of `torch._C` that read what affects compiled code. A test compares them with all that torch has."""

_FP32_PRECISION: Final = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "conv"),
    ("cuda", "matmul"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "conv"),
    ("mkldnn", "matmul"),
    ("mkldnn", "rnn"),
)
"""The libraries and operations that have a precision of their own. It includes what the older `allow_tf32` sets."""

# Any: most of these are properties that torch adds to modules at run time, so type checkers do not know them.
_BACKENDS: Final[Any] = torch.backends


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
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "current_device": torch.cuda.current_device() if "cuda" in kinds and torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "backends": _describe_backends(),
    }


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
        **{name.removeprefix("_get_"): _read_state(name) for name in STATE},
        "fp32_precision": [torch._C._get_fp32_precision_getter(backend, op) for backend, op in _FP32_PRECISION],
        "mha_fastpath": backends.mha.get_fastpath_enabled(),
        "native": _describe_native(),
        "opt_einsum": [backends.opt_einsum.enabled, backends.opt_einsum.strategy],
    }


def _describe_native() -> Json:
    """Return which kernels written in Python replace those of torch's operators; see torch.backends.python_native."""
    # Private: the public functions show neither the order of the kernels nor what is disabled.
    registry = sys.modules.get("torch._native.registry")
    kernels: Mapping[Any, Any] = getattr(registry, "_graphs", {})
    disabled = getattr(registry, "_filter_state", None)
    return {
        "disabled": {name: sorted(names) for name, names in sorted(vars(disabled).items())} if disabled else None,
        "kernels": {"/".join(target): [each.node_id for each in found] for target, found in sorted(kernels.items())},
    }


def _read_state(function: str) -> Json:
    """Return a global state of torch; None if this version does not have it."""
    read: Callable[[], Any] | None = getattr(torch._C, function, None)
    value = None if read is None else read()
    if isinstance(value, tuple | list):
        return [*value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)
