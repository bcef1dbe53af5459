"""Formatting, and the progress bar on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.cli import output
from holdfast.cli.output import Output, clean, count, format_bytes, format_time, format_utc
from holdfast.progress import Silent


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (102_400, "100 KiB"),
        (1_023_999, "1000 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 63, "8.0 EiB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_counts() -> None:
    assert [count(1, "entry"), count(2, "entry"), count(0, "pack"), count(2, "key")] == [
        "1 entry",
        "2 entries",
        "0 packs",
        "2 keys",
    ]


def test_times_that_are_no_dates_are_shown_all_the_same() -> None:
    assert format_utc(0.0) == "1970-01-01T00:00:00Z"
    assert format_utc(1e200) is None
    assert format_time(1e200) == "@1e+200"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä 漢", "plain ä 漢"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\u202eevil", r"\u202eevil"),
        ("\x9b31m", r"\x9b31m"),
        ("\ud800", r"\ud800"),
        ("back\\slash", "back\\slash"),
    ],
)
def test_what_could_command_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert clean(text) == shown


def test_a_table_aligns_and_trims(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table(["NAME", "SIZE", "TAGS"], [["a", "1", ""], ["long-name", "100", "x"]], right="SIZE")

    assert capsys.readouterr().out == "NAME       SIZE  TAGS\na             1\nlong-name   100  x\n"


def test_lines_that_were_left_out_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.cut(0)
    output.cut(-3)
    assert capsys.readouterr().out == ""

    output.cut(7)
    assert capsys.readouterr().out == "... and 7 more; --all shows them\n"


def test_json_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    Output().json({"ä": "\x9b\ud800"})

    assert capsys.readouterr().out == '{\n  "\\u00e4": "\\u009b\\ud800"\n}\n'


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(Output().progress(), Silent)


@contextmanager
def _terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Make a pseudo-terminal standard error, and give the side that a person looks at."""
    person, program = os.openpty()
    os.set_blocking(person, False)
    with os.fdopen(program, "w") as stream, monkeypatch.context() as patched:
        patched.setenv("TERM", "xterm")
        patched.setenv("COLUMNS", "120")
        patched.setattr(sys, "stderr", stream)
        yield person
    os.close(person)


def _read_all(terminal: int) -> str:
    """Return all that was written; the terminal hands it out in pieces."""
    seen = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            seen += os.read(terminal, 1 << 16)
    return seen.decode()


def test_long_work_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_BAR_AFTER_S", -1.0)
    with _terminal(monkeypatch) as terminal:
        progress = Output().progress()

        progress.begin("save [bold]x\x1b", 100)
        progress.advance(50)
        progress.end()
        progress.end()

        seen = _read_all(terminal)
    assert r"save [bold]x\x1b" in seen
    assert "50/100 bytes" in seen


def test_short_work_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with _terminal(monkeypatch) as terminal:
        progress = Output().progress()

        progress.begin("save", 100)
        progress.advance(100)
        progress.end()

        with pytest.raises(BlockingIOError):
            os.read(terminal, 1)


@pytest.mark.parametrize(
    ("choice", "is_refused", "is_terminal", "is_colored"),
    [
        ("auto", False, True, True),
        ("auto", True, True, False),
        ("auto", False, False, False),
        ("always", True, False, True),
        ("never", False, True, False),
    ],
)
def test_colours_are_used_on_a_terminal_unless_they_are_refused(
    choice: output.ColorChoice,
    is_refused: bool,
    is_terminal: bool,
    is_colored: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printer = Output()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    printer.choose_color(choice, is_refused=is_refused)

    printer.line("fine", style="good")
    printer.table(["A", "B"], [["1", "\x1b[31m"]])

    colored = "\x1b[32mfine\x1b[0m\n\x1b[1mA  B\x1b[0m\n1  \\x1b[31m\n"
    assert capsys.readouterr().out == (colored if is_colored else "fine\nA  B\n1  \\x1b[31m\n")
