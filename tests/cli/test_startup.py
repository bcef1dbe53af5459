"""A verb loads what it needs and no more."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

from tests.cli.runs import Cli

HEAVY: Final = {"torch", "numpy", "rich", "pathlib", "urllib.parse"}
PROGRAM: Final = (
    "import sys; from holdfast.cli.main import main; code = main();"
    " sys.stderr.write('\\n' + ' '.join(sys.modules)); sys.exit(code)"
)


def _load(cli: Cli, *words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "-s", str(cli.store), *words], capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["ls", "--json"],
        ["tag", "best", "snap"],
        ["rm", "snap"],
        ["show", "snap"],
        ["cat", "snap", "config.json"],
        ["get", "snap", "out"],
        ["put", "new", "data/sub"],
        ["check"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_no_verb_loads_what_is_heavy(cli: Cli, words: list[str]) -> None:
    cli.ok("put", "snap", "data/config.json")

    assert _load(cli, *words) & HEAVY == set()


def test_no_help_page_loads_what_is_heavy() -> None:
    program = "import sys; from holdfast.cli.main import build_parser; build_parser(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert set(done.stdout.split()) & {"torch", "numpy", "rich"} == set()


def test_only_the_module_of_the_verb_is_imported(cli: Cli) -> None:
    loaded = {name for name in _load(cli, "ls") if name.startswith("holdfast.cli.verbs.")}

    assert loaded == {"holdfast.cli.verbs.names"}


@pytest.mark.parametrize("words", [["ls"], ["tag"], ["rm", "snap"], ["show", "snap"], ["doctor"]], ids=" ".join)
def test_verbs_that_need_no_threads_load_none(cli: Cli, words: list[str]) -> None:
    cli.ok("put", "snap", "data/config.json")

    assert "concurrent.futures" not in _load(cli, *words)
