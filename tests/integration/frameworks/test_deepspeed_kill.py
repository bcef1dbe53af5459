"""A DeepSpeed run that is killed continues as if it had not been."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.kit.capabilities import needs_package
from tests.kit.patience import RUN_S

pytestmark = [pytest.mark.slow, needs_package("deepspeed")]

ROOT = Path(__file__).parents[3]


def run(folder: Path, stage: int, ranks: int, *options: str) -> tuple[bool, list[str]]:
    """Run the script on some ranks; return whether it ended well, and the digest of each rank's result."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = ["-m", "tests.integration.frameworks.deepspeed_run", str(folder), f"--stage={stage}", *options]
    result = subprocess.run([*launch, *script], cwd=ROOT, timeout=RUN_S, check=False)
    digests = [(folder / f"result-{rank}") for rank in range(ranks)]
    return result.returncode == 0, [path.read_text() for path in digests if path.exists()]


@pytest.mark.parametrize(
    ("stage", "ranks", "kill", "last"),
    [
        (0, 1, "in training", 4),
        (1, 2, "in training", 4),
        (2, 2, "in training", 4),
        (2, 2, "in a save", 2),
        (3, 2, "in training", 4),
    ],
)
def test_a_killed_run_ends_as_the_one_that_was_not(
    tmp_path: Path, stage: int, ranks: int, kill: str, last: int
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    ended, expected = run(whole, stage, ranks)
    assert ended
    assert len(expected) == ranks

    assert run(killed, stage, ranks, f"--kill={kill}") == (False, [])
    assert (killed / "out" / "latest").read_text() == f"global_step{last}"
    newest = holdfast.open(killed / "store").latest("run/")
    assert newest is not None
    assert newest.name == f"run/global_step{last}"

    assert run(killed, stage, ranks) == (True, expected)


def test_the_script_that_collects_the_weights_reads_a_checkpoint_in_a_store(tmp_path: Path) -> None:
    assert run(tmp_path, 2, 1)[0]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out")

    saved = holdfast.open(tmp_path / "store").load("run/global_step8")["mp_rank_00_model_states"]["module"]
    assert {name: weight.bfloat16().tolist() for name, weight in weights.items()} == {
        name: weight.tolist() for name, weight in saved.items()
    }
