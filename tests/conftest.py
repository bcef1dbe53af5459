"""What every test shares: the Hypothesis profiles."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

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
