"""The key part `system`: what compiled code is built for, that is torch, Python, C library, processor and GPUs."""

from __future__ import annotations

import functools
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch

from holdfast.compile_cache.key_parts import digest_part
from holdfast.digest import hash_bytes
from holdfast.json_text import Json

FORMAT: Final = 2
"""Increased when the meaning of keys or artifacts changes; everything stored before is then a miss."""

_CPUINFO: Final = "/proc/cpuinfo"
_FLAG_LINES: Final = ("flags", "Features")

# Flags in /proc/cpuinfo that are not instructions: clocks, virtualisation, mitigations. Compilers ignore them, and they
# differ between machines of the same kind.
_NOT_INSTRUCTIONS: Final = frozenset(
    {
        "acpi", "aperfmperf", "apic", "arat", "arch_capabilities", "arch_perfmon", "art", "bts", "cat_l2", "cat_l3",
        "cdp_l2", "cdp_l3", "cmp_legacy", "constant_tsc", "cpb", "cppc", "cpuid", "cpuid_fault", "cqm", "cqm_llc",
        "cqm_mbm_local", "cqm_mbm_total", "cqm_occup_llc", "cr8_legacy", "dca", "debug_swap", "decodeassists",
        "ds_cpl", "dtes64", "dtherm", "dts", "epb", "ept", "ept_ad", "est", "extapic", "extd_apicid", "flexpriority",
        "flush_l1d", "flushbyasid", "hfi", "ht", "hw_pstate", "hwp", "hwp_act_window", "hwp_epp", "hwp_notify",
        "hwp_pkg_req", "hypervisor", "ibpb", "ibpb_exit_to_user", "ibrs", "ibrs_enhanced", "ibs", "ida", "intel_ppin",
        "intel_pt", "invpcid", "invpcid_single", "irperf", "lbrv", "mba", "mca", "mce", "md_clear", "mds_no",
        "monitor", "msr", "mtrr", "nodeid_msr", "nonstop_tsc", "npt", "nrip_save", "osvw", "overflow_recov", "pae",
        "pat", "pausefilter", "pbe", "pcid", "pdcm", "pebs", "perfctr_core", "perfctr_llc", "perfctr_nb",
        "perfmon_v2", "pfthreshold", "pge", "pln", "proc_feedback", "pse", "pse36", "pti", "pts", "rdt_a", "rep_good",
        "rrsba", "rsb_ctxsw", "sep", "sev", "sev_es", "skinit", "sme", "smca", "smep", "smap", "smx", "ssbd", "stibp",
        "stibp_always_on", "succor", "svm", "svm_lock", "tm", "tm2", "topoext", "tpr_shadow", "tsc", "tsc_adjust",
        "tsc_deadline_timer", "tsc_known_freq", "tsc_reliable", "tsc_scale", "tsx_ctrl", "umip", "user_shstk",
        "v_msr", "v_spec_ctrl", "v_vmsave_vmload", "vgif", "vmcb_clean", "vme", "vmmcall", "vmx", "vnmi", "vpid",
        "wdt", "x2apic", "x2avic", "xtopology", "xtpr",
    }
)  # fmt: skip


def describe_system(device_types: Iterable[str]) -> Json:
    """Return what compiled code for these device types depends on besides its source."""
    system = dict(_describe_process())
    # Not in the cached part: it can change while the process runs.
    system["cpu_isa"] = torch.backends.cpu.get_cpu_capability()
    if "cuda" in device_types:
        system["gpus"] = _describe_gpus()
    return system


def digest_systems() -> frozenset[str]:
    """Return the digests that this part can have on this machine: for CPU only and, if there are GPUs, with them."""
    kinds = [("cpu",), ("cpu", "cuda")] if torch.cuda.is_available() else [("cpu",)]
    return frozenset(digest_part("system", describe_system(kind)) for kind in kinds)


def parse_instructions(cpuinfo: str) -> list[str]:
    """Return the instruction sets that all processors in a `/proc/cpuinfo` support, sorted, without other flags."""
    found = [
        set(line.partition(":")[2].split())
        for line in cpuinfo.splitlines()
        if line.partition(":")[0].strip() in _FLAG_LINES
    ]
    return sorted(set.intersection(*found) - _NOT_INSTRUCTIONS) if found else []


@functools.cache
def _describe_process() -> Json:
    """Return the part that cannot change while this process runs."""
    return {
        "format": FORMAT,
        "torch": str(torch.__version__),
        "torch_git": str(torch.version.git_version),
        "torch_build": hash_bytes(_read_build().encode()).hex(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": _find_version("triton") or _find_version("pytorch-triton"),
        "python": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
        "libc": _read_libc(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "byteorder": sys.byteorder,
        "cpu_instructions": " ".join(_read_instructions()),
    }


def _read_build() -> str:
    """Return how torch was built, without the line on the current processor, which `cpu_isa` covers."""
    return "\n".join(line for line in torch.__config__.show().splitlines() if "CPU capability" not in line)


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read_libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, OSError, ValueError):
        return " ".join(platform.libc_ver())


def _read_instructions() -> list[str]:
    try:
        with open(_CPUINFO, encoding="ascii", errors="replace") as file:
            return parse_instructions(file.read())
    except OSError:
        return [platform.processor()]


@functools.cache
def _describe_gpus() -> Json:
    """Return a description of each GPU; only one if all are of the same kind, so that their number does not matter."""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = [f"{each.name}, {each.major}.{each.minor}, {each.multi_processor_count} multiprocessors" for each in found]
    return kinds[:1] if len(set(kinds)) == 1 else kinds
