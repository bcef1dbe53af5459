"""What every test shares: Hypothesis profiles, the mode of new directories, interrupts, a process without leftovers."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.kit.hooking import hook  # noqa: F401 - a fixture, for all tests
from tests.kit.leftovers import read_group_variables, read_handlers, remove_leftovers, restore_handlers

# Unsigned compiled graphs are refused where a group can write, as many systems let it by default.
os.umask(0o022)
# A shell that starts a command in the background lets it ignore interrupts, and tests send some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Syncs to a disk take a third of the time of the tests. So `tmp_path` is in memory if it has room.
_MEMORY = "/dev/shm"
if os.path.isdir(_MEMORY) and shutil.disk_usage(_MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)

# dev: quick, random, remembers what failed. ci: the same examples each time, and says how to repeat a failure;
# ci-slow: more of them, with the slow tests. deep: for a night. No deadlines: on a shared machine they measure the
# neighbours.
settings.register_profile("dev", max_examples=50, deadline=None)
for _name, _examples in (("ci", 25), ("ci-slow", 100)):
    settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,
        derandomize=True,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.register_profile(
    "deep",
    max_examples=2000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("dev")


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n auto`: one more than there are cores, because some tests wait."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests without garbage collections, which take half of the time, and let later ones skip the tests."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _leave_no_process_group() -> Iterator[None]:
    """Fail the file that leaves a process group: the tests of later files would run as its rank 0, and fail instead."""
    before, handlers = read_group_variables(), read_handlers()
    yield
    left = [*remove_leftovers(before), *restore_handlers(handlers)]
    assert not left, f"the tests of this file left behind: {', '.join(left)}"
