"""Real processes whose real clocks jump by hours, by libfaketime: a writer and a collector on one store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import init_repository
from tests.faults import faketime_scenario
from tests.faults.scenario import check_store, holds, read_state
from tests.filesystems.debian import require
from tests.kit.patience import RUN_S

ROOT: Final = Path(__file__).parents[2]
ROUNDS: Final = 60


def find_library() -> Path:
    require({"faketime": "faketime"})
    found = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
    if found is None:
        pytest.skip("Debian's faketime has no library here")
    return found


def start(role: str, folder: Path, *, is_faked: bool) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    if is_faked:
        (folder / f"{role}.clock").write_text("+0\n")
        environment |= {
            "LD_PRELOAD": str(find_library()),
            "FAKETIME_TIMESTAMP_FILE": str(folder / f"{role}.clock"),
            "FAKETIME_NO_CACHE": "1",
            # Monotonic clocks do not jump on real machines, and files keep the kernel's times.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
    words = [sys.executable, "-m", faketime_scenario.__name__, role, str(folder), str(ROUNDS)]
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "faked", [{"writer"}, {"collector"}, {"writer", "collector"}], ids=lambda roles: " and ".join(sorted(roles))
)
def test_clocks_that_jump_by_hours_lose_nothing_and_hang_nobody(faked: set[str], tmp_path: Path) -> None:
    init_repository(LocalStore(tmp_path / "store"))
    roles = ("writer", "collector")

    processes = {role: start(role, tmp_path, is_faked=role in faked) for role in roles}
    said = {role: process.communicate(timeout=RUN_S) for role, process in processes.items()}
    assert [process.returncode for process in processes.values()] == [0, 0], said
    told: dict[str, dict[str, Any]] = {role: json.loads(text) for role, (text, _) in said.items()}

    for role in roles:
        assert (told[role]["off_s"] > 3600) == (role in faked), told
    assert told["collector"]["deleted"] + told["writer"]["lost"] > 0
    state = read_state(LocalStore(tmp_path / "store"))
    assert set(state.names) == {f"run/{number}" for number in told["writer"]["saved"]}
    for number in told["writer"]["saved"]:
        assert holds(state, f"run/{number}", faketime_scenario.make_content(number))
    findings = check_store(LocalStore(tmp_path / "store"))
    assert [finding for finding in findings if finding.severity == "error"] == []
