"""Which store is meant, how a run ends, and what help says."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.cli.verbs import ls
from tests.cli.runs import Cli
from tests.kit.hooking import Hook


def _find_store(cli: Cli, *words: str) -> str:
    return str(cli.bare(*words, "ls", "--json").json["store"])


def test_the_option_wins_over_the_environment_and_that_over_the_directory(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        cli.bare("init", name)
    monkeypatch.chdir(cli.store / "config")
    a, b = (str(cli.folder / name) for name in ("a", "b"))

    assert _find_store(cli) == str(cli.store)
    monkeypatch.setenv("HOLDFAST_STORE", a)
    assert _find_store(cli) == a
    assert _find_store(cli, "-s", b) == b
    assert _find_store(cli, "--store", f"file://{b}") == b
    monkeypatch.setenv("HOLDFAST_STORE", "")
    assert _find_store(cli) == str(cli.store)


def test_a_tilde_means_home(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(cli.folder))
    monkeypatch.setenv("HOLDFAST_STORE", "~/ckpts")

    assert _find_store(cli) == str(cli.store)


def test_no_verb_prints_help_and_exits_with_2(empty: Cli) -> None:
    ran = empty.bare()

    assert ran.code == 2
    assert ran.out.startswith("usage: holdfast [-h] [-s STORE]")


def test_version(empty: Cli) -> None:
    assert empty.end("--version") == (0, f"holdfast {__version__}\n")


@pytest.mark.parametrize(
    "words", [["frob"], ["ls", "--jso"], ["show"], ["put", "x"], ["get", "x"], ["rm"], ["ls", "a", "b"], ["--frob"]]
)
def test_bad_usage_exits_with_2(empty: Cli, words: list[str]) -> None:
    code, text = empty.end(*words)

    assert code == 2
    assert text.startswith("usage: holdfast")


def test_debug_shows_the_traceback(empty: Cli) -> None:
    ran = empty.bare("--debug", "-s", "nowhere", "ls")

    assert ran.code == 2
    assert ran.err.startswith("Traceback")
    assert ran.err.splitlines()[-1].startswith("holdfast: ")


def test_an_interrupt_ends_with_130(cli: Cli, hook: Hook) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    hook(ls, "run_ls", interrupt)

    ran = cli("ls")

    assert (ran.code, ran.out, ran.err) == (130, "", "holdfast: interrupted\n")


def test_a_bug_does_not_pass_for_findings(cli: Cli, hook: Hook) -> None:
    def fail(*_: object) -> int:
        raise ZeroDivisionError("oops")

    hook(ls, "run_ls", fail)

    ran = cli("ls")

    assert ran.code == 2
    assert "Traceback" in ran.err
    assert ran.err.splitlines()[-1] == (
        "holdfast: ZeroDivisionError: oops (this is a bug in Holdfast; please report it)"
    )


def test_an_error_of_many_lines_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = cli("show", "a\nb\x1b[31m")

    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "\x1b" not in ran.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "raise ModuleNotFoundError('No module named torch', name='torch._C')",
            "this needs torch, which is not installed; install it with `pip install torch`",
        ),
        (
            "raise ImportError('libtorch_cpu.so: cannot open\\nmore', name='torch._C')",
            "this needs torch, which is installed but cannot be imported: libtorch_cpu.so: cannot open",
        ),
        (
            "raise OSError('libcudart.so.12: cannot open shared object file')",
            "this needs a package, which is installed but cannot be imported: libcudart.so.12: cannot open shared"
            " object file",
        ),
    ],
    ids=["missing", "broken", "library"],
)
def test_a_package_that_cannot_be_imported_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    (cli.folder / "planted_package.py").write_text(line)
    monkeypatch.syspath_prepend(str(cli.folder))
    monkeypatch.setattr(ls, "run_ls", lambda *_: import_module("planted_package"))

    ran = cli("ls")

    assert (ran.code, ran.out, ran.err) == (2, "", f"holdfast: {said}\n")


def test_a_file_that_is_missing_is_not_taken_for_a_package(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ls, "run_ls", lambda *_: Path("gone").read_text())

    assert cli("ls").err == "holdfast: gone: No such file or directory\n"


def test_a_module_of_ours_that_is_missing_is_a_bug(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ls, "run_ls", lambda *_: import_module("holdfast.gone"))

    assert cli("ls").err.endswith("(this is a bug in Holdfast; please report it)\n")


def test_an_import_that_fails_while_the_verb_is_declared_is_reported(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ls, "declare_ls", lambda _: import_module("no_such_package"))

    ran = cli("ls")

    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("holdfast: this needs no_such_package, which is not installed")


@pytest.mark.parametrize(
    ("variables", "is_colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_no_color_and_a_dumb_terminal_refuse_colours(
    filled: Cli, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_colored: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert ("\x1b[1mNAME" in filled("ls").out) is is_colored


def test_a_choice_on_the_command_line_counts_more_than_the_environment(
    filled: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    ran = filled.bare("--color", "always", "-s", str(filled.store), "diff", "run/step-99", "other")

    assert "\x1b[31m- " in ran.out
    assert "\x1b" not in filled("diff", "run/step-99", "other").out
