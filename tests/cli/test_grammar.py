"""The verbs, their help pages, and what each of them imports: what it needs and no more."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

from docs.generate import iter_verbs
from holdfast.cli.main import build_parser
from tests.cli.runs import Cli
from tests.kit.on_disk import tmp_path  # noqa: F401 - a fixture
from tests.kit.thinning import thin

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
    thin(
        [
            ["ls"],
            ["ls", "--json"],
            ["ls", "--where", "size > 1KiB", "--sort", "-age", "--columns", "step,size"],
            ["log"],
            ["tag", "best", "snap"],
            ["rm", "snap"],
            ["show", "snap"],
            ["cat", "snap", "config.json"],
            ["get", "snap", "out"],
            ["put", "new", "data/sub"],
            ["check"],
            ["doctor"],
        ]
    ),
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

    assert loaded == {f"holdfast.cli.verbs.{name}" for name in ("names", "ls")}


def test_ls_loads_neither_manifests_nor_upkeep(cli: Cli) -> None:
    loaded = _load(cli, "ls")

    assert {"holdfast.repo.format.manifest", "holdfast.repo.upkeep", "zstandard"} & loaded == set()


@pytest.mark.parametrize("words", thin([["ls"], ["tag"], ["rm", "snap"], ["show", "snap"], ["doctor"]]), ids=" ".join)
def test_verbs_that_need_no_threads_load_none(cli: Cli, words: list[str]) -> None:
    cli.ok("put", "snap", "data/config.json")

    assert "concurrent.futures" not in _load(cli, *words)


VERBS = [
    "init",
    "ls",
    "show",
    "log",
    "follow",
    "bisect",
    "diff",
    "put",
    "get",
    "cat",
    "import",
    "verify-import",
    "export",
    "verify-export",
    "tag",
    "rm",
    "du",
    "prune",
    "gc",
    "check",
    "repair",
    "copy",
    "mirror",
    "cache",
    "run",
    "serve",
    "doctor",
    "completion",
    "help",
]


@pytest.mark.parametrize("words", [words for words, _ in iter_verbs(build_parser())][1:])
def test_every_verb_and_action_has_help_with_an_example(empty: Cli, words: str) -> None:
    code, text = empty.end(*words.split()[1:], "--help")

    assert code == 0
    assert f"\nExample:\n\n    {words}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_verbs_are_these() -> None:
    usage = " ".join(build_parser().format_usage().split())
    assert usage == "usage: holdfast [-h] [-s STORE] [--color WHEN] [--debug] [--profile] [--version] VERB ..."
    help_text = build_parser().format_help()
    assert [line.split()[0] for line in help_text.partition("  VERB\n")[2].partition("\n\n")[0].splitlines()] == VERBS


def test_only_a_verb_that_was_typed_has_arguments_yet() -> None:
    pages = {words: verb.format_usage() for words, verb in iter_verbs(build_parser(["-s", "x", "ls"]))}

    assert pages["holdfast ls"].startswith("usage: holdfast ls [-h] [-l] [--where EXPR]")
    assert pages["holdfast rm"] == "usage: holdfast rm [-h]\n"


def test_every_verb_and_action_prints_json_if_asked() -> None:
    parsers = dict(iter_verbs(build_parser()))
    with_actions = {words for words in parsers if any(other.startswith(f"{words} ") for other in parsers)}

    without = [
        words
        for words, parser in parsers.items()
        if words not in with_actions and "--json" not in parser._option_string_actions
    ]

    assert without == []
