"""Equal work has equal keys in every process; what can change a result changes its part of the key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from holdfast.compile_cache.key_parts import PARTS
from tests.kit.graph_key_cases import OTHER, SAME, Pair
from tests.kit.patience import PATIENCE_S

_ROOT: Final = Path(__file__).parents[4]
_LIST: Final = "import json; from tests.kit.graph_key_cases import list_digests; print(json.dumps(list_digests()))"


@pytest.mark.parametrize("pair", SAME, ids=lambda pair: pair.name)
def test_equal_work_has_one_key(pair: Pair) -> None:
    one, other = pair.one(), pair.other()

    assert {part: other.parts[part] for part in PARTS} == {part: one.parts[part] for part in PARTS}
    assert other.digest == one.digest


@pytest.mark.parametrize("pair", OTHER, ids=lambda pair: pair.name)
def test_another_result_has_another_key(pair: Pair) -> None:
    one, other = pair.one(), pair.other()

    assert one.digest != other.digest
    assert {part for part in PARTS if one.digests[part] != other.digests[part]} == set(pair.parts)


def test_the_table_is_long_enough() -> None:
    assert len(SAME) >= 20
    assert len(OTHER) >= 40
    assert len({pair.name for pair in SAME + OTHER}) == len(SAME + OTHER)


def _start_child(place: Path, seed: str, code: str) -> subprocess.Popen[bytes]:
    place.mkdir()
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(_ROOT), "TMPDIR": str(place)}
    return subprocess.Popen([sys.executable, "-c", code], cwd=place, env=environment, stdout=subprocess.PIPE)


@pytest.mark.slow  # two processes import torch and trace much of the table
def test_processes_with_other_hash_seeds_directories_and_imports_make_the_same_keys(tmp_path: Path) -> None:
    with (
        _start_child(tmp_path / "a", "1", _LIST) as one,
        _start_child(tmp_path / "b", "12345", f"import torch._inductor.compile_fx; {_LIST}") as other,
    ):
        texts = [child.communicate(timeout=PATIENCE_S)[0] for child in (one, other)]

    assert (one.returncode, other.returncode) == (0, 0)
    assert json.loads(texts[0]) == json.loads(texts[1])
