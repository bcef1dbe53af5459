"""The key part `flags`: torch's global state. Does not import torch's compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from holdfast.json_text import Json

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
