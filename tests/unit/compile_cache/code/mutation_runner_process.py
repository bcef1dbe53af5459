"""Starts `mutation_runner.py` and sends it mutations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from typing_extensions import Self

from tests.unit.compile_cache.code.mutations import Mutation

ROOT: Final = Path(__file__).parents[4]


class Runner:
    """A process that runs both versions of a mutation."""

    def __init__(self, what: str, folder: Path) -> None:
        """Start the process. `what` is what it returns (see `mutation_runner.py`), and `folder` is for its files."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        # With one thread torch's compiler starts no pool of workers, whose threads a forked child would not have.
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.unit.compile_cache.code.mutation_runner", what, str(folder)],
                env=environment | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def ask(self, mutation: Mutation) -> dict[str, Any]:
        """Return the results of both versions, by role."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{mutation.name}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError(self._log.read_text()[-4000:])
