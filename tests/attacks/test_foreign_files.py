"""A hostile or broken file to import gets one sentence, in little time and memory, and changes nothing."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from attacks.foreign_files import FILES, PWNED
from holdfast.cli.main import main
from tests.cli.runs import digest_tree

_MOST_S = 2.0
_MOST_BYTES = 200 << 20


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_in_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "store"
    holdfast.open(store).save("good", {"x": 1})
    build: Callable[[Path], Path] = FILES[name]
    (tmp_path / "given").mkdir()
    path = build(tmp_path / "given")
    before = digest_tree(store)
    tracemalloc.start()
    started = time.process_time()

    code = main(["-s", str(store), "import", str(path), "evil"])

    seconds = time.process_time() - started
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("holdfast: ")
    assert printed.err.count("\n") == 1
    assert "bug in Holdfast" not in printed.err
    assert seconds < _MOST_S
    assert peak_bytes < _MOST_BYTES
    assert digest_tree(store) == before
    assert not (tmp_path / PWNED).exists()
