"""What every test shares: the Hypothesis profiles, and the mode of new directories."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Unsigned compiled graphs are refused where a group can write, as many systems let it by default.
os.umask(0o022)

# dev: quick, random, remembers what failed. ci: the same examples each time, and says how to repeat a failure.
# deep: for a night. No deadlines: on a shared machine they measure the neighbours.
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=100,
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
