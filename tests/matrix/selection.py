"""The core suites: the tests that must pass with every supported pair of Python and torch."""

from __future__ import annotations

from typing import Final

CORE: Final = (
    "tests/unit",
    "tests/property",
    "tests/contract",
    "tests/compat",
    "tests/cli",
    "tests/distributed",
    "tests/stateful",
    "tests/kit",
    "tests/integration/capture",
    "tests/examples",
)
"""The folders of the core suites; their slow tests are left out."""
SLOW: Final = ("tests/examples/test_demo.py",)
"""Files of the core suites whose slow tests are run as well."""
LEFT_OUT: Final = {
    "tests/unit/compile_cache": "the compile cache supports some versions of torch only",
    "tests/unit/integrations": "needs training frameworks",
    "tests/integration/compile_cache": "the compile cache supports some versions of torch only",
    "tests/integration/frameworks": "needs training frameworks",
    "tests/integration/object_stores": "servers on loopback; the bytes layers do not depend on torch",
    "tests/integration/test_rounds_of_codecs.py": "counts requests; the bytes layers do not depend on torch",
    "tests/integration/test_rounds_of_verbs.py": "counts requests; the bytes layers do not depend on torch",
    "tests/integration/test_accelerator.py": "simulates an accelerator with private names of one torch",
    "tests/integration/test_accelerator_ranks.py": "simulates accelerators with private names of one torch",
    "tests/architecture": "reads the source, which is the same everywhere",
    "tests/docs": "reads the pages, which are the same everywhere",
    "tests/matrix": "tests what runs these suites",
    "tests/mutants": "tests what measures the tests of the core",
    "tests/slow": "tests what runs the slow tests",
    "tests/release": "builds archives, which are the same everywhere",
    "tests/bench": "measures one machine",
    "tests/browser": "needs Chromium; the page does not depend on torch",
    "tests/attacks": "hostile files; the bytes layers do not depend on torch",
    "tests/faults": "failing disks; the bytes layers do not depend on torch",
    "tests/servers": "servers on loopback; the bytes layers do not depend on torch",
    "tests/filesystems": "mounts filesystems; the bytes layers do not depend on torch",
    "tests/interleaving": "orders of threads; the bytes layers do not depend on torch",
    "tests/model": "a model of the protocol, without torch",
}
"""Folders and files that are not part of the core suites, and why."""
