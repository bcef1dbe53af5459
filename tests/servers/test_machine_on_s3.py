"""The state machine of repositories, on the small S3 server: whatever is done, it shows what a dict holds."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.cloud.place import parse_place
from holdfast.repo.upkeep.collect import collect
from tests.kit.s3_server import BUCKET, S3Server, serve_s3
from tests.stateful.test_repository_machine import NOW, RepositoryMachine
from tests.unit.objects.cloud.servers import QUICK

_LONG_S = 1e8


class ClockedStore(CloudStore):
    """A store that knows the clock of its server, which is moved by the test, without asking."""

    def __init__(self, server: S3Server, prefix: str) -> None:
        options: dict[str, Any] = {**server.options, "retry_config": QUICK}
        super().__init__(parse_place(f"s3://{BUCKET}/{prefix}"), options=options)
        self._server = server

    def clock(self) -> float:
        return time.time() + self._server.skew_s


class MachineOnS3(RepositoryMachine):
    """Two stores in one bucket."""

    def make_stores(self) -> None:
        self._stack = ExitStack()
        self._server = self._stack.enter_context(serve_s3())
        self.advance = self._advance
        self.store = ClockedStore(self._server, "first")
        self.second = ClockedStore(self._server, "second")

    def collect_at_last(self) -> None:
        # Nobody can be alone on a server: the first collection marks, and a later one sweeps.
        for _ in range(3):
            self._advance(_LONG_S)
            collect(self.store, NOW)

    def teardown(self) -> None:
        with self._stack:
            super().teardown()

    def _advance(self, seconds: float) -> None:
        self._server.skew_s += seconds


class QuickMachine(MachineOnS3):
    """A few steps, in every run of the tests."""


QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

TestQuickly = QuickMachine.TestCase
TestQuickly.settings = settings(QUIET, max_examples=3, stateful_step_count=6)

MachineOnS3.TestCase.settings = settings(QUIET, max_examples=60, stateful_step_count=30)
TestAtLength = pytest.mark.slow(MachineOnS3.TestCase)
