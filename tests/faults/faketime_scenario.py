"""One process of test_faketime.py: saves or collects again and again, while libfaketime makes its clock jump.

Run as `python -m tests.faults.faketime_scenario ROLE FOLDER COUNT`. libfaketime reads the file FOLDER/ROLE.clock;
the process itself writes another jump to it before each round.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, Final

from holdfast.errors import LeaseLost, NotFound
from holdfast.objects.local.local_store import LocalStore, LockWait
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from tests.faults.scenario import random_bytes, save_content

JUMPS: Final = ("+0", "+7h", "-7h", "+400d", "-3h", "+20m", "-400d")
_SHARED: Final = {f"shared {number}": random_bytes(f"shared {number}", 30_000) for number in range(4)}


def make_content(number: int) -> dict[str, bytes]:
    return {**_SHARED, "own": random_bytes(f"own {number}", 20_000)}


def jump(folder: Path, role: str, chance: random.Random) -> None:
    """Have the clock of this process jump."""
    (folder / f"{role}.clock").write_text(chance.choice(JUMPS) + "\n")


def write(store: LocalStore, number: int, told: dict[str, Any]) -> None:
    """Save, then delete what was saved two rounds ago, so that there is always something dead to share."""
    try:
        save_content(store, f"run/{number}", make_content(number))
    except LeaseLost:
        told["lost"] += 1
    else:
        told["saved"].append(number)
    if number >= 2 and number - 2 in told["saved"]:
        delete_snapshot(store, f"run/{number - 2}")
        told["saved"].remove(number - 2)


def _sleep(seconds: float) -> None:
    # Not time.sleep: that asks for a moment of the monotonic clock, for which libfaketime raises EINVAL.
    select.select([], [], [], seconds)


def gather(store: LocalStore, told: dict[str, Any]) -> None:
    try:
        told["deleted"] += collect(store, Rules(min_age_s=0.0, wait_s=0.2, sleep=_sleep)).deleted
    except NotFound:
        told["lost"] += 1  # another root vanished while it looked


def main(role: str, folder: Path, rounds: int) -> None:
    """Run the rounds, with a collector as long as the writer works; return the outcome and the clock's error."""
    store = LocalStore(folder / "store", lock_wait=LockWait(sleep=_sleep))
    chance = random.Random(role)
    told: dict[str, Any] = {"saved": [], "lost": 0, "deleted": 0, "off_s": 0.0}
    # Files get the time of the kernel, which is not faked.
    real_s = (folder / "store").stat().st_mtime
    try:
        for number in range(rounds) if role == "writer" else count():
            if role == "collector" and (folder / "done").exists():
                break
            jump(folder, role, chance)
            told["off_s"] = max(told["off_s"], abs(time.time() - real_s))
            if role == "writer":
                write(store, number, told)
            else:
                gather(store, told)
    finally:
        (folder / "done").touch()
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
