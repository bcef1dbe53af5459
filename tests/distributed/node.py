"""One rank on a node of its own: saves, then saves again and has the network cut in the middle of that.

Run as `python -m tests.distributed.node RANK FOLDER ADDRESS`; the store is in the folder, and so is what it tells.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

import holdfast
from tests.distributed.checkpoint.test_checkpoint_rank_faults import strike
from tests.distributed.outcomes import report_outcome
from tests.kit.patience import PATIENCE_S

TIMEOUT_S: Final = 12.0
PORT: Final = 29_417


def wait_file(path: Path, *, limit_s: float = PATIENCE_S) -> None:
    """Wait until a file is there."""
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.02)


def main(rank: int, folder: Path, address: str) -> None:
    """Be a rank of two."""
    url = f"tcp://{address}:{PORT}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE_S))
    with holdfast.open(folder / "store") as store:
        store.save("run", {"w": torch.zeros(300), "rank": 1}, timeout_s=TIMEOUT_S)

        def wait_cut() -> None:
            (folder / "under way").touch()
            wait_file(folder / "cut")

        if rank == 1:
            strike("write", wait_cut)
        outcome = report_outcome(
            lambda: store.save("run", {"w": torch.ones(300)}, overwrite=True, timeout_s=TIMEOUT_S).generation
        )
    (folder / f"told {rank}").write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    # A group whose other end is gone cannot be taken down in peace.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
