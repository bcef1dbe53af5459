"""The key part `flags`: torch's global state at the time of a call, such as grad mode, precision and backends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from holdfast.json_text import Json

_AUTOCAST_DEVICES: Final = ("cpu", "cuda")

# Any: most of these are properties that torch adds to modules at run time, so type checkers do not know them.
_BACKENDS: Final[Any] = torch.backends
_DETERMINISTIC: Final[Any] = torch.utils.deterministic


def describe_flags(device_types: Iterable[str]) -> Json:
    """Return the global state of torch that affects a call; autocast for CPU, CUDA and `device_types`."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": _describe_autocast({*_AUTOCAST_DEVICES, *device_types} - {"meta"}),
        "anomaly": [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": _DETERMINISTIC.fill_uninitialized_memory,
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "backends": _describe_backends(),
    }


def _describe_autocast(device_types: set[str]) -> Json:
    found = {
        device: str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        for device in sorted(device_types)
    }
    return {**found, "cache": torch.is_autocast_cache_enabled()}


def _describe_backends() -> Json:
    backends = _BACKENDS
    return {
        "cuda.cudnn_sdp": backends.cuda.cudnn_sdp_enabled(),
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
        "opt_einsum": [backends.opt_einsum.enabled, backends.opt_einsum.strategy],
        "quantized": backends.quantized.engine,
    }
